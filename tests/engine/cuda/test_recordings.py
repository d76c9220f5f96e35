"""Recorded passes against passes that are handed over anew, on a machine with a card."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny import RandomRows, shapes_in_groups

from trainwire_engine.batches import MicroBatch, blank, plan
from trainwire_engine.cuda import kernels, recordings
from trainwire_engine.forms import Shape
from trainwire_engine.model import load_model
from trainwire_engine.optimizer import Optimizer
from trainwire_engine.passes import EvaluateSums
from trainwire_engine.shapes import CPU
from trainwire_engine.step import UpdateResult, UpdateStep
from trainwire_protocol.config import Config

pytestmark = pytest.mark.skipif(
    mx.default_device() == mx.cpu or not kernels.available(), reason="no CUDA card that MLX computes on"
)

ROWS, SHORT = RandomRows(48, longest=300), RandomRows(48)
VISITS = (0, 1, 0, 2, 1, 0, 2, 1)
"""Which eight rows each update has: of ROWS, shapes are met, met again, and met after others."""

CASES: list[dict[str, Any]] = [
    {},
    {"packing": True},
    {"packing": True, "method": "full"},
    {"method": "dora"},
    {"lora_dropout": 0.3},
    {"gradient_checkpointing": True},
    {"optimizer": "adafactor", "method": "full"},
    {"optimizer": "sgd", "packing": True, "max_grad_value": 0.01},
    {"label_smoothing": 0.1, "weight_decay": 0.1},
    {"bits": 4},
]


Make = Callable[..., UpdateStep]


@pytest.fixture
def make(config: Callable[..., Config], tiny: Callable[..., Path]) -> Make:
    """Make a step whose passes are recorded, or not."""

    def step(recorded: bool = True, **keys: Any) -> UpdateStep:
        if model := {name: keys.pop(name) for name in ("bits", "dtype") if name in keys}:
            keys["model"] = tiny("qwen3", **model)
        settings = config(**keys)
        made = UpdateStep(load_model(settings), Optimizer(settings), settings)
        if not recorded:
            made._recordings = None
        return made

    return step


def make_update(step: UpdateStep, number: int, packing: bool = False) -> UpdateResult:
    first = 8 * VISITS[number]
    batches = plan(ROWS, range(first, first + 8), 2048, packing=packing)
    return step(batches, step=number, learning_rate=0.01, max_grad_norm=1.0)


def update(step: UpdateStep, number: int, packing: bool = False) -> list[float]:
    result = make_update(step, number, packing)
    return [result.loss, result.grad_norm, result.tokens, result.correct]


def same(step: UpdateStep, other: UpdateStep) -> None:
    assert step.model.trainable.keys() == other.model.trainable.keys()
    for name, weight in step.model.trainable.items():
        np.testing.assert_allclose(np.array(weight), np.array(other.model.trainable[name]), atol=2e-5, err_msg=name)
    for name, value in step.state.items():
        np.testing.assert_allclose(np.array(value), np.array(other.state[name]), rtol=1e-3, atol=1e-6, err_msg=name)


def alike(arrays: dict[str, mx.array], others: dict[str, mx.array], most: float) -> None:
    """Hold the distance of arrays to a share of their norm."""
    assert arrays.keys() == others.keys()
    for name, other in others.items():
        apart = float(mx.linalg.norm(arrays[name] - other).item())
        assert apart <= most * float(mx.linalg.norm(other).item()), name


@pytest.mark.parametrize("keys", CASES, ids=repr)
def test_recorded_passes_train_as_others(keys: dict[str, Any], make: Make) -> None:
    ours, theirs = make(**keys), make(recorded=False, **keys)
    packing = keys.get("packing", False)
    for number in range(len(VISITS)):
        got, expected = (update(step, number, packing) for step in (ours, theirs))
        # Attention adds up in any order, and the updates before make more of that.
        np.testing.assert_allclose(got, expected, rtol=1e-3)
    assert ours._recordings is not None
    if keys.get("method") == "full":
        # Gradients close to nothing, of words that are rare, are as good as drawn, and AdamW makes whole steps of them.
        alike(ours.model.trainable, theirs.model.trainable, 0.005)
    else:
        same(ours, theirs)


@pytest.mark.parametrize("keys", [{}, {"gradient_checkpointing": True}, {"lora_keys": ["self_attn.v_proj"]}], ids=repr)
def test_gradients_of_adapters_that_kernels_add_are_those_that_mlx_makes(keys: dict[str, Any], make: Make) -> None:
    ours, theirs = (make(recorded, dtype=mx.bfloat16, **keys) for recorded in (True, False))
    for number in (0, 1):
        make_update(ours, number)
    theirs.model.set_trainable(dict(ours.model.trainable))
    batches = plan(ROWS, range(8), 2048)
    (_, sums), (_, expected) = (step.reduce(step.sums(batches, 2), batches)[0] for step in (ours, theirs))
    sums = ours._layout.split(sums)
    expected = theirs._layout.split(expected)
    alike(sums, expected, 0.02)
    assert ours._recordings is not None


def test_attention_in_groups_of_rows_is_recorded_and_trains_as_rows_apart(make: Make) -> None:
    ours, theirs = make(packing=True), make(recorded=False)
    shapes = shapes_in_groups(SHORT, 128)
    for number, visit in enumerate(VISITS):
        rows = range(8 * visit, 8 * visit + 8)
        batches = plan(SHORT, rows, 128, shapes, packing=True)
        assert any(len(batch.spread) > 1 for batch in batches)
        results = [
            step(batches, step=number, learning_rate=0.001, max_grad_norm=1.0)
            for step, batches in ((ours, batches), (theirs, plan(SHORT, rows, 4096)))
        ]
        np.testing.assert_allclose(results[0].loss, results[1].loss, rtol=1e-4)
        # Attention adds up in another order.
        np.testing.assert_allclose(results[0].grad_norm, results[1].grad_norm, rtol=1e-3)
    assert ours._recordings is not None
    alike(ours.model.trainable, theirs.model.trainable, 0.05)


def test_what_is_computed_between_updates_is_left_alone_and_leaves_recordings_alone(
    make: Make,
) -> None:
    ours, theirs = make(), make(recorded=False)
    (batch,) = plan(ROWS, range(4), 4096)
    for number in range(len(VISITS)):
        kept = [mx.random.normal((size,)) for size in (7, 500, 4096, 70_000)]
        mx.eval(kept)
        before = [np.array(array) for array in kept]
        sums = [float(EvaluateSums(step.model)(batch)[0]) for step in (ours, theirs)]
        np.testing.assert_allclose(sums[0], sums[1], rtol=1e-4)
        np.testing.assert_allclose(update(ours, number), update(theirs, number), rtol=1e-4)
        assert all(np.array_equal(np.array(array), values) for array, values in zip(kept, before))
    same(ours, theirs)


def test_weights_of_before_are_as_they_were_and_those_from_a_checkpoint_are_used(
    make: Make,
) -> None:
    step = make()
    update(step, 0)
    weights, state = dict(step.model.trainable), step.state
    before = {name: np.array(weight) for name, weight in weights.items()}
    expected = [update(step, number) for number in (1, 2, 3)]
    assert all(np.array_equal(np.array(weight), before[name]) for name, weight in weights.items())
    step.model.set_trainable(weights)
    step.state = state
    np.testing.assert_allclose([update(step, number) for number in (1, 2, 3)], expected, rtol=1e-5)


def test_passes_that_were_begun_ahead_are_those_that_are_asked_for(make: Make) -> None:
    ours, theirs = make(lora_dropout=0.2), make(lora_dropout=0.2, recorded=False)
    batches = [plan(ROWS, range(8 * visit, 8 * visit + 8), 2048) for visit in VISITS]
    (between,) = plan(SHORT, range(4), 4096)
    begun = 0
    for number, now in enumerate(batches):
        ours.meanwhile = lambda after=number + 1: batches[after] if after < len(batches) else None
        if number == 5:
            # Others than were announced.
            now = batches[0]
        if number == 6:
            # What was begun was so with the weights of before.
            weights = {name: weight * 0.5 for name, weight in theirs.model.trainable.items()}
            for step in (ours, theirs):
                step.model.set_trainable(dict(weights))
        results = [step(now, step=number, learning_rate=0.01, max_grad_norm=1.0, more=True) for step in (ours, theirs)]
        np.testing.assert_allclose(results[0].loss, results[1].loss, rtol=1e-4)
        np.testing.assert_allclose(results[0].grad_norm, results[1].grad_norm, rtol=1e-3)
        begun += ours._begun is not None
        sums = [float(EvaluateSums(step.model)(between)[0]) for step in (ours, theirs)]
        np.testing.assert_allclose(sums[0], sums[1], rtol=1e-4)
        if number == 3:
            ours.give_back()
    assert begun >= 3
    same(ours, theirs)


def test_what_recordings_keep_is_given_back_while_training_stands_still(make: Make) -> None:
    ours, theirs = make(), make(recorded=False)
    for number in range(len(VISITS)):
        np.testing.assert_allclose(update(ours, number), update(theirs, number), rtol=1e-4)
        if number == 4:
            held = mx.get_active_memory()
            ours.give_back()
            assert ours._recordings is not None
            assert mx.get_active_memory() < held
            assert ours._recordings._arena.size == 0
    same(ours, theirs)


def test_without_room_passes_are_handed_over_anew(make: Make) -> None:
    ours, theirs = make(), make(recorded=False)
    assert ours._recordings is not None
    ours._recordings._most = 1
    results = [make_update(ours, number) for number in (0, 1)]
    np.testing.assert_allclose([r.loss for r in results], [make_update(theirs, n).loss for n in (0, 1)], rtol=1e-4)
    assert ours._recordings is None
    assert "GB" in results[0].not_recorded
    assert not results[1].not_recorded


def test_recordings_make_room_for_others(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = make(), make(recorded=False)
    record, calls = recordings.Recordings._record, 0

    def without_room(self: recordings.Recordings, *args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise recordings.NoRoom("full")
        record(self, *args)

    monkeypatch.setattr(recordings.Recordings, "_record", without_room)
    for number in range(len(VISITS)):
        np.testing.assert_allclose(update(ours, number), update(theirs, number), rtol=1e-4)
    assert ours._recordings is not None
    assert ours._recordings._fresh_starts == recordings._FRESH_STARTS - 1
    same(ours, theirs)


def test_a_recording_that_does_something_else_is_not_used(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = make(), make(recorded=False)
    monkeypatch.setattr(recordings._Recording, "repeat", lambda self: None)
    results = [make_update(ours, number) for number in (0, 1)]
    np.testing.assert_allclose([r.loss for r in results], [make_update(theirs, n).loss for n in (0, 1)], rtol=1e-4)
    assert ours._recordings is None
    assert "apart" in results[0].not_recorded


@pytest.mark.parametrize("packing", [False, True])
def test_recordings_of_growing_passes_share_the_memory_of_the_largest(
    packing: bool, tiny: Callable[..., Path], make: Make
) -> None:
    model, rows = tiny("qwen3", hidden_size=256, intermediate_size=1024), RandomRows(16, longest=200)
    updates = [plan(rows, range(count), 8192, CPU, packing=packing) for count in (4, 8, 12, 16)]
    all_of_them = [batch for batches in updates for batch in batches]
    largest = max(all_of_them, key=lambda batch: batch.tokens.size + sum(part.size for part in batch.spread))
    shape = Shape(*largest.tokens.shape, largest.positions.size, tuple(part.shape for part in largest.spread))

    def run(batches: list[list[MicroBatch]], expected: bool) -> tuple[list[list[float]], int]:
        step, results = make(model=model, packing=packing), []
        if expected:
            step.expect(blank(shape))
        for number, part in enumerate(batches):
            made = step(part, step=number, learning_rate=0.001, max_grad_norm=1.0)
            results.append([made.loss, made.grad_norm])
        assert step._recordings is not None
        return results, step._recordings._arena.size

    ours, size = run(updates, True)
    theirs, unexpected = run(updates, False)
    _, alone = run([[largest]], False)
    np.testing.assert_allclose(ours, theirs, rtol=1e-3)
    assert size < 2 * alone
    assert size < 0.95 * unexpected


def test_recordings_share_their_memory(tiny: Callable[..., Path], make: Make) -> None:
    step = make(model=tiny("qwen3", hidden_size=256, intermediate_size=1024))
    sizes = []
    for rows in (16, 14, 12, 10):
        batches = plan(RandomRows(16, longest=200), range(rows), 8192)
        step(batches, step=1, learning_rate=0.01, max_grad_norm=1.0)
        assert step._recordings is not None
        sizes.append(step._recordings._arena.size)
    assert sizes[-1] < 1.7 * sizes[0], sizes
