"""The worker's orders: taken between updates, and while longer work yields to a pause or a stop."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any, Protocol

from trainwire_engine.failures import as_error
from trainwire_engine.ranks import Alone
from trainwire_engine.reports import Reports
from trainwire_engine.state import Stopwatch, TrainState
from trainwire_protocol.channel import (
    AnyOrder,
    CheckpointOrder,
    EngineChannel,
    EvalOrder,
    GenerateOrder,
    PauseOrder,
    ResumeOrder,
    SetOrder,
    StopOrder,
)
from trainwire_protocol.errors import Internal, ShuttingDown, WrongState


class Actions(Protocol):
    """What orders ask for besides standing still and going on; each answers its order, now or later."""

    def checkpoint(self, order: CheckpointOrder) -> None: ...

    def apply(self, order: SetOrder) -> None: ...

    def evaluate(self, order: EvalOrder, interrupted: Callable[[], bool]) -> None: ...

    def generate(self, order: GenerateOrder, interrupted: Callable[[], bool]) -> None: ...

    def settle(self) -> None:
        """Finish what runs in the background and give memory back: training stands still."""


class Control:
    """Says whether the run goes on: `serve` between updates, `interrupted` between pieces of longer work."""

    def __init__(
        self,
        channel: EngineChannel,
        reports: Reports,
        state: TrainState,
        actions: Actions,
        stopwatch: Stopwatch,
        ranks: Alone | None = None,
    ) -> None:
        self._channel = channel
        self._reports = reports
        self._state = state
        self._actions = actions
        self._stopwatch = stopwatch
        self._ranks = ranks or Alone()
        self._pause_at: tuple[int, int] | None = None
        self.paused = False
        self.lingering = False
        self.stop: StopOrder | None = None
        """The order that ends the run; it is answered once the run has ended."""

    @property
    def gone(self) -> bool:
        """Whether the worker is gone."""
        return self._channel.closed

    def serve(self) -> bool:
        """Carry out the orders that have arrived, and stand still while paused; false if the run is to stop.

        Among several ranks that is done at a boundary that all of them know of.
        """
        if not self._ranks.agreed and not self.paused:
            return True
        if self._pause_at is not None and self._state.step >= self._pause_at[0] and not self.paused:
            self.pause(self._pause_at[1])
        going_on = self._serve(block=True)
        if going_on:
            self._ranks.tell("go")
        return going_on

    def calls(self) -> bool:
        """Whether there is something to serve once the running update is done."""
        reached = self._pause_at is not None and self._state.step + 1 >= self._pause_at[0]
        return reached or self._channel.pending()

    def interrupted(self) -> bool:
        """Let a pause take effect in the middle of longer work; true if the run is to stop.

        Work that was ordered during a pause is not held up by that pause. Orders are taken in the order they
        came; other evaluations and generations wait for their turn unless a pause or a stop is behind them.
        """
        self._reports.alive()
        self._ranks.check()
        waiting = self._channel.peek()
        if self.stop or self.gone:
            return True
        if not waiting:
            return False
        urgent = any(isinstance(order, PauseOrder | StopOrder) for order in waiting)
        if not urgent and isinstance(waiting[0], EvalOrder | GenerateOrder):
            return False
        return not self._serve(block=not self.paused)

    def _serve(self, *, block: bool) -> bool:
        while self.stop is None:
            if self.paused and block and not self._channel.pending():
                self._reports.alive("none")
                self._actions.settle()
            order = self._next(block=self.paused and block)
            if self.gone:
                return False
            if order is None:
                return True
            was_paused = self.paused
            self._carry_out(order)
            block = block or (self.paused and not was_paused)
        return False

    def linger(self) -> None:
        """Answer questions about a completed run's model until a stop, or until the worker is gone."""
        self.lingering = True
        self._reports.alive("none")
        while self.stop is None:
            order = self._next(block=True)
            if order is None:
                return
            self._carry_out(order)

    def _next(self, *, block: bool) -> AnyOrder | None:
        with self._ranks.waiting():
            return self._channel.next(block=block)

    def pause(self, cause: int | None = None) -> None:
        """Stand still from now on."""
        self._pause_at = None
        self.paused = True
        self._stopwatch.lap()
        self._reports.paused(self._state.step, cause)

    def _carry_out(self, order: AnyOrder) -> None:
        try:
            self._do(order)
        except Exception as error:
            known = as_error(error)
            if isinstance(known, Internal):
                traceback.print_exc(file=sys.stderr)
            self._reports.refuse(order.order, known)

    def _do(self, order: AnyOrder) -> None:
        if self.lingering and not isinstance(order, EvalOrder | GenerateOrder | StopOrder):
            raise WrongState("The run is complete; only eval, generate and stop are possible now.")
        match order:
            case PauseOrder():
                changed = not self.paused
                if changed:
                    self.pause(order.order)
                self._reports.answer(order.order, {"step": self._state.step, "changed": changed})
            case ResumeOrder():
                self._resume(order)
            case StopOrder():
                self.stop = order
            case CheckpointOrder():
                self._actions.checkpoint(order)
            case SetOrder():
                self._actions.apply(order)
            case EvalOrder():
                self._actions.evaluate(order, self.interrupted)
            case GenerateOrder():
                self._actions.generate(order, self.interrupted)
            case _:
                raise WrongState("The run has begun already.")

    def _resume(self, order: ResumeOrder) -> None:
        step = self._state.step
        changed = self.paused or self._pause_at is not None or order.steps is not None
        self._pause_at = (step + order.steps, order.order) if order.steps else None
        if self.paused:
            self.paused = False
            self._stopwatch.skip()
            self._reports.resumed(step, order.order)
        self._reports.answer(order.order, {"step": step, "changed": changed})

    def end(self, result: dict[str, Any]) -> None:
        """Answer the stop, and what still waits: another stop gets the same answer, the rest is refused."""
        for order in (*([self.stop] if self.stop else []), *self._channel.peek()):
            if isinstance(order, StopOrder):
                self._reports.answer(order.order, result)
            else:
                self._reports.refuse(order.order, ShuttingDown("The run is ending."))
        self.stop = None
