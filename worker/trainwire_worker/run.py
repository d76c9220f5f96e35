"""At most one run: orders go to the engine, and one cause decides the end."""

from collections import deque
from typing import Any

from trainwire_protocol import commands as c
from trainwire_protocol.channel import Order, StopOrder
from trainwire_protocol.errors import EngineDied, Internal, WrongState, from_code
from trainwire_protocol.events import Phase, Source

from .beginning import Beginning
from .emitter import Clock, Emitter
from .ending import Ending, failure
from .engine_session import Departure
from .host import Pending
from .options import Options
from .restarts import Restarts
from .snapshot import Snapshot
from .state import RunState
from .timers import Mailbox, Timers
from .validation import Validation

KILL_SECONDS = 2.0
"""How long a killed engine is waited for."""


class Run:
    """What clients and the outside ask of the run."""

    def __init__(
        self, options: Options, emitter: Emitter, snapshot: Snapshot, clock: Clock, timers: Timers, mailbox: Mailbox
    ) -> None:
        self.state = RunState(options, emitter, snapshot, clock, timers, mailbox)
        self.state.desk.host = self
        self.beginning = Beginning(self.state)
        self._validation = Validation(self.state)
        self.released = False
        """True once a client let the run outlive it."""
        self._later: deque[tuple[c.Start | c.Validate, int]] = deque()
        self._killed = False
        self._restarts = Restarts(self.state, self.beginning)

    @property
    def active(self) -> bool:
        """True from the acceptance of a config until the end."""
        return self.state.request is not None and self.state.ended is None

    @property
    def checking(self) -> bool:
        """True while a `validate` command waits for its engine."""
        return self._validation.running

    # What the desk asks

    def start_run(self, command: c.Start, order: int) -> None:
        """Begin the run of a `start` command, after the checks that were asked for before."""
        if self.checking:
            self._later.append((command, order))
        else:
            self.beginning.from_command(command, order)

    def check_config(self, command: c.Validate, order: int) -> None:
        """Answer `validate`, one after the other."""
        if self.checking:
            self._later.append((command, order))
        else:
            self._validation.check(command, order)

    def _take_up(self) -> None:
        """Go on with what waited for a check."""
        while self._later and not self.checking and self.state.ended is None:
            command, order = self._later.popleft()
            if self.active:
                self.state.desk.answer(order, None, WrongState("A run has begun meanwhile."))
            elif isinstance(command, c.Start):
                self.beginning.from_command(command, order)
            else:
                self._validation.check(command, order)

    def give_order(self, order: Order) -> None:
        """Hand an order to the engine; one that comes before the engine is there is kept for it."""
        if self.state.engine is not None:
            self.state.engine.send(order)
        else:
            self.beginning.keep(order)

    def enter(self, phase: Phase, message: str) -> None:
        """Change the phase, and say so."""
        self.state.enter(phase, message)

    def status_result(self) -> dict[str, Any]:
        """Give the snapshot for `status`."""
        return self.state.as_result()

    def now_ms(self) -> int:
        """Give the time in ms since the epoch."""
        return self.state.clock.now_ms()

    def stop_run(self, pending: Pending, *, save: bool) -> None:
        """End the run because a client asks."""
        self.state.desk.file(pending)
        self._stop(Ending("stopped", "stop", 0), save=save)

    def let_go(self) -> bool:
        """Let the run outlive its front end; false if it would have done so already."""
        changed, self.released = not self.outlives, True
        return changed

    @property
    def outlives(self) -> bool:
        """True if the run goes on when its front end is gone."""
        return self.released or self.state.options.on_detach == "continue"

    # Why it ends

    def stop_because(self, ending: Ending, source: Source, parameters: dict[str, Any]) -> None:
        """End the run gracefully for a reason of the outside; a run that is ending already keeps its reason."""
        if self.state.ending is None and self.state.ended is None:
            self.state.desk.record("stop", parameters, source)
            self._stop(ending, save=True)

    def _stop(self, ending: Ending, *, save: bool) -> None:
        state = self.state
        if state.ending is not None:
            return
        state.ending = ending
        if state.snapshot.phase == "lingering":
            state.ending = Ending("completed", "stop" if ending.exit_code == 0 else ending.reason, 0)
        if state.request is not None:
            state.enter("stopping", f"Stopping: {ending.reason}.")
        if state.request is None or (state.engine is None and state.prepared is not None):
            self.kill_engine()
            state.conclude(state.ending)
            return
        if state.engine is not None:
            state.engine.send(StopOrder(order=0, save=save))
        if not state.snapshot.attempt_started:
            state.timers.after(state.options.stop_grace, self._stop_before_first_update)

    def _stop_before_first_update(self) -> None:
        """Nothing is lost by ending what has not trained yet and is too busy to listen."""
        state = self.state
        if state.engine is None and state.ending is not None:
            state.conclude(state.ending)
        elif state.engine is not None and not state.snapshot.attempt_started and state.engine.finished is None:
            self._killed = True
            self.kill_engine()

    def kill_engine(self) -> None:
        """End the engine now."""
        if self.state.engine is not None:
            self.state.engine.kill()

    def leave_now(self, ending: Ending) -> None:
        """End at once, without waiting for the engine."""
        self.kill_engine()
        self.state.conclude(ending)

    def crash(self, error: BaseException) -> None:
        """End because of a bug in the worker itself; the engine saves what it has, as when the worker is killed."""
        if self.state.engine is not None:
            self.state.engine.abandon()
            self.state.engine = None
        problem = Internal(f"{type(error).__name__}: {error}", hint="This is a bug in trainwire; please report it.")
        self.state.conclude(failure(problem))

    def end_idle(self, reason: str) -> None:
        """End a worker that has no run."""
        self.state.conclude(Ending("stopped", reason, 0))

    # The engine's end

    @property
    def engine_is_closing(self) -> bool:
        """True once the engine's channel is closed; its death is told by a signal besides."""
        return self.state.engine is not None and self.state.engine.link.closed

    def check_engine(self) -> None:
        """Notice an engine that has left, and decide what follows."""
        departure = self.state.engine.departure() if self.state.engine is not None else None
        if departure is None:
            return
        self.state.engine = None
        if self.checking:
            self._validation.engine_left(departure)
            self._take_up()
        elif self.state.ended is None:
            self._engine_left(departure)

    def _engine_left(self, departure: Departure) -> None:
        state, finished, failed = self.state, departure.finished, departure.failed
        if failed is not None and failed.code != EngineDied.code:
            error = from_code(failed.code, failed.message, hint=failed.hint, **(failed.details or {}))
            state.conclude(failure(error), checkpoint=failed.checkpoint)
        elif finished is not None and finished.outcome == "completed":
            reason = state.ending.reason if state.ending else state.snapshot.completed or "finished"
            state.conclude(Ending("completed", reason, 0), finished.step, finished.checkpoint)
        elif finished is not None and state.ending is not None:
            state.conclude(state.ending, finished.step, finished.checkpoint)
        elif self._killed and state.ending is not None:
            state.conclude(state.ending)
        elif failed is not None:
            # One of several ranks died, and another one says so.
            found = {"stderr": departure.printed, "checkpoint": failed.checkpoint, **(failed.details or {})}
            self._engine_died(EngineDied(failed.message, hint=failed.hint, **found), failed.checkpoint)
        else:
            self._engine_died(departure.as_error(state.snapshot.last_checkpoint))

    def _engine_died(self, error: EngineDied, checkpoint: str | None = None) -> None:
        if self.state.ending is not None or not self._restarts.begin(error):
            self.state.conclude(failure(error), checkpoint=checkpoint)

    def close(self) -> None:
        """Let go of the log and the lock."""
        state = self.state
        if state.engine is not None:
            state.engine.kill()
            state.engine.link.wait_dead(KILL_SECONDS)
        if state.prepared is not None:
            state.prepared.log.close()
            state.prepared.lock.release()
