"""What the engine says: facts become events here, and nowhere else in this process."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from trainwire_engine.memory import MemoryFigures
from trainwire_engine.state import TrainState, named_non_finite
from trainwire_protocol.channel import Alive, Answer, Failed, Finished, Report, StepHistory
from trainwire_protocol.coalesce import merge_steps, perplexity
from trainwire_protocol.errors import TrainwireError
from trainwire_protocol.events import (
    Activity,
    Change,
    Checkpoint,
    CheckpointKind,
    Complete,
    ConfigChanged,
    EpochEnd,
    EpochStart,
    EvalEnd,
    Event,
    Generation,
    Level,
    Log,
    Outcome,
    Paused,
    Progress,
    Resumed,
    Step,
)

HISTORY = 10_000
"""Update reports that a checkpoint carries at most; the log has the older ones."""
UNREAD = 256
"""Update reports that a checkpoint carries at least: a worker that is killed may leave so many unread behind."""
_SIGN_OF_LIFE = 1.0


@dataclass(frozen=True)
class Measured:
    """One update in figures: loss in nats, times in ms."""

    loss: float
    tokens: int
    correct: int
    grad_norm: float
    skipped: bool
    ms: float
    data_ms: float
    learning_rate: float
    micro_batches: int
    padding_fraction: float


class Listener(Protocol):
    """Who takes reports."""

    def send(self, report: Report | Event) -> None: ...


class Reports:
    """Makes events from facts and sends them; update reports are merged by `log_every` and kept for checkpoints."""

    def __init__(self, channel: Listener) -> None:
        self._channel = channel
        self._pending: Step | None = None
        self._history: list[Step] = []
        self._activity: Activity = "load"
        self._last_sign = 0.0
        self._begun = False
        self.step = 0

    def send(self, report: Report | Event) -> None:
        """Send any report as it is."""
        self._last_sign = time.monotonic()
        self._channel.send(report)

    def alive(self, activity: Activity | None = None) -> None:
        """Say what is done now; without a change of activity at most once a second."""
        if activity in (None, self._activity) and time.monotonic() - self._last_sign < _SIGN_OF_LIFE:
            return
        self._activity = activity or self._activity
        self.send(Alive(activity=self._activity, step=self.step))

    @contextmanager
    def activity(self, activity: Activity) -> Iterator[None]:
        """Say what is done inside the block, and afterwards that the former activity goes on."""
        before = self._activity
        self.alive(activity)
        try:
            yield
        finally:
            self.alive(before)

    def updated(self, state: TrainState, m: Measured, memory: MemoryFigures, **position: Any) -> None:
        """Take note of an update; `flush` sends it. `position`: total_steps, epoch_progress, eta_ms."""
        tokens = 0 if m.skipped else m.tokens
        self.step = state.step
        report = Step(
            step=state.step,
            loss=m.loss,
            total_tokens=tokens,
            training_time_ms=m.ms,
            updates=1,
            epoch=state.epoch,
            learning_rate=m.learning_rate,
            grad_norm=m.grad_norm,
            token_accuracy=m.correct / tokens if tokens else None,
            perplexity=perplexity(m.loss),
            trained_tokens=state.trained_tokens,
            tokens_per_second=1000.0 * tokens / m.ms if m.ms else 0.0,
            padding_fraction=m.padding_fraction,
            micro_batches=m.micro_batches,
            data_time_ms=m.data_ms,
            active_bytes=memory.active,
            cache_bytes=memory.cache,
            peak_bytes=memory.peak,
            skipped=int(m.skipped),
            **position,
        )
        self._pending = report if self._pending is None else merge_steps(self._pending, report)

    def hold(self) -> None:
        """Let updates wait for those that they are merged with; that the run has begun is told at once.

        A worker that knows of no update ends a run that is to stop without waiting for its checkpoint.
        """
        if self._begun:
            self.alive()
        else:
            self._begun = True
            self.send(Alive(activity=self._activity, step=self.step))

    def flush(self) -> None:
        """Send the update reports that were merged so far."""
        if self._pending is None:
            return
        report, self._pending = self._pending, None
        self.send(report)
        self._history.append(named_non_finite(report))
        del self._history[:-HISTORY]

    def history(self) -> list[Step]:
        """Give the update reports that a checkpoint written now has to carry."""
        self.flush()
        return list(self._history)

    def forget(self, step: int) -> None:
        """Let go of the update reports up to a step, which a checkpoint holds, but for those nobody may have read."""
        newer = sum(report.step > step for report in self._history)
        del self._history[: -max(newer, UNREAD)]

    def recall(self, steps: list[Step]) -> None:
        """Report the updates that the resumed checkpoint carries, for a log that lacks them."""
        self._history = list(steps)
        self.send(StepHistory(steps=steps))

    def epoch_start(self, epoch: int, total_epochs: int, updates: int) -> None:
        """Report that a pass over the data begins."""
        self.send(EpochStart(epoch=epoch, total_epochs=max(total_epochs, epoch), num_batches=updates))

    def epoch_end(self, state: TrainState) -> None:
        """Report that a pass over the data, or the part of it before the run's end, is over."""
        self.flush()
        self.send(
            EpochEnd(
                epoch=state.epoch,
                avg_loss=state.epoch_average,
                epoch_time_secs=state.epoch_ms / 1000,
                updates=state.epoch_update,
            )
        )

    def evaluated(self, step: int, loss: float, tokens: int, correct: int, ms: float, **more: Any) -> None:
        """Report an evaluation; `more`: best, cause."""
        self.flush()
        accuracy = correct / tokens if tokens else None
        self.send(
            EvalEnd(
                step=step,
                valid_loss=loss,
                perplexity=perplexity(loss),
                token_accuracy=accuracy,
                tokens=tokens,
                ms=ms,
                **more,
            )
        )

    def generated(self, index: int, prompt: str, text: str, tokens: int, step: int, loss: float | None) -> None:
        """Report the answer to one of the config's prompts."""
        self.flush()
        self.send(Generation(index=index, prompt=prompt, completion=text, tokens=tokens, step=step, loss=loss))

    def saved(self, path: str, step: int, size: int, kind: CheckpointKind, cause: int | None = None) -> None:
        """Report a checkpoint that is whole."""
        self.send(Checkpoint(path=path, step=step, bytes=size, kind=kind, cause=cause))

    def paused(self, step: int, cause: int | None = None) -> None:
        """Report that training stands still."""
        self.flush()
        self.send(Paused(step=step, cause=cause))

    def resumed(self, step: int, cause: int) -> None:
        """Report that training goes on."""
        self.send(Resumed(step=step, cause=cause))

    def config_changed(self, changes: dict[str, tuple[Any, Any]], step: int, cause: int) -> None:
        """Report new values, in use from the next update on."""
        listed = {key: Change(old, new) for key, (old, new) in changes.items()}
        self.send(ConfigChanged(changes=listed, effective_step=step, cause=cause))

    def progress(self, title: str, done: int, total: int, unit: str) -> None:
        """Report how far a longer piece of work is."""
        self.send(Progress(id=title, title=title, done=done, total=total, unit=unit))

    def log(self, level: Level, code: str, message: str, details: dict[str, Any] | None = None) -> None:
        """Say something that a person should know."""
        self.send(Log(level=level, message=message, code=code, details=details))

    def memory_given_back(self, what: str, step: int) -> None:
        """Say that something ran out of memory, and is done once more with that of recorded passes."""
        message = f"{what} ran out of memory: that of recorded passes was given back, for a second attempt."
        self.log("warn", "memory_given_back", message, {"step": step})

    def answer(self, order: int, result: dict[str, Any]) -> None:
        """Say that an order has taken effect."""
        self.send(Answer(order=order, result={k: _wireable(v) for k, v in result.items()}))

    def refuse(self, order: int, error: TrainwireError) -> None:
        """Say that an order has failed; the run goes on."""
        self.send(
            Answer(order=order, code=error.code, message=error.message, details=error.details or None, hint=error.hint)
        )

    def complete(self, step: int, elapsed_ms: float, reason: Any) -> None:
        """Report that the run reached its end by itself."""
        self.send(Complete(total_steps=step, total_time_secs=elapsed_ms / 1000, reason=reason))

    def failed(self, error: TrainwireError, checkpoint: str | None) -> None:
        """Report why the run cannot go on."""
        self.flush()
        details = msgspec.to_builtins(error.details) or None
        self.send(
            Failed(code=error.code, message=error.message, details=details, hint=error.hint, checkpoint=checkpoint)
        )

    def finished(self, outcome: Outcome, step: int, checkpoint: str | None) -> None:
        """Report that the engine leaves by itself."""
        self.send(Finished(outcome=outcome, step=step, checkpoint=checkpoint))


def _wireable(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
