"""The memory that is predicted before a run is the memory that its updates take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tiny import VOCABULARY, RandomRows

from trainwire_engine import estimate as module
from trainwire_engine import memory, native
from trainwire_engine.batches import Order, plan
from trainwire_engine.estimate import estimate, sizes
from trainwire_engine.lanes import Lanes
from trainwire_engine.model import load_model
from trainwire_engine.optimizer import Optimizer
from trainwire_engine.step import UpdateStep
from trainwire_protocol.config import Config


def predicted_and_real(config: Config, rows: RandomRows, budget: int) -> tuple[int, int]:
    """Predict the peak of an epoch, then train it with another copy of the model and read the peak."""
    config = msgspec.structs.replace(config, micro_batch_tokens=budget)
    order = Order(len(rows), config.batch_size, config.seed)
    updates = order.updates_per_epoch

    def fresh() -> UpdateStep:
        memory.clear_cache()
        # What the process did before is no part of this run.
        memory.figures(reset_peak=True)
        return UpdateStep(load_model(config), Optimizer(config), config)

    step = fresh()
    found = sizes(rows, order, budget, updates, step.lanes)
    predicted = estimate(step.model, step, found, config, steps=updates, evaluated_tokens=0).peak_bytes
    del step
    step = fresh()
    memory.figures(reset_peak=True)
    for update in range(updates):
        batches = plan(rows, order.rows(0, update), budget)
        step(batches, step=update + 1, learning_rate=1e-3, max_grad_norm=1.0)
    return predicted, memory.figures().peak


@pytest.mark.parametrize("patience", [10.0, 0.0], ids=["measured", "extrapolated"])
@pytest.mark.parametrize(("count", "longest", "budget"), [(64, 60, 256), (12, 900, 512)], ids=["rows", "one row"])
def test_predicted_memory_is_within_15_percent(
    config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    patience: float,
    count: int,
    longest: int,
    budget: int,
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", patience)
    # What several lanes hold at once depends on how they meet.
    monkeypatch.setattr(native, "lanes", lambda: 1)
    rows = RandomRows(count, longest=longest)
    method = "full" if longest == 60 else "lora"
    predicted, real = predicted_and_real(config(method=method, batch_size=8), rows, budget)
    assert predicted == pytest.approx(real, rel=0.15)


def test_memory_that_is_extrapolated_over_long_rows_on_several_lanes_is_near(
    config: Callable[..., Config], tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    # A row's attention matrix of 1,500² entries for each of 4 heads is recomputed, those of the trials would be kept.
    folder = tiny(hidden_size=128, intermediate_size=256, num_hidden_layers=4)
    rows = RandomRows(2, shortest=1490, longest=1500)
    predicted, real = predicted_and_real(config(model=folder, batch_size=2), rows, 512)
    assert predicted == pytest.approx(real, rel=0.3)


def test_the_largest_update_and_the_mean_one_are_found() -> None:
    rows = RandomRows(200, longest=300)
    order = Order(200, 8, 1)
    found = sizes(rows, order, 512, 10_000, Lanes(1000))
    planned = [plan(rows, order.rows(0, update), 512) for update in range(order.updates_per_epoch)]
    assert max(batch.tokens.size for batch in found.largest) == max(b.tokens.size for p in planned for b in p)
    padded = [sum(batch.tokens.size for batch in batches) for batches in planned]
    assert found.mean_tokens == pytest.approx(sum(padded) / len(padded))


def trial_sizes(monkeypatch: pytest.MonkeyPatch, config: Config, free: int) -> tuple[list[int], Any]:
    """Estimate with so many free bytes; gives the padded tokens of every trial."""
    monkeypatch.setattr(memory, "available", lambda: free)
    made: list[int] = []
    real = module._measure

    def measured(step: Any, batches: Any) -> Any:
        made.append(sum(batch.tokens.size for batch in batches))
        return real(step, batches)

    monkeypatch.setattr(module, "_measure", measured)
    step = UpdateStep(load_model(config), Optimizer(config), config)
    rows = RandomRows(32, shortest=500, longest=510)
    found = sizes(rows, Order(32, 8, 1), 4096, 4, step.lanes)
    return made, estimate(step.model, step, found, config, steps=4, evaluated_tokens=0)


def test_no_trial_comes_near_the_memory_that_is_left(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 8 << 20
    made, result = trial_sizes(monkeypatch, config(), free)
    assert len(made) == 2
    assert max(made) <= 512
    assert result.peak_bytes > result.available_bytes
    assert result.largest_micro_batch_tokens in (None, 512, 256, 128)


def test_the_proposed_micro_batch_is_no_larger_than_any_update_can_use(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, result = trial_sizes(monkeypatch, config(), 1 << 34)
    assert result.largest_micro_batch_tokens == 4096
    assert VOCABULARY < 4096
