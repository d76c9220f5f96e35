"""What a scripted run does with its orders: the answers of the real engine."""

import contextlib
from collections.abc import Iterator
from typing import Any

from trainwire_protocol import channel as ch
from trainwire_protocol import rundir
from trainwire_protocol.errors import BadParams, ShuttingDown, TrainwireError, WrongState
from trainwire_protocol.events import Change, ConfigChanged, EvalEnd, Paused, Resumed

from .session import Session


class Stopped(Exception):
    """The run was told to stop, and has said so."""


class WorkerGone(Exception):
    """The channel is closed: nobody is there to give orders."""


class Orders:
    """Takes orders at update boundaries, and pauses and stops also between the pieces of longer work."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.paused = False
        self.remaining: int | None = None
        """Updates until a counted stretch ends."""
        self._stretch = 0
        self.finished = False
        """True once the run has completed and only lingers."""

    def serve(self) -> None:
        """Do what was ordered; while paused, wait for more. Raises Stopped and WorkerGone."""
        inbox = self._session.inbox
        while True:
            order = inbox.take(block=self.paused)
            if order is not None:
                self.handle(order)
            elif not inbox.closed:
                return
            elif not self._session.script.ignore_close:
                raise WorkerGone
            else:
                self.paused = False
                return

    def count(self) -> None:
        """Count an update of a stretch that `resume` ordered, and pause when it is over."""
        if self.remaining is not None:
            self.remaining -= 1
            if self.remaining <= 0:
                self._pause(self._stretch)

    def give_way(self) -> None:
        """Let long work that the run does by itself stand still while the run is paused."""
        self.give_way_in_order()
        if self.paused:
            self.serve()

    def give_way_in_order(self) -> None:
        """Let long work that was ordered yield to a pause, which takes effect, and to a stop, which ends it."""
        while (order := self._session.inbox.take_urgent(ch.PauseOrder, ch.StopOrder)) is not None:
            self.handle(order)

    def handle(self, order: ch.AnyOrder) -> None:
        """Do one order and answer it."""
        try:
            self._do(order)
        except TrainwireError as error:
            self._session.inbox.refuse(order.order, error.code, error.message, error.hint)

    def _do(self, order: ch.AnyOrder) -> None:
        session, number = self._session, order.order
        step = session.state.step
        if self.finished and not isinstance(order, ch.EvalOrder | ch.GenerateOrder | ch.StopOrder):
            raise WrongState("The run has completed.")
        match order:
            case ch.PauseOrder():
                changed = not self.paused
                if changed:
                    self._pause(number)
                session.inbox.answer(number, step=step, changed=changed)
            case ch.ResumeOrder():
                self._resume(order)
            case ch.CheckpointOrder():
                name = order.name or rundir.checkpoint_name(step)
                path, size, changed = session.save(name, "manual", cause=number)
                session.inbox.answer(number, path=str(path), step=step, bytes=size, changed=changed)
                self._go_on()
            case ch.SetOrder():
                self._set(order)
            case ch.EvalOrder():
                event = self._evaluate(order)
                session.inbox.answer(number, valid_loss=event.valid_loss, tokens=event.tokens, ms=event.ms)
                self._go_on()
            case ch.GenerateOrder():
                with self._answered(number):
                    text, tokens, ms = session.generate(order.max_tokens, self.give_way_in_order, order.adapter)
                session.inbox.answer(number, text=text, tokens=tokens, ms=ms)
                self._go_on()
            case ch.StopOrder():
                self._stop(order)
            case _:
                raise WrongState("The run has begun already.")

    def _go_on(self) -> None:
        idle = self.paused or self.finished
        self._session.inbox.alive("none" if idle else "train", self._session.state.step)

    def _pause(self, cause: int) -> None:
        self.paused, self.remaining = True, None
        self._session.inbox.emit(Paused(step=self._session.state.step, cause=cause))
        self._session.inbox.alive("none", self._session.state.step)

    def _resume(self, order: ch.ResumeOrder) -> None:
        session = self._session
        changed = self.paused or self.remaining is not None
        if changed:
            self.remaining, self._stretch = order.steps, order.order
        if self.paused:
            self.paused = False
            session.inbox.emit(Resumed(step=session.state.step, cause=order.order))
            session.inbox.alive("train", session.state.step)
        session.inbox.answer(order.order, step=session.state.step, changed=changed)

    def _set(self, order: ch.SetOrder) -> None:
        session = self._session
        step = session.state.step
        max_steps = order.values.get("max_steps", 0)
        if 0 < max_steps < step:
            raise BadParams(f"max_steps = {max_steps} is behind the run, which is at step {step}.")
        previous: dict[str, Any] = {key: getattr(session.config, key) for key in order.values}
        session.inbox.flush()
        session.change(**order.values)
        if "max_steps" in order.values:
            session.plan.set_max_steps(max_steps)
        changes = {key: Change(previous[key], value) for key, value in order.values.items()}
        session.inbox.emit(ConfigChanged(changes=changes, effective_step=step + 1, cause=order.order))
        session.inbox.answer(order.order, applied=order.values, previous=previous, effective_step=step + 1)

    def _evaluate(self, order: ch.EvalOrder) -> EvalEnd:
        if not self._session.script.valid_examples:
            raise WrongState("There is no validation data.", hint="Give valid_data in the config.")
        with self._answered(order.order):
            return self._session.evaluate(order.max_batches, self.give_way_in_order, cause=order.order)

    @contextlib.contextmanager
    def _answered(self, number: int) -> Iterator[None]:
        """Answer an order that a stop cuts short."""
        try:
            yield
        except Stopped:
            error = ShuttingDown("The run was stopped before it was done.")
            self._session.inbox.refuse(number, error.code, error.message)
            raise

    def _stop(self, order: ch.StopOrder) -> None:
        session = self._session
        outcome = "completed" if self.finished else "stopped"
        if order.save and not self.finished:
            session.save_for_leaving()
        path = None if session.last_checkpoint is None else str(session.last_checkpoint)
        session.inbox.answer(order.order, outcome=outcome, step=session.state.step, checkpoint=path)
        raise Stopped
