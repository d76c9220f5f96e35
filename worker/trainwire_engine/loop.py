"""The training loop: one pass is one update, and everything that is due between two of them."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from trainwire_engine import memory
from trainwire_engine.alarms import LossAlarm, MemoryAlarm
from trainwire_engine.boundary import Boundary
from trainwire_engine.feed import Feed
from trainwire_engine.follow import Follower
from trainwire_engine.model import Model
from trainwire_engine.optimizer import Schedule
from trainwire_engine.orders import Control
from trainwire_engine.ranks import Alone
from trainwire_engine.reports import Measured, Reports
from trainwire_engine.saving import Saves
from trainwire_engine.schedule import Course
from trainwire_engine.state import Stopwatch, TrainState
from trainwire_engine.step import UpdateStep
from trainwire_protocol.errors import NonFinite

_PACE_UPDATES = 50

Reason = Literal["finished", "early_stopping"]


@dataclass
class Parts:
    """What the loop works with."""

    course: Course
    dataset: Any
    feed: Feed
    step: UpdateStep
    schedule: Schedule
    boundary: Boundary
    control: Control | Follower
    reports: Reports
    stopwatch: Stopwatch
    saves: Saves
    model: Model
    ranks: Alone = field(default_factory=Alone)
    loss_alarm: LossAlarm = field(default_factory=LossAlarm)
    memory_alarm: MemoryAlarm = field(default_factory=MemoryAlarm)


def train(parts: Parts) -> Reason | None:
    """Train until the run's end, and say why it ended; None if the run is to stop before.

    At a boundary come, in this order: the evaluation and the generations that are due, the end of the epoch, the
    checkpoint, the worker's orders, the end of the run. Raises NonFinite beyond the config's limits.
    """
    course, boundary, control, reports = parts.course, parts.boundary, parts.control, parts.reports
    state, updates_per_epoch = course.state, course.updates_per_epoch
    pace = Pace(state)
    begun = 0
    while boundary.do_due(control.interrupted):
        if state.epoch_update >= updates_per_epoch:
            end_epoch(parts)
            state.next_epoch()
        boundary.save_due()
        if not control.serve():
            break
        if reason := course.ended:
            if state.epoch_update:
                end_epoch(parts)
            return reason
        if begun != state.epoch:
            begun = state.epoch
            reports.epoch_start(begun, course.total_epochs, updates_per_epoch)
        measured, rows = update(parts)
        state.count(measured.loss, measured.tokens, skipped=measured.skipped)
        parts.stopwatch.lap()
        reports.updated(
            state,
            measured,
            memory.figures(),
            total_steps=course.total_steps,
            epoch_progress=min(1.0, state.epoch_update / updates_per_epoch),
            eta_ms=pace.eta_ms(course.total_steps),
        )
        if measured.skipped:
            guard(parts, measured, rows)
        warn(parts, measured, rows)
        if course.reports_now:
            reports.flush()
        else:
            reports.hold()
    return None


def update(parts: Parts) -> tuple[Measured, list[int]]:
    """Make the next update; gives its figures and the rows it was made of."""
    state, config = parts.course.state, parts.course.config
    started = time.perf_counter()
    portion = parts.feed.take(state.epoch - 1, state.epoch_update)
    rows, micro_batches = portion.rows, portion.micro_batches
    ready = time.perf_counter()
    compiles = parts.step.compiles(micro_batches)
    parts.reports.alive("compile" if compiles else "train")
    rate = parts.schedule.learning_rate(state.step, config.learning_rate or 0.0)
    with parts.ranks.updating(compiles=compiles):
        result = parts.step(
            micro_batches,
            step=state.step + 1,
            learning_rate=rate,
            max_grad_norm=config.max_grad_norm or None,
            more=state.step + 1 < parts.course.total_steps,
        )
    if result.not_recorded:
        parts.reports.log(
            "info",
            "not_recorded",
            f"Passes are not recorded any more, which makes updates of few tokens slower: {result.not_recorded}.",
            {"step": state.step + 1},
        )
    if result.room_made:
        parts.reports.memory_given_back("An update", state.step + 1)
    passes, computed, real = parts.ranks.counts(micro_batches)
    measured = Measured(
        loss=result.loss,
        tokens=result.tokens,
        correct=result.correct,
        grad_norm=result.grad_norm,
        skipped=result.skipped,
        ms=(time.perf_counter() - started) * 1000,
        data_ms=(ready - started) * 1000,
        learning_rate=rate,
        micro_batches=passes,
        padding_fraction=1 - real / computed if computed else 0.0,
    )
    return measured, rows


def guard(parts: Parts, measured: Measured, rows: list[int]) -> None:
    """Name the rows of a skipped update; raises NonFinite when there were too many of them."""
    state, config = parts.course.state, parts.course.config
    named = [parts.dataset.location(row) for row in rows]
    figures = {"loss": measured.loss, "grad_norm": measured.grad_norm}
    parts.reports.flush()
    parts.reports.log(
        "warn",
        "non_finite",
        f"Update {state.step} was skipped: its loss is {measured.loss}, its gradient norm {measured.grad_norm}.",
        {"step": state.step, **figures, "rows": named, "in_row": state.non_finite_in_row, "total": state.non_finite},
    )
    for key, count in (
        ("max_consecutive_non_finite", state.non_finite_in_row),
        ("max_non_finite", state.non_finite),
    ):
        limit = getattr(config, key)
        if count >= limit:
            kind = "in a row" if key == "max_consecutive_non_finite" else "in all"
            raise NonFinite(
                f"{count} updates {kind} had a loss or a gradient that is not finite; {key} is {limit}.",
                hint="Lower learning_rate, or look at the rows that the log names. The checkpoint holds the last good"
                " weights.",
                step=state.step,
                key=key,
                rows=named,
            )


def warn(parts: Parts, measured: Measured, rows: list[int]) -> None:
    """Say what is unusual about an update, or about the memory after it; the run goes on."""
    state, reports = parts.course.state, parts.reports
    if spike := parts.loss_alarm.hear(measured.loss):
        reports.flush()
        reports.log(
            "warn",
            "loss_spike",
            f"The loss of update {state.step} is {spike.loss:.3f}; the mean of those before is {spike.mean:.3f}.",
            {**asdict(spike), "step": state.step, "rows": [parts.dataset.location(row) for row in rows]},
        )
    if (left := parts.memory_alarm.hear()) is not None:
        reports.log(
            "warn",
            "memory_pressure",
            f"Only {left} bytes of memory are left: the run may be ended by the system.",
            {"step": state.step, "available_bytes": left},
        )


def end_epoch(parts: Parts) -> None:
    """Report the end of an epoch, or of the part of it before the run's end."""
    parts.stopwatch.lap()
    parts.reports.epoch_end(parts.course.state)


class Pace:
    """Tells how long the rest takes, from the updates made lately, with what happened between them.

    The first update of a process compiles and says nothing about the next ones.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._marks: deque[tuple[int, float]] = deque(maxlen=_PACE_UPDATES)

    def eta_ms(self, total_steps: int) -> int | None:
        """Give the time to the end of the run in ms; None before the second update."""
        step, now = self._state.step, self._state.elapsed_ms
        self._marks.append((step, now))
        first, then = self._marks[0]
        if step == first:
            return None
        return round((now - then) / (step - first) * max(total_steps - step, 0))
