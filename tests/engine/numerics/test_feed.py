"""The micro-batches of the next update are made while the device works, and the host waits for it once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny import RandomRows

from trainwire_engine import step as step_module
from trainwire_engine.batches import Order, plan
from trainwire_engine.feed import Feed
from trainwire_engine.model import load_model
from trainwire_engine.optimizer import Optimizer
from trainwire_engine.ranks import Alone
from trainwire_engine.step import UpdateStep
from trainwire_protocol.config import Config

ROWS = RandomRows(20)


class Watched(RandomRows):
    """Rows that tell which of them were read."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.read: list[int] = []

    def tokens(self, row: int) -> np.ndarray:
        self.read.append(row)
        return super().tokens(row)


def feed(rows: RandomRows, config: Config) -> tuple[Order, Feed]:
    order = Order(len(rows), config.batch_size, config.seed)
    return order, Feed(rows, order, config, Alone())


def test_a_portion_is_the_same_whether_it_was_made_ahead_or_not(config: Callable[..., Config]) -> None:
    settings = config(batch_size=8, micro_batch_tokens=64)
    order, ahead = feed(ROWS, settings)
    for epoch, update in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 2), (1, 0)]:
        portion = ahead.take(epoch, update)
        ahead.look_ahead()
        expected = plan(ROWS, order.rows(epoch, update), 64)
        assert portion.rows == order.rows(epoch, update)
        assert len(portion.micro_batches) == len(expected)
        for ours, its in zip(portion.micro_batches, expected):
            assert ours.rows == its.rows
            assert np.array_equal(ours.tokens, its.tokens)


def test_the_next_portion_needs_no_row_any_more_once_it_was_made_ahead(config: Callable[..., Config]) -> None:
    rows = Watched(20)
    _, ahead = feed(rows, config(batch_size=8, micro_batch_tokens=64))
    for epoch, update in [(0, 0), (0, 1), (0, 2), (1, 0)]:
        ahead.take(epoch, update)
        rows.read.clear()
        ahead.look_ahead()
        assert len(rows.read) == (4 if update == 1 else 8)
        rows.read.clear()
        ahead.look_ahead()
        assert not rows.read
    ahead.take(1, 1)
    assert not rows.read


def test_the_host_waits_once_and_works_ahead_before_it_waits(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(micro_batch_tokens=64)
    model = load_model(settings)
    step = UpdateStep(model, Optimizer(settings), settings)
    batches = plan(ROWS, range(8), 64)
    done: list[str] = []

    def told(name: str) -> Callable[..., Any]:
        original = getattr(mx, name)

        def call(*arrays: Any) -> Any:
            done.append(name)
            return original(*arrays)

        return call

    class Mlx:
        eval, async_eval = staticmethod(told("eval")), staticmethod(told("async_eval"))

        def __getattr__(self, name: str) -> Any:
            return getattr(mx, name)

    step.meanwhile = lambda: done.append("meanwhile")
    monkeypatch.setattr(step_module, "mx", Mlx())
    step(batches, step=1, learning_rate=1e-3, max_grad_norm=1.0)
    assert len(batches) > 2
    assert done == ["async_eval"] * len(batches) + ["meanwhile", "eval"]


class StandIn:
    """Recordings of every shape, which tell what they are asked for and give no gradient."""

    def __init__(self, step: UpdateStep) -> None:
        self._zeros = {name: mx.zeros_like(param) for name, param in step._params.items()}
        self.asked: list[str] = []
        self.largest: Any = None

    def begin(self, params: Any, passes: Any) -> bool:
        self.asked.append("begin")
        return True

    def made(self) -> Any:
        self.asked.append("made")
        return (mx.array(1.0), mx.array(0.0)), dict(self._zeros)

    def sums(self, params: Any, passes: Any, meanwhile: Callable[[], None]) -> Any:
        self.asked.append("sums")
        meanwhile()
        self.made()
        self.asked.pop()
        return (mx.array(1.0), mx.array(0.0)), dict(self._zeros)

    def forget(self) -> None:
        self.asked.append("forget")


def test_passes_begun_ahead_are_used_for_the_same_update_with_the_same_weights_only(
    config: Callable[..., Config],
) -> None:
    settings = config(micro_batch_tokens=64)
    model = load_model(settings)
    step = UpdateStep(model, Optimizer(settings), settings)
    recordings = StandIn(step)
    step._recordings = recordings  # type: ignore[assignment]
    first, second = plan(ROWS, range(8), 64), plan(ROWS, range(8, 16), 64)
    step.meanwhile = lambda: second

    def update(batches: Any, number: int, more: bool = True) -> list[str]:
        recordings.asked.clear()
        step(batches, step=number, learning_rate=1e-3, max_grad_norm=1.0, more=more)
        return list(recordings.asked)

    assert update(first, 1) == ["sums", "begin"]
    assert update(second, 2) == ["made", "begin"]
    assert update(second, 3, more=False) == ["made"]
    assert update(second, 4) == ["sums", "begin"]
    assert update(first, 5) == ["sums", "begin"]
    assert update(second, 7) == ["sums", "begin"]
    model.set_trainable(dict(model.trainable))
    assert update(second, 8) == ["sums", "begin"]
    step.give_back()
    assert update(second, 9) == ["sums", "begin"]
    step.meanwhile = lambda: None
    assert update(second, 10) == ["made"]
    assert update(second, 11) == ["sums"]


def test_recordings_made_anew_expect_the_same_largest_passes_and_given_back_ones_are_met_anew(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(micro_batch_tokens=64)
    step = UpdateStep(load_model(settings), Optimizer(settings), settings)
    made: list[StandIn] = []

    def new() -> StandIn:
        made.append(StandIn(step))
        return made[-1]

    monkeypatch.setattr(step, "_new_recordings", new)
    step.trace_anew()
    batches = plan(ROWS, range(8), 64)
    step.expect(batches[0])
    step.trace_anew()
    assert len(made) == 2
    for one in made:
        assert [part.shape for part in one.largest] == [part.shape for part in step._inputs(batches[:1], 0)[0]]
    assert step.compiles(batches)
    assert not step.compiles(batches)
    assert step.give_back()
    assert step.compiles(batches)


def test_micro_batches_that_were_told_once_are_begun_once(config: Callable[..., Config]) -> None:
    settings = config(micro_batch_tokens=64)
    step = UpdateStep(load_model(settings), Optimizer(settings), settings)
    recordings = StandIn(step)
    step._recordings = recordings  # type: ignore[assignment]
    step.meanwhile = lambda: plan(ROWS, range(8), 64)
    step._look_ahead()
    # A rank that has no rows in the second update does not look ahead.
    for number in (2, 3):
        step._begin(number, after=())
    assert recordings.asked == ["begin"]
