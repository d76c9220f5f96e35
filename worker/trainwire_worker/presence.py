"""Who is still there, and what follows when somebody goes: end of input, a broken pipe, a dead parent, signals."""

import signal
import time

from .ending import Ending
from .options import Options
from .run import Run
from .signals import ENDING, ParentWatch
from .timers import Timers


class Presence:
    """The policies about those who steer the run and those who end it from outside."""

    def __init__(self, options: Options, run: Run, timers: Timers) -> None:
        self._options = options
        self._run = run
        self._timers = timers
        self._parent = ParentWatch(options.parent_pid)
        self._detached = False
        self._first_signal: float | None = None

    def end_of_input(self) -> None:
        """React to the end of stdin."""
        policy = self._options.on_eof
        if self._run.state.snapshot.phase == "lingering" and policy != "continue":
            self._run.stop_because(Ending("completed", "end of input", 0), "detach", {"reason": "end of input"})
        elif self._run.released:
            self.detach("end of input")
        elif policy == "stop":
            self._run.stop_because(Ending("interrupted", "end of input", 20), "detach", {"reason": "end of input"})
        elif policy is None and self._options.mode == "serve":
            self.detach("end of input")

    def signals(self, numbers: list[int]) -> None:
        """React to signals."""
        for number in numbers:
            if number not in ENDING:
                continue
            now, name = time.monotonic(), signal.Signals(number).name
            if self._first_signal is None:
                self._first_signal = now
                self._run.stop_because(Ending("interrupted", f"signal {name}", 21), "signal", {"signal": name})
            elif now - self._first_signal >= self._options.signal_grace:
                self._run.leave_now(Ending("interrupted", f"second signal: {name}", 128 + number))
            else:
                # Terminals and launchers deliver one Ctrl-C twice: only a later one is a second one.
                self._first_signal = now

    def watch_parent(self) -> None:
        """Look after the parent process now and then, if it is to be watched."""
        if self._options.mode != "serve" and self._options.parent_pid is None:
            return
        if self._parent.gone():
            self.detach("the parent process is gone")
        else:
            self._timers.after(self._options.parent_poll, self.watch_parent)

    def detach(self, reason: str) -> None:
        """React to a front end that is gone, by the policy."""
        run = self._run
        if self._detached or run.state.ended is not None:
            return
        if not run.active:
            if not run.checking:
                run.end_idle(reason)
            return
        self._detached = True
        if run.outlives:
            run.state.log("warn", f"The run goes on without a front end: {reason}.", "uncontrolled")
        else:
            run.stop_because(Ending("interrupted", reason, 20), "detach", {"reason": reason})
