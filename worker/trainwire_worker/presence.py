"""Who is still there, and what follows when somebody goes: end of input, a broken pipe, a dead parent, signals."""

import signal
import time

from .control import Controllers
from .ending import Ending
from .options import Options
from .run import Run
from .signals import ENDING, ParentWatch
from .timers import Timers


class Presence:
    """The policies about those who steer the run and those who end it from outside."""

    def __init__(self, options: Options, run: Run, timers: Timers, controllers: Controllers) -> None:
        self._options = options
        self._run = run
        self._timers = timers
        self._controllers = controllers
        self._parent = ParentWatch(options.parent_pid)
        self._input_over = False
        self._detached = False
        self._leaving: tuple[str, bool] | None = None
        """Why a worker without a run is to end, and whether a run that begins meanwhile must stop."""
        self._first_signal: float | None = None

    def end_of_input(self) -> None:
        """React to the end of stdin."""
        self._input_over = True
        policy = self._options.on_eof
        if policy == "stop" and not self._run.released:
            self._leave("end of input", must_stop=True)
        elif self._run.released or (policy is None and self._options.mode == "serve"):
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
        if self._detached:
            return
        if self._run.active and self._run.outlives:
            self._detached = True
            self._run.state.log("warn", f"The run goes on without a front end: {reason}.", "uncontrolled")
        else:
            self._leave(reason, must_stop=False)

    def _leave(self, reason: str, *, must_stop: bool) -> None:
        """End because the front end is gone: a run with a checkpoint, a worker without one when it is done."""
        if self._run.active:
            self._detached = True
            self._run.stop_because(Ending("interrupted", reason, 20), "detach", {"reason": reason})
        else:
            self._leaving = (reason, must_stop)

    def settle(self) -> None:
        """End what nobody waits for: a worker without a run, or a run that only lingers."""
        run = self._run
        if self._leaving is not None and not run.checking:
            (reason, must_stop), self._leaving = self._leaving, None
            if not run.active:
                run.end_idle(reason)
            elif must_stop:
                self._leave(reason, must_stop=True)
            else:
                self.detach(reason)
        if run.state.snapshot.phase == "lingering" and self._controllers.current is None:
            over = self._input_over and self._options.on_eof != "continue"
            if over or self._detached:
                run.stop_because(Ending("completed", "end of input", 0), "detach", {"reason": "end of input"})
