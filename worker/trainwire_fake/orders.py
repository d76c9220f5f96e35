"""What a scripted run does with its orders: the answers of the real engine."""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from trainwire_protocol import channel as ch
from trainwire_protocol import rundir
from trainwire_protocol.errors import BadParams, ShuttingDown, TrainwireError, WrongState
from trainwire_protocol.events import Change, ConfigChanged, EvalEnd, Paused, Resumed

from .session import Session

T = TypeVar("T")
RESERVED = (rundir.BEST_NAME, rundir.FINAL_NAME, rundir.ABANDONED_NAME)


class Leave(Exception):
    """The run is to end here: it was told to stop, or nobody is there to give orders."""


class Orders:
    """Takes orders at update boundaries, and pauses and stops also between the pieces of longer work."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.paused = False
        self._pause_at: tuple[int, int] | None = None
        """Step at which a counted stretch ends, and the order that asked for it."""
        self.finished = False
        """True once the run has completed and only lingers."""
        self.stop: ch.StopOrder | None = None
        """The order that ends the run; it is answered once the run has ended."""

    def serve(self) -> None:
        """Do what was ordered; while paused, wait for more. Raises Leave."""
        if self._pause_at is not None and self._session.state.step >= self._pause_at[0] and not self.paused:
            self.pause(self._pause_at[1])
        inbox = self._session.inbox
        while True:
            order = inbox.take(block=self.paused)
            if order is not None:
                self.handle(order)
            elif inbox.closed and not self._session.script.ignore_close:
                raise Leave
            else:
                self.paused = self.paused and not inbox.closed
                return

    def give_way(self) -> None:
        """Let work that the run does by itself stand still while the run is paused."""
        self.give_way_in_order()
        if self.paused or self._session.inbox.closed:
            self.serve()

    def give_way_in_order(self) -> None:
        """Let work that was ordered yield to a pause, which takes effect, and to a stop, which ends it."""
        while (order := self._session.inbox.take_urgent(ch.PauseOrder, ch.StopOrder)) is not None:
            self.handle(order)

    def linger(self) -> None:
        """Answer questions about a completed run until a stop, or until the worker is gone. Raises Leave."""
        self.finished = True
        inbox = self._session.inbox
        inbox.alive("none", self._session.state.step)
        while (order := inbox.take(block=True)) is not None:
            self.handle(order)
        raise Leave

    def handle(self, order: ch.AnyOrder) -> None:
        """Do one order and answer it; a stop is answered at the end of the run. Raises Leave."""
        if isinstance(order, ch.StopOrder):
            self.stop = order
            raise Leave
        try:
            self._do(order)
        except TrainwireError as error:
            self._session.inbox.refuse(order.order, error)
        except Leave:
            self._session.inbox.refuse(order.order, ShuttingDown("The run is stopping."))
            raise

    def _do(self, order: ch.AnyOrder) -> None:
        session, number, step = self._session, order.order, self._session.state.step
        if self.finished and not isinstance(order, ch.EvalOrder | ch.GenerateOrder):
            raise WrongState("The run is complete; only eval, generate and stop are possible now.")
        match order:
            case ch.PauseOrder():
                changed = not self.paused
                if changed:
                    self.pause(number)
                session.inbox.answer(number, step=step, changed=changed)
            case ch.ResumeOrder():
                self._resume(order)
            case ch.CheckpointOrder():
                self._checkpoint(order)
            case ch.SetOrder():
                self._set(order)
            case ch.EvalOrder():
                event = self._ordered(lambda: self._evaluate(order))
                session.inbox.answer(number, valid_loss=event.valid_loss, tokens=event.tokens, ms=event.ms)
            case ch.GenerateOrder():
                text, tokens, ms = self._ordered(
                    lambda: session.generate(order.max_tokens, self.give_way_in_order, order.adapter)
                )
                session.inbox.answer(number, text=text, tokens=tokens, ms=ms)
            case _:
                raise WrongState("The run has begun already.")

    def _ordered(self, work: Callable[[], T]) -> T:
        """Do work that says what it is, and say afterwards what goes on."""
        try:
            return work()
        finally:
            idle = self.paused or self.finished
            self._session.inbox.alive("none" if idle else "train", self._session.state.step)

    def pause(self, cause: int | None = None) -> None:
        """Stand still from now on."""
        self.paused, self._pause_at = True, None
        self._session.inbox.emit(Paused(step=self._session.state.step, cause=cause))
        self._session.inbox.alive("none", self._session.state.step)

    def _resume(self, order: ch.ResumeOrder) -> None:
        session = self._session
        step = session.state.step
        changed = self.paused or self._pause_at is not None or order.steps is not None
        self._pause_at = None if order.steps is None else (step + order.steps, order.order)
        if self.paused:
            self.paused = False
            session.inbox.emit(Resumed(step=step, cause=order.order))
            session.inbox.alive("train", step)
        session.inbox.answer(order.order, step=step, changed=changed)

    def _checkpoint(self, order: ch.CheckpointOrder) -> None:
        session, step = self._session, self._session.state.step
        if order.name in RESERVED:
            raise BadParams(f"{order.name} is a name that the run gives itself.", name=order.name)
        path = session.run_dir / (order.name or rundir.checkpoint_name(step))
        whole = session.whole()
        if whole is not None and (order.name is None or path == whole[0]):
            folder, size, changed = *whole, False
        elif order.name is not None and path.exists():
            raise BadParams(f"There is a checkpoint {order.name} already.", name=order.name)
        else:
            folder, size = self._ordered(lambda: session.save(path.name, "manual", cause=order.order))
            changed = True
        session.inbox.answer(order.order, path=str(folder), step=step, bytes=size, changed=changed)

    def _set(self, order: ch.SetOrder) -> None:
        session, values = self._session, order.values
        if values.get("eval_every") and not session.script.valid_examples:
            raise BadParams("eval_every has no effect: there is no validation data.", key="eval_every")
        if values.get("generate_every") and not session.config.prompts:
            raise BadParams("generate_every has no effect: the config has no prompts.", key="generate_every")
        previous: dict[str, Any] = {key: getattr(session.config, key) for key in values}
        session.inbox.flush()
        session.config = msgspec.structs.replace(session.config, **values)
        if "max_steps" in values:
            session.plan.set_max_steps(values["max_steps"], session.state.step)
        effective = session.state.step + 1
        changes = {key: Change(previous[key], value) for key, value in values.items()}
        session.inbox.emit(ConfigChanged(changes=changes, effective_step=effective, cause=order.order))
        session.inbox.answer(order.order, applied=values, previous=previous, effective_step=effective)

    def _evaluate(self, order: ch.EvalOrder) -> EvalEnd:
        if not self._session.script.valid_examples:
            raise WrongState("There is no validation data, so evaluation is off.")
        return self._session.evaluate(order.max_batches, self.give_way_in_order, cause=order.order)

    def end(self, **result: object) -> None:
        """Answer the stop and what still waits: another stop alike, the rest with a refusal."""
        inbox = self._session.inbox
        order: ch.AnyOrder | None = self.stop or inbox.take(block=False)
        while order is not None:
            if isinstance(order, ch.StopOrder):
                inbox.answer(order.order, **result)
            else:
                inbox.refuse(order.order, ShuttingDown("The run is ending."))
            order = inbox.take(block=False)
