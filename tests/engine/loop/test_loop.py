"""The loop with small parts in place of model, data and disk."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trainwire_engine.batches import Order
from trainwire_engine.feed import Feed
from trainwire_engine.loop import Pace, Parts, train
from trainwire_engine.optimizer import Schedule
from trainwire_engine.ranks import Alone
from trainwire_engine.reports import UNREAD, Reports
from trainwire_engine.schedule import Course
from trainwire_engine.state import Stopwatch, TrainState
from trainwire_engine.step import UpdateResult
from trainwire_protocol import events as ev
from trainwire_protocol.config import Config
from trainwire_protocol.errors import NonFinite


class Rows:
    """Examples of four tokens, three of them trained."""

    def tokens(self, row: int) -> np.ndarray:
        return np.array([row, 1, 2, 3], np.int32)

    def mask(self, row: int) -> np.ndarray:
        return np.array([False, True, True, True])

    def location(self, row: int) -> str:
        return f"rows:{row}"


@dataclass
class Calls:
    """What the loop did, in order, as text."""

    made: list[str] = field(default_factory=list)
    more: list[bool] = field(default_factory=list)
    stop_at: int = -1
    interrupt_at: int = -1
    unrecorded_at: int = -1
    short_at: int = -1


def build(
    calls: Calls, config: Config, *, skipped: set[int] = frozenset(), examples: int = 6
) -> tuple[Parts, list[Any]]:  # type: ignore[assignment]
    sent: list[Any] = []
    state = TrainState()
    order = Order(examples, config.batch_size, config.seed, config.shuffle)
    course = Course(state, config, order.updates_per_epoch)

    def step(batches: Any, *, step: int, learning_rate: float, max_grad_norm: float | None, more: bool) -> UpdateResult:
        calls.made.append(f"update {step}")
        calls.more.append(more)
        bad = step in skipped
        loss = float("nan") if bad else 2.0
        reason = "recordings take 80.0 GB" if step == calls.unrecorded_at else ""
        tokens, short = 3 * len(batches[0].rows), step == calls.short_at
        return UpdateResult(loss, tokens, 1, 1.0, skipped=bad, not_recorded=reason, room_made=short)

    step.compiles = lambda batches: not calls.made  # type: ignore[attr-defined]

    def do_due(interrupted: Any) -> bool:
        calls.made.append(f"due {state.step}")
        return state.step != calls.interrupt_at

    boundary = SimpleNamespace(do_due=do_due, save_due=lambda: calls.made.append(f"save {state.step}"))

    def serve() -> bool:
        calls.made.append(f"serve {state.step}")
        return state.step != calls.stop_at

    control = SimpleNamespace(serve=serve, interrupted=lambda: False)
    channel: Any = SimpleNamespace(send=sent.append)
    parts: Any = Parts(
        course,
        Rows(),
        Feed(Rows(), order, config, Alone()),
        step,  # type: ignore[arg-type]
        Schedule(config, course.total_steps),
        boundary,  # type: ignore[arg-type]
        control,  # type: ignore[arg-type]
        Reports(channel),
        Stopwatch(state),
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
    )
    return parts, sent


def config(**values: Any) -> Config:
    return Config(model="m", data="d", micro_batch_tokens=4096, learning_rate=0.1, warmup_steps=0, **values)


def events(sent: list[Any]) -> list[str]:
    return [type(report).__name__ for report in sent if type(report).__name__ != "Alive"]


def test_between_two_updates_come_what_is_due_the_save_and_the_orders() -> None:
    calls = Calls()
    parts, sent = build(calls, config(batch_size=3))
    assert train(parts) == "finished"
    assert calls.made == [
        "due 0",
        "save 0",
        "serve 0",
        "update 1",
        "due 1",
        "save 1",
        "serve 1",
        "update 2",
        "due 2",
        "save 2",
        "serve 2",
    ]
    assert events(sent) == ["EpochStart", "Step", "Step", "EpochEnd"]


def test_an_update_is_told_whether_another_follows() -> None:
    calls = Calls()
    train(build(calls, config(batch_size=3, num_epochs=2))[0])
    assert calls.more == [True, True, True, False]


def test_a_stop_at_a_boundary_ends_the_loop_without_a_reason() -> None:
    calls = Calls(stop_at=1)
    parts, sent = build(calls, config(batch_size=3))
    assert train(parts) is None
    assert calls.made[-1] == "serve 1"
    assert events(sent) == ["EpochStart", "Step"]


def test_an_interrupted_evaluation_ends_the_loop_before_anything_is_saved() -> None:
    calls = Calls(interrupt_at=2)
    parts, sent = build(calls, config(batch_size=3))
    assert train(parts) is None
    assert calls.made[-2:] == ["update 2", "due 2"]
    assert "EpochEnd" not in events(sent)


def test_the_last_smaller_update_of_an_epoch_counts_its_own_tokens() -> None:
    parts, sent = build(Calls(), config(batch_size=4, num_epochs=2))
    train(parts)
    tokens = [step.total_tokens for step in sent if isinstance(step, ev.Step)]
    assert tokens == [12, 6, 12, 6]
    assert parts.course.state.trained_tokens == 36


def test_a_thousand_updates_leave_the_history_bounded_and_the_numbers_right() -> None:
    parts, sent = build(Calls(), config(batch_size=6, max_steps=1000, log_every=7), examples=6000)
    assert train(parts) == "finished"
    steps = [step for step in sent if isinstance(step, ev.Step)]
    assert sum(step.updates for step in steps) == 1000
    assert [step.step for step in steps[:3]] == [7, 14, 21]
    assert steps[-1].step == 1000
    assert len(parts.reports.history()) == len(steps)

    assert len(steps) == 143


def test_reports_that_nobody_may_have_read_are_kept_beside_those_since_the_last_checkpoint() -> None:
    parts, _ = build(Calls(), config(batch_size=6, max_steps=1000), examples=6000)
    assert train(parts) == "finished"

    def kept() -> tuple[int, int]:
        history = [step.step for step in parts.reports.history()]
        assert history == list(range(history[0], history[-1] + 1))
        return history[0], history[-1]

    parts.reports.forget(400)
    assert kept() == (401, 1000)
    parts.reports.forget(999)
    assert kept() == (1001 - UNREAD, 1000)
    parts.reports.forget(1000)
    assert kept() == (1001 - UNREAD, 1000)


def test_every_example_is_taken_once_an_epoch_also_around_skipped_updates() -> None:
    parts, sent = build(Calls(), config(batch_size=2, num_epochs=2), skipped={2, 4})
    train(parts)
    logs = [log for log in sent if isinstance(log, ev.Log)]
    rows = [row for log in logs for row in (log.details or {})["rows"]]
    assert len(rows) == 4
    assert parts.course.state.step == 6
    assert parts.course.state.non_finite == 2


def test_it_is_said_once_that_passes_are_not_recorded_any_more() -> None:
    parts, sent = build(Calls(unrecorded_at=2), config(batch_size=2))
    assert train(parts) == "finished"
    (log,) = (report for report in sent if type(report).__name__ == "Log")
    assert (log.level, log.code, log.details) == ("info", "not_recorded", {"step": 2})
    assert "recordings take 80.0 GB" in log.message


def test_an_update_that_had_to_be_made_twice_is_told() -> None:
    parts, sent = build(Calls(short_at=2), config(batch_size=2))
    assert train(parts) == "finished"
    (log,) = (report for report in sent if type(report).__name__ == "Log")
    assert (log.level, log.code, log.details) == ("warn", "memory_given_back", {"step": 2})
    assert log.message.startswith("An update ran out of memory")


def test_the_limits_of_skipped_updates_end_the_loop() -> None:
    parts, _ = build(Calls(), config(batch_size=1, max_consecutive_non_finite=2), skipped={1, 3, 4})
    with pytest.raises(NonFinite, match="2 updates in a row") as raised:
        train(parts)
    assert raised.value.details["step"] == 4


def test_the_pace_leaves_the_first_update_out_and_counts_what_happens_between() -> None:
    state = TrainState()
    pace = Pace(state)
    etas = []
    # The first update takes 60 s (it compiles), each later one 1 s, and an evaluation of 2 s follows every other.
    for step, elapsed in enumerate((60_000, 61_000, 64_000, 65_000, 68_000), 1):
        state.step, state.elapsed_ms = step, elapsed
        etas.append(pace.eta_ms(105))
    assert etas[0] is None
    assert etas[1] == 104 * 1000 - 1000
    assert etas[4] == 100 * 2000


def test_pauses_do_not_count_as_time_of_the_run() -> None:
    now = [0.0]
    state = TrainState()
    watch = Stopwatch(state, lambda: now[0])
    now[0] = 2.0
    watch.lap()
    now[0] = 100.0
    watch.skip()
    now[0] = 101.0
    watch.lap()
    assert (state.elapsed_ms, state.epoch_ms) == (3000.0, 3000.0)
