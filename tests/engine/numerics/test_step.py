"""Updates: the same whatever the split, equal to mlx-lm's loss, untouched where a number is not finite."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny import FAMILIES, RandomRows

from trainwire_engine import adapters, native
from trainwire_engine import lanes as engine_lanes
from trainwire_engine.batches import MicroBatch, plan
from trainwire_engine.dropout import token_keys
from trainwire_engine.model import Model, load_model
from trainwire_engine.optimizer import Optimizer
from trainwire_engine.passes import EvaluateSums
from trainwire_engine.shapes import CPU
from trainwire_engine.step import UpdateResult, UpdateStep
from trainwire_protocol.config import Config

ROWS = RandomRows(16)
EIGHT = list(range(8))
ONE_PASS = replace(CPU, pass_cost=10**6)


def rounding(family: str) -> float:
    """How near norms of gradients are: the recurrence of qwen3_5 magnifies the rounding of products."""
    return 2e-4 if family == "qwen3_5" else 1e-5


def assert_alike(one: tuple[list[UpdateResult], Any], other: tuple[list[UpdateResult], Any]) -> None:
    """Compare the updates and the weights of two runs."""
    for plain, again in zip(one[0], other[0]):
        assert again.loss == pytest.approx(plain.loss, abs=1e-5)
        assert again.grad_norm == pytest.approx(plain.grad_norm, rel=1e-5)
    for name, value in one[1].items():
        np.testing.assert_allclose(other[1][name], value, atol=1e-5, err_msg=name)


def make(config: Config) -> tuple[Model, UpdateStep]:
    model = load_model(config)
    return model, UpdateStep(model, Optimizer(config), config)


def update(
    step: UpdateStep, batches: list[MicroBatch], number: int = 0, rate: float = 0.05, norm: float | None = 1.0
) -> UpdateResult:
    return step(batches, step=number, learning_rate=rate, max_grad_norm=norm)


METHODS = [
    *((family, method) for family in FAMILIES for method in ("lora", "dora", "full")),
    ("packed", "lora"),
    ("packed", "dora"),
]


@pytest.mark.parametrize(("family", "method"), METHODS)
def test_every_split_gives_one_loss_norm_and_weights(
    config: Callable[..., Config], tiny: Callable[..., Path], family: str, method: str
) -> None:
    folder = tiny(bits=4) if family == "packed" else tiny(family)
    outcomes = []
    for split in ([EIGHT], [[row] for row in EIGHT], [EIGHT[:3], EIGHT[3:4], EIGHT[4:]]):
        model, step = make(config(model=folder, method=method, optimizer="sgd"))
        results = []
        for number in range(3):
            batches = [batch for rows in split for batch in plan(ROWS, rows, 4096, ONE_PASS)]
            assert len(batches) == len(split)
            results.append(update(step, batches, number))
        outcomes.append((results, {name: np.array(value) for name, value in model.trainable.items()}))
    (whole, weights), *others = outcomes
    assert [result.skipped for result in whole] == [False] * 3
    assert whole[2].loss < whole[0].loss
    assert whole[0].tokens == ROWS.trained[:8].sum()
    for results, other in others:
        for ours, theirs in zip(whole, results):
            assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=rounding(family), abs=1e-5)
            assert (ours.tokens, ours.correct) == (theirs.tokens, theirs.correct)
        for name, value in weights.items():
            np.testing.assert_allclose(value, other[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_the_losses_of_ten_updates_equal_mlx_lms_own(
    config: Callable[..., Config], tiny: Callable[..., Path], family: str
) -> None:
    from mlx_lm.tuner.trainer import default_loss

    rows = RandomRows(8, seed=4)
    for row in range(8):
        rows.mask(row)[:] = np.arange(len(rows.mask(row))) >= 2
    model, step = make(config(model=tiny(family), schedule="constant"))
    longest = int(rows.lengths.max())
    batch = mx.array(np.stack([np.pad(rows.tokens(row), (0, longest - len(rows.tokens(row)))) for row in range(8)]))
    # mlx-lm counts targets: position p of the row is target p - 1, and the bounds are inclusive from 1.
    bounds = mx.array([[2, int(length) - 1] for length in rows.lengths])
    for number in range(10):
        theirs, tokens = default_loss(model.module, batch, bounds)
        ours = update(step, plan(rows, EIGHT, 64), number, rate=3e-3)
        assert ours.tokens == tokens.item()
        assert ours.loss == pytest.approx(theirs.item(), abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_lanes_change_no_number(
    config: Callable[..., Config], tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    outcomes = []
    for worth in (2**60, 1):
        monkeypatch.setattr(engine_lanes, "WORTH", worth)
        model, step = make(config(model=tiny(family), method="full", optimizer="sgd"))
        batches = plan(ROWS, EIGHT, 4096, ONE_PASS)
        spread, lane_of = step.lanes.spread(batches)
        assert len(set(lane_of)) == (1 if worth > 1 else min(native.cores(), 8))
        assert len(spread) == len(set(lane_of))
        outcomes.append(([update(step, batches, n) for n in range(2)], model.trainable))
    (alone, weights), (together, others) = outcomes
    for ours, theirs in zip(alone, together):
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=rounding(family))
        assert (ours.tokens, ours.correct) == (theirs.tokens, theirs.correct)
    for name, value in weights.items():
        np.testing.assert_allclose(value, others[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_split_changes_nothing_with_clipping_smoothing_and_adamw(
    config: Callable[..., Config], method: str
) -> None:
    losses = []
    for budget in (40, 4096):
        keys = {"label_smoothing": 0.1, "max_grad_value": 1e-3, "weight_decay": 0.1}
        _, step = make(config(method=method, **keys))
        losses.append([update(step, plan(ROWS, EIGHT, budget), n, rate=1e-3, norm=0.01).loss for n in range(4)])
    np.testing.assert_allclose(losses[0], losses[1], atol=1e-5)
    assert losses[0][3] < losses[0][0]


def test_gradients_are_clipped_to_the_norm_and_to_the_value(config: Callable[..., Config]) -> None:
    def moved(norm: float | None, **keys: Any) -> tuple[UpdateResult, np.ndarray]:
        model, step = make(config(optimizer="sgd", method="full", **keys))
        before = {name: np.array(value) for name, value in model.trainable.items()}
        result = update(step, plan(ROWS, EIGHT, 4096), rate=1.0, norm=norm)
        return result, np.concatenate([(before[n] - np.array(v)).ravel() for n, v in model.trainable.items()])

    free, gradient = moved(None)
    assert free.grad_norm == pytest.approx(np.linalg.norm(gradient), rel=1e-4)
    for off in (0.0, float("inf")):
        np.testing.assert_allclose(moved(off)[1], gradient, atol=1e-6)
    clipped, change = moved(0.25)
    assert clipped.grad_norm == pytest.approx(free.grad_norm, rel=1e-6)
    np.testing.assert_allclose(change, gradient * 0.25 / free.grad_norm, atol=1e-5)
    _, change = moved(None, max_grad_value=1e-3)
    np.testing.assert_allclose(change, np.clip(gradient, -1e-3, 1e-3), atol=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_update_that_is_not_finite_leaves_weights_state_and_count(
    config: Callable[..., Config], tiny: Callable[..., Path], optimizer: str
) -> None:
    model, step = make(config(model=tiny("llama"), optimizer=optimizer))
    rows = RandomRows(9)
    poison = 1
    embedding = model.module.model.embed_tokens
    embedding.weight[poison] = float("nan")
    rows.tokens(8)[0] = poison
    update(step, plan(rows, EIGHT, 64))
    weights, state = dict(model.trainable), dict(step.state)
    assert state["count"].item() == 1
    result = update(step, plan(rows, [*EIGHT, 8], 64), 1)
    assert result.skipped
    assert np.isnan(result.loss)
    assert result.tokens == rows.trained.sum()
    assert all(mx.array_equal(model.trainable[name], value) for name, value in weights.items())
    assert step.state.keys() == state.keys()
    assert all(mx.array_equal(step.state[name], value) for name, value in state.items())
    assert not update(step, plan(rows, EIGHT, 64), 2).skipped
    assert step.state["count"].item() == 2


def test_the_optimizers_state_can_be_set(config: Callable[..., Config]) -> None:
    model, step = make(config())
    update(step, plan(ROWS, EIGHT, 64), 0)
    weights, state = dict(model.trainable), dict(step.state)
    expected = update(step, plan(ROWS, EIGHT, 64), 1), dict(model.trainable)
    again, resumed = make(config())
    again.set_trainable(weights)
    resumed.state = state
    result = update(resumed, plan(ROWS, EIGHT, 64), 1)
    assert result == expected[0]
    assert all(mx.array_equal(again.trainable[name], value) for name, value in expected[1].items())


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_moe"])
def test_dropout_depends_on_seed_and_update_alone(
    config: Callable[..., Config], tiny: Callable[..., Path], family: str
) -> None:
    def losses(seed: int, disturb: bool = False) -> list[float]:
        model, step = make(config(model=tiny(family), lora_dropout=0.5, optimizer="sgd"))
        step._seed = seed
        found = []
        for number in range(3):
            found.append(update(step, plan(ROWS, EIGHT, 64), number, rate=1.0, norm=None).loss)
            if disturb:
                mx.random.seed(9)
                mx.eval(model.module(mx.array([[1, 2, 3]])), EvaluateSums(model)(plan(ROWS, [0], 64)[0]))
        return found

    first = losses(0)
    assert losses(0, disturb=True) == first
    assert losses(1)[0] == first[0]  # B is zero at the start, so nothing is dropped yet.
    assert losses(1)[2] != first[2]


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "llama"])
def test_a_row_is_dropped_out_at_its_own_places_in_every_split(
    config: Callable[..., Config], tiny: Callable[..., Path], family: str, method: str
) -> None:
    outcomes = []
    ways: list[dict[str, Any]] = [{"micro_batch_tokens": 4096}, {"micro_batch_tokens": 40}]
    ways += [{"micro_batch_tokens": 4096, "packing": True}] if family != "qwen3_5" else []
    for way in ways:
        keys = {"method": method, "lora_dropout": 0.5, "optimizer": "sgd", "packing": "packing" in way}
        model, step = make(config(model=tiny(family), **keys))
        results = [update(step, plan(ROWS, EIGHT, **way), number, rate=0.1) for number in range(3)]
        outcomes.append((results, {name: np.array(value) for name, value in model.trainable.items()}))
    (whole, weights), *others = outcomes
    for results, other in others:
        for ours, theirs in zip(whole, results):
            assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
        for name, value in weights.items():
            np.testing.assert_allclose(value, other[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("packing", [False, True])
def test_no_two_tokens_of_an_update_share_a_key_of_dropout(*, packing: bool) -> None:
    batches = plan(ROWS, EIGHT, 64, packing=packing)
    keys = np.concatenate([token_keys(batch, 0, 1).reshape(-1, 2) for batch in batches])
    used = keys[keys.any(axis=1)]
    assert len(used) >= sum(batch.real_tokens for batch in batches)
    assert len(np.unique(used, axis=0)) == len(used)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(
    ("family", "method"), [(f, "lora") for f in FAMILIES] + [("qwen3", "full"), ("packed", "dora")]
)
def test_gradient_checkpointing_changes_no_number(
    config: Callable[..., Config], tiny: Callable[..., Path], family: str, method: str, dropout: float
) -> None:
    folder = tiny(bits=4) if family == "packed" else tiny(family)
    keys = {"model": folder, "method": method, "lora_dropout": dropout, "optimizer": "sgd"}
    runs = []
    for checkpointing in (False, True):
        model, step = make(config(gradient_checkpointing=checkpointing, **keys))
        results = [update(step, plan(ROWS, EIGHT, 128), number, rate=0.5) for number in range(2)]
        runs.append((results, model.trainable))
    assert_alike(*runs)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "packed"])
def test_adapters_in_few_products_as_on_a_gpu_change_no_number(
    config: Callable[..., Config],
    tiny: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    checkpointing: bool,
) -> None:
    folder = tiny(bits=4) if family == "packed" else tiny(family)
    keys = {"model": folder, "method": "lora", "optimizer": "sgd", "gradient_checkpointing": checkpointing}
    runs = []
    for on_cpu in (True, False):
        monkeypatch.setattr(adapters, "on_cpu", lambda on_cpu=on_cpu: on_cpu)
        model, step = make(config(**keys))
        results = [update(step, plan(ROWS, EIGHT, 128), number, rate=0.5) for number in range(2)]
        runs.append((results, model.trainable))
    assert_alike(*runs)


def test_checkpointing_one_model_leaves_others_of_its_class_alone(config: Callable[..., Config]) -> None:
    checkpointed, plain = (load_model(config(gradient_checkpointing=on)) for on in (True, False))
    kinds = [type(model.module.layers[0]) for model in (checkpointed, plain)]
    assert kinds[0] is not kinds[1]
    assert kinds[1].__call__ is not kinds[0].__call__


@pytest.mark.parametrize("family", FAMILIES)
def test_an_evaluation_gives_the_loss_that_training_starts_from(
    config: Callable[..., Config], tiny: Callable[..., Path], family: str
) -> None:
    model, step = make(config(model=tiny(family), lora_dropout=0.3, label_smoothing=0.2))
    update(step, plan(ROWS, EIGHT, 64), 0, rate=1e-2)
    plain_config = config(model=tiny(family))
    plain, check = make(plain_config)
    plain.set_trainable(model.trainable)
    evaluate, batches = EvaluateSums(model), plan(ROWS, EIGHT, 100)
    sums = [evaluate(batch) for batch in batches]
    expected = update(check, batches, rate=0.0)
    assert sum(loss.item() for loss, _ in sums) / expected.tokens == pytest.approx(expected.loss, abs=1e-5)
    assert sum(int(correct.item()) for _, correct in sums) == expected.correct
    follow = update(step, batches, 1, rate=1e-2)
    assert not follow.skipped


def test_a_model_whose_head_is_not_separable_trains_on_whole_logits(
    config: Callable[..., Config], tiny: Callable[..., Path]
) -> None:
    keys = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}
    losses = []
    for budget in (64, 4096):
        model, step = make(config(model=tiny("gemma2", **keys), method="full", optimizer="sgd"))
        assert model.head == "full"
        losses.append([update(step, plan(ROWS, EIGHT, budget), n).loss for n in range(3)])
    np.testing.assert_allclose(losses[0], losses[1], atol=1e-5)
    assert losses[0][2] < losses[0][0]


@pytest.mark.parametrize("method", ["lora", "full"])
def test_bfloat16_models_learn_with_float32_masters(
    config: Callable[..., Config], tiny: Callable[..., Path], method: str
) -> None:
    model, step = make(config(model=tiny("qwen3", dtype=mx.bfloat16), method=method))
    losses = [update(step, plan(ROWS, EIGHT, 128), number, rate=3e-3).loss for number in range(6)]
    assert losses[-1] < losses[0] - 0.2
    assert {value.dtype for value in (*model.trainable.values(),)} == {mx.float32}


@pytest.mark.parametrize("worth", [1, 2**60], ids=["lanes", "one lane"])
def test_memory_does_not_grow_with_the_number_of_micro_batches(
    config: Callable[..., Config], tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, worth: int
) -> None:
    monkeypatch.setattr(engine_lanes, "WORTH", worth)
    rows = RandomRows(32, shortest=60, longest=64)

    def peak(count: int) -> int:
        gc.collect()
        others = mx.get_active_memory()
        _, step = make(config(model=tiny("qwen3"), method="full"))
        update(step, plan(rows, list(range(count)), 64))
        mx.clear_cache()
        mx.reset_peak_memory()
        # As many micro-batches in all: lanes at their fullest meet by chance, with each the same.
        for number in range(32 // count):
            update(step, plan(rows, list(range(count)), 64), number + 1)
        return mx.get_peak_memory() - others

    assert peak(32) < 1.5 * peak(4)


def test_after_an_update_that_failed_halfway_there_is_no_state_to_save(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, step = make(config())
    update(step, plan(ROWS, EIGHT, 4096))
    weights, state = dict(model.trainable), step.state
    evaluate = mx.eval

    def fail(*arrays: Any) -> None:
        if len(arrays) == 3:
            raise RuntimeError("Unable to allocate")
        evaluate(*arrays)

    with monkeypatch.context() as broken:
        broken.setattr(mx, "eval", fail)
        with pytest.raises(RuntimeError, match="allocate"):
            update(step, plan(ROWS, EIGHT, 4096), 1)
    with pytest.raises(RuntimeError, match="halfway"):
        _ = step.state
    model.set_trainable(weights)
    step.state = state
    assert int(step.state["count"]) == 1
