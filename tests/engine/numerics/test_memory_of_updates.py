"""What updates hold: blocks computed again keep less, packed layers are unpacked one by one, and nothing grows."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tiny import RandomRows

from trainwire_engine import memory, native
from trainwire_engine import step as engine_step
from trainwire_engine.batches import plan
from trainwire_engine.cuda import recordings
from trainwire_engine.model import load_model
from trainwire_engine.optimizer import Optimizer
from trainwire_engine.step import UpdateStep
from trainwire_protocol.config import Config

WIDTH, INNER = 128, 512
BLOCK_BYTES = 4 * (3 * WIDTH * INNER + 3 * WIDTH * WIDTH)
"""A block's linear layers in float32."""


@pytest.fixture
def peak(
    config: Callable[..., Config], tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., int]:
    """Give the peak of an update above what is held before it."""

    monkeypatch.setattr(native, "lanes", lambda: 1)

    def measure(layers: int, *, bits: int | None = None, rows: int = 1, length: int = 32, **keys: Any) -> int:
        sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": layers, "head_dim": 32}
        settings = config(model=tiny(bits=bits, **sizes), **keys)
        model = load_model(settings)
        step = UpdateStep(model, Optimizer(settings), settings)
        batches = plan(RandomRows(rows, shortest=length, longest=length), range(rows), 4096)
        found = 0
        for number in range(2):
            mx.clear_cache()
            mx.reset_peak_memory()
            held = mx.get_active_memory()
            step(batches, step=number, learning_rate=1e-3, max_grad_norm=1.0)
            found = mx.get_peak_memory() - held
        return found

    return measure


def test_checkpointed_blocks_keep_a_fraction_of_the_activations(peak: Callable[..., int]) -> None:
    plain = [peak(layers, rows=4, length=96) for layers in (2, 8)]
    again = [peak(layers, rows=4, length=96, gradient_checkpointing=True) for layers in (2, 8)]
    assert again[1] < 0.55 * plain[1]
    assert again[1] - again[0] < 0.4 * (plain[1] - plain[0])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_layers_are_unpacked_one_after_another(peak: Callable[..., int], checkpointing: bool) -> None:
    """What is kept for each further block is what a model in float32 keeps: activations, no unpacked weight."""
    keys = {"gradient_checkpointing": checkpointing}
    whole = [peak(layers, **keys) for layers in (2, 8)]
    packed = [peak(layers, bits=4, **keys) for layers in (2, 8)]
    assert packed[1] - packed[0] < whole[1] - whole[0] + 6 * 0.25 * BLOCK_BYTES
    assert packed[1] < whole[1] + 1.5 * BLOCK_BYTES


def test_after_many_updates_of_mixed_lengths_no_more_is_held(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What several lanes hold at once depends on how they meet.
    monkeypatch.setattr(native, "lanes", lambda: 1)
    settings = config(batch_size=4)
    model = load_model(settings)
    step = UpdateStep(model, Optimizer(settings), settings)
    rows = RandomRows(80, shortest=4, longest=200)
    held, peaks = [], []
    for number in range(60):
        first = 4 * (number % 20)
        batches = plan(rows, range(first, first + 4), 512)
        step(batches, step=number, learning_rate=1e-3, max_grad_norm=1.0)
        now = memory.figures(reset_peak=True)
        held.append(now.active)
        peaks.append(now.peak)
    assert max(held[40:]) < 1.1 * max(held[20:40])
    assert max(peaks[40:]) < 1.2 * max(peaks[:40])


def test_new_weights_and_moments_take_the_place_of_the_old(
    config: Callable[..., Config], tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, two moments and gradients are four times the weights, and little more is ever there."""
    monkeypatch.setattr(native, "lanes", lambda: 1)
    settings = config(model=tiny(hidden_size=256, intermediate_size=1024, num_hidden_layers=4), method="full")
    gc.collect()
    of_others = mx.get_active_memory()
    model = load_model(settings)
    step = UpdateStep(model, Optimizer(settings), settings)
    weights = sum(weight.nbytes for weight in model.trainable.values())
    batches = plan(RandomRows(2), range(2), 4096)
    peaks = []
    for number in range(3):
        mx.clear_cache()
        mx.reset_peak_memory()
        step(batches, step=number, learning_rate=1e-3, max_grad_norm=1.0)
        peaks.append((mx.get_peak_memory() - of_others) / weights)
    assert peaks[-1] < 6.0, peaks


def test_an_update_lets_the_weights_of_before_go_though_nobody_asks_for_its_own(
    config: Callable[..., Config], tiny: Callable[..., Path]
) -> None:
    settings = config(model=tiny(hidden_size=WIDTH, intermediate_size=INNER), method="full", optimizer="sgd")
    gc.collect()
    others = mx.get_active_memory()
    step = UpdateStep(load_model(settings), Optimizer(settings), settings)
    weights = sum(weight.nbytes for weight in step.model.trainable.values())
    batches = plan(RandomRows(2), range(2), 4096)
    held = []
    for number in range(2):
        step(batches, step=number, learning_rate=1e-3, max_grad_norm=1.0)
        held.append(mx.get_active_memory())
    assert min(held) - others < 1.5 * weights


@pytest.mark.parametrize("free", [5, 7])
def test_passes_are_recorded_if_that_leaves_room_for_the_rest_of_an_update(
    free: int, config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(method="full")
    model = load_model(settings)
    weights = sum(weight.nbytes for weight in model.trainable.values())
    most = list[int]()
    monkeypatch.setattr(recordings, "usable", lambda params: True)
    monkeypatch.setattr(engine_step, "Recordings", lambda trace, params, split, kept: most.append(kept))
    monkeypatch.setattr(memory, "total_memory", lambda: 100 * weights)
    monkeypatch.setattr(memory, "available", lambda: free * weights)
    UpdateStep(model, Optimizer(settings), settings)
    assert most == ([weights] if free == 7 else [])
