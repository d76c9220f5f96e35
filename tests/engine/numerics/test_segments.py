"""Packed rows: the loss, norm, gradients and weights of the same rows apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny import FAMILIES, RandomRows

from trainwire_engine.batches import Order, plan
from trainwire_engine.feed import shapes_of_run
from trainwire_engine.model import load_model
from trainwire_engine.optimizer import Optimizer
from trainwire_engine.segments import PROVED
from trainwire_engine.shapes import CPU, CUDA
from trainwire_engine.step import EvaluateSums, UpdateStep
from trainwire_protocol.config import Config
from trainwire_protocol.errors import Unsupported

ROWS = RandomRows(16)


WINDOWED = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": False}
CASES = [
    *((family, "lora", False) for family in PROVED),
    *((family, method, again) for family in ("qwen3", "llama") for method in ("dora", "full") for again in (0, 1)),
    ("qwen3", "lora", True),
    ("packed", "lora", True),
    ("mistral", "lora", False),
    ("windowed", "full", True),
]


@pytest.mark.parametrize(("family", "method", "checkpointing"), CASES)
def test_packed_rows_train_as_rows_apart(
    family: str, method: str, checkpointing: bool, config: Callable[..., Config], tiny: Callable[..., Path]
) -> None:
    special: dict[str, tuple[str, Any]] = {"packed": ("qwen3", {"bits": 4}), "windowed": ("llama", WINDOWED)}
    family, more = special.get(family, (family, {}))
    keys = {"model": tiny(family, **more), "method": method, "gradient_checkpointing": bool(checkpointing)}
    found = []
    run = Config(model="m", data="x", batch_size=8, micro_batch_tokens=128, packing=True)
    chosen = shapes_of_run(ROWS, Order(16, 8, seed=0), run, 10**4, device=CUDA)
    ways = [(False, 4096, CPU), (True, 128, CPU), (True, 128, chosen), (True, 4096, CPU), (True, 4096, CUDA)]
    for packing, budget, policy in ways if family in ("qwen3", "llama") else ways[:3]:
        settings = config(**keys, packing=packing, optimizer="sgd")
        model = load_model(settings)
        step = UpdateStep(model, Optimizer(settings), settings)
        figures = []
        for number in range(2):
            batches = plan(ROWS, range(8 * number, 8 * number + 8), budget, policy, packing=packing)
            result = step(batches, step=number, learning_rate=0.5, max_grad_norm=1.0)
            figures += [result.loss, result.grad_norm, result.tokens, result.correct]
        sums = [EvaluateSums(model)(batch) for batch in plan(ROWS, range(4), budget, policy, packing=packing)]
        figures.append(sum(float(loss) for loss, _ in sums))
        found.append((figures, dict(model.trainable)))
    for figures, weights in found[1:]:
        np.testing.assert_allclose(figures, found[0][0], rtol=2e-5)
        for name, weight in weights.items():
            np.testing.assert_allclose(weight, found[0][1][name], atol=1e-5, err_msg=name)


def test_a_packed_row_has_only_the_padding_of_its_end() -> None:
    batches = plan(ROWS, range(16), 256, CPU, packing=True)
    assert all(batch.tokens.shape[0] == 1 for batch in batches)
    assert all(batch.tokens.size - batch.real_tokens < 64 for batch in batches)
    for batch in batches:
        assert batch.spread is not None
        assert batch.back is not None
        at = np.flatnonzero(batch.back >= 0)
        assert (batch.spread.reshape(-1)[batch.back[at]] == at).all()
        for index, row in enumerate(batch.rows):
            places = batch.spread[index][batch.spread[index] >= 0]
            assert batch.tokens[0, places].tolist() == ROWS.tokens(row)[: len(places)].tolist()


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(PROVED)))
def test_packing_is_refused_where_it_is_not_proved(
    family: str, config: Callable[..., Config], tiny: Callable[..., Path]
) -> None:
    with pytest.raises(Unsupported, match=f"not proved to be exact for models of the type '{family}'"):
        load_model(config(model=str(tiny(family)), packing=True))


def test_no_example_sees_another(config: Callable[..., Config], tiny: Callable[..., Path]) -> None:
    settings = config(model=str(tiny("qwen3")), packing=True)
    model = load_model(settings)
    sums = EvaluateSums(model)
    (both,) = plan(ROWS, [0, 1], 4096, CPU, packing=True)
    changed = both.tokens.copy()
    other = both.spread[0][both.spread[0] >= 0]  # type: ignore[index]
    changed[0, other] = (changed[0, other] + 7) % 500
    last = both.weights * (both.positions > other.max())
    kept = type(both)(**{**vars(both), "weights": last.astype(np.float32)})
    moved = type(both)(**{**vars(kept), "tokens": changed})
    assert last.sum() > 0
    assert mx.array_equal(sums(kept)[0], sums(moved)[0])
