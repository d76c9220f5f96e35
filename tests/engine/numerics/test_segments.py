"""Packed rows: the loss, norm, gradients and weights of the same rows apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny import FAMILIES, RandomRows, shapes_in_groups

from trainwire_engine import segments
from trainwire_engine.batches import plan
from trainwire_engine.cuda import kernels
from trainwire_engine.dropout import token_keys
from trainwire_engine.model import load_model
from trainwire_engine.optimizer import Optimizer
from trainwire_engine.palette import Palette
from trainwire_engine.passes import EvaluateSums
from trainwire_engine.segments import PROVED, apart
from trainwire_engine.shapes import CPU, CUDA, Shapes
from trainwire_engine.step import UpdateStep
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


def in_groups(budget: int) -> Palette:
    """Shapes for the rows whose attention works in several groups."""
    return shapes_in_groups(ROWS, budget)


@pytest.mark.parametrize(("family", "method", "checkpointing"), CASES)
def test_packed_rows_train_as_rows_apart(
    family: str, method: str, checkpointing: bool, config: Callable[..., Config], tiny: Callable[..., Path]
) -> None:
    special: dict[str, tuple[str, Any]] = {"packed": ("qwen3", {"bits": 4}), "windowed": ("llama", WINDOWED)}
    family, more = special.get(family, (family, {}))
    keys = {"model": tiny(family, **more), "method": method, "gradient_checkpointing": bool(checkpointing)}
    found = []
    grouped = in_groups(128)
    assert all(len(batch.spread) > 1 for batch in plan(ROWS, range(8), 128, grouped, packing=True))
    ways = [(False, 4096, CPU), (True, 128, CPU), (True, 128, grouped), (True, 4096, CPU), (True, 4096, CUDA)]
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


@pytest.mark.parametrize("policy", [CPU, CUDA, in_groups(256)])
def test_every_token_of_a_packed_row_has_its_place_in_attention(policy: Shapes | Palette) -> None:
    batches = plan(ROWS, range(16), 256, policy, packing=True)
    assert len({len(batch.spread) for batch in batches} - {1}) == isinstance(policy, Palette)
    for batch in batches:
        assert batch.back is not None
        at = np.flatnonzero(batch.back >= 0)
        assert (np.concatenate([group.reshape(-1) for group in batch.spread])[batch.back[at]] == at).all()
        lines = [line for group in batch.spread for line in group]
        assert len(lines) >= len(batch.rows)
        for line, row in zip(lines, batch.rows):
            places = line[line >= 0]
            assert (line[: len(places)] == places).all()
            assert batch.tokens[0, places].tolist() == ROWS.tokens(row)[: len(places)].tolist()
        assert all((line < 0).all() for line in lines[len(batch.rows) :])


@pytest.mark.parametrize(("family", "groups"), [("qwen3", 4), ("llama", 4), ("cohere2", 1)])
def test_several_groups_pay_where_rotary_positions_leave_the_row_flat(
    family: str, groups: int, config: Callable[..., Config], tiny: Callable[..., Path]
) -> None:
    model = load_model(config(model=tiny(family), packing=True))
    assert segments.most_groups(model.module) == groups


def test_a_token_has_the_same_dropout_in_a_group_as_in_a_row_of_its_own() -> None:
    apart_keys = {row: token_keys(plan(ROWS, [row], 4096, CPU)[0], 1, 2)[0] for row in range(16)}
    for batch in plan(ROWS, range(16), 256, in_groups(256), packing=True):
        keys, start = token_keys(batch, 1, 2)[0], 0
        for row in batch.rows:
            size = int(np.flatnonzero(ROWS.mask(row))[-1])
            assert np.array_equal(keys[start : start + size], apart_keys[row][:size])
            start += size


def test_masks_are_made_for_the_length_of_each_group() -> None:
    lengths: list[int] = []

    class Home:
        @staticmethod
        def create_attention_mask(h: mx.array, window: int) -> mx.array | str:
            lengths.append(h.shape[1])
            return "causal" if h.shape[1] <= window else mx.zeros((h.shape[1],) * 2)

    mask = segments._masking(Home.create_attention_mask)
    spread = [mx.zeros((2, length), mx.int32) for length in (12, 8, 4)]
    with apart(mx.zeros(48, mx.int32), *spread):
        found = mask(mx.zeros((1, 40)), window=8)
        assert mask(mx.zeros((1, 40)), window=16) == "causal"
    assert lengths[:3] == [12, 8, 4]
    assert [found[0].shape, *found[1:]] == [(12, 12), "causal", "causal"]
    assert [segments._of(group, [found, 3])[0] is found[group] for group in range(3)] == [True] * 3


def test_on_a_card_rows_are_dealt_out_and_joined_by_one_kernel_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = max(plan(ROWS, range(16), 256, in_groups(256), packing=True), key=lambda batch: len(batch.spread))
    spread, back = [mx.array(group) for group in batch.spread], mx.array(batch.back)
    x = mx.array(np.random.default_rng(0).normal(size=(1, 3, back.size, 5)).astype(np.float32))
    upstream = mx.array(np.random.default_rng(1).normal(size=x.shape).astype(np.float32))

    def attention(x: mx.array) -> mx.array:
        with apart(back, *spread):
            return segments._joined([part * (2 + n) for n, part in enumerate(segments._groups(x))])

    wanted = mx.vjp(attention, [x], [upstream])
    calls: list[str] = []

    def take(x: mx.array, index: mx.array) -> mx.array:
        calls.append("take")
        return mx.concatenate([x, mx.zeros((1, x.shape[1]))])[mx.where(index < 0, x.shape[0], index)].reshape(-1)

    def join(sources: list[mx.array], index: mx.array) -> mx.array:
        calls.append("join")
        return mx.concatenate([*sources, mx.zeros((1, sources[0].shape[1]))])[index]

    monkeypatch.setattr(kernels, "ready", lambda *_: True)
    monkeypatch.setattr(kernels, "take", take)
    monkeypatch.setattr(kernels, "join", join)
    for ours, theirs in zip(mx.vjp(attention, [x], [upstream]), wanted):
        np.testing.assert_allclose(np.array(ours[0]), np.array(theirs[0]), rtol=1e-6)
    assert sorted(calls) == ["join", "join", "take", "take"]


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
    other = both.spread[0][0][both.spread[0][0] >= 0]
    changed[0, other] = (changed[0, other] + 7) % 500
    last = both.weights * (both.positions > other.max())
    kept = type(both)(**{**vars(both), "weights": last.astype(np.float32)})
    moved = type(both)(**{**vars(kept), "tokens": changed})
    assert last.sum() > 0
    assert mx.array_equal(sums(kept)[0], sums(moved)[0])
