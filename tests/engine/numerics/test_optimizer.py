"""Optimizers against their references, and schedules at their corners."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from trainwire_engine.optimizer import Optimizer, Schedule, is_matrix
from trainwire_engine.update_rules import RULES
from trainwire_protocol.config import Config
from trainwire_protocol.errors import ConfigInvalid

torch = pytest.importorskip("torch")

SHAPES = {"a.weight": (7, 5), "b.weight": (4, 6), "norm.weight": (5,), "c.bias": (3,)}


def gradients(step: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(step)
    return {
        name: (draw.standard_normal(shape) * 10.0 ** -(step % 4)).astype(np.float32) for name, shape in SHAPES.items()
    }


def run(config: Config, steps: int, learning_rate: float = 1e-2) -> dict[str, np.ndarray]:
    optimizer = Optimizer(config)
    params = {name: mx.array(value) for name, value in gradients(1000).items()}
    state = optimizer.init(params)
    for step in range(steps):
        grads = {name: mx.array(value) for name, value in gradients(step).items()}
        params, state = optimizer.apply(params, grads, state, mx.array(learning_rate))
    assert state["count"].item() == steps
    return {name: np.array(value) for name, value in params.items()}


def run_torch(make: Callable[[list[dict[str, Any]]], Any], steps: int) -> dict[str, np.ndarray]:
    params = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in gradients(1000).items()}
    matrices = [param for param in params.values() if param.ndim >= 2]
    others = [param for param in params.values() if param.ndim < 2]
    optimizer = make([{"params": matrices}, {"params": others, "weight_decay": 0.0}])
    for step in range(steps):
        for name, value in gradients(step).items():
            params[name].grad = torch.tensor(value)
        optimizer.step()
    return {name: param.detach().numpy() for name, param in params.items()}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("arguments", [{}, {"betas": [0.8, 0.95], "eps": 1e-6}, {"betas": [0.0, 0.999]}])
def test_adamw_equals_torch_to_1e_6(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], decay: float, fused: bool
) -> None:
    if fused:
        monkeypatch.setattr("trainwire_engine.optimizer.FUSED_FROM", 0)
        monkeypatch.setattr("trainwire_engine.optimizer.FUSED_WITH", 0)
    ours = run(config(optimizer_args=arguments, weight_decay=decay), 60)
    theirs = run_torch(
        lambda groups: torch.optim.AdamW(
            groups, lr=1e-2, weight_decay=decay, **{k: tuple(v) if k == "betas" else v for k, v in arguments.items()}
        ),
        60,
    )
    for name in SHAPES:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-6, err_msg=name)


def test_adafactor_equals_transformers(config: Callable[..., Config]) -> None:
    adafactor = pytest.importorskip("transformers.optimization").Adafactor
    ours = run(config(optimizer="adafactor"), 20)
    theirs = run_torch(
        lambda groups: adafactor(groups, lr=1e-2, scale_parameter=False, relative_step=False, warmup_init=False), 20
    )
    for name in SHAPES:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_equals_torch(config: Callable[..., Config], nesterov: bool) -> None:
    ours = run(config(optimizer="sgd", optimizer_args={"momentum": 0.9, "nesterov": nesterov}), 20)
    theirs = run_torch(lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=nesterov), 20)
    for name in SHAPES:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_lion_moves_every_entry_by_the_sign_of_its_momentum(config: Callable[..., Config]) -> None:
    ours = run(config(optimizer="lion"), 5)
    for name, start in gradients(1000).items():
        weight, mean = start.astype(np.float64), np.zeros_like(start, np.float64)
        for step in range(5):
            grad = gradients(step)[name]
            weight -= 1e-2 * np.sign(0.9 * mean + 0.1 * grad)
            mean = 0.99 * mean + 0.01 * grad
        np.testing.assert_allclose(ours[name], weight, atol=1e-6, err_msg=name)


def test_muon_orthogonalizes_matrices_and_leaves_the_rest_to_adamw(config: Callable[..., Config]) -> None:
    ours = run(config(optimizer="muon"), 1, learning_rate=1.0)
    start = gradients(1000)
    change = start["a.weight"] - ours["a.weight"]
    singular = np.linalg.svd(change / math.sqrt(7 / 5), compute_uv=False)
    assert singular.min() > 0.6
    assert singular.max() < 1.3
    np.testing.assert_allclose(np.abs(start["norm.weight"] - ours["norm.weight"]), 1.0, atol=1e-4)


def test_muon_takes_embeddings_and_heads_for_no_matrices() -> None:
    matrix = mx.zeros((4, 4))
    assert is_matrix("model.layers.0.mlp.up_proj.weight", matrix)
    assert is_matrix("model.embed_tokens.lora_a", matrix)
    assert not is_matrix("model.embed_tokens.weight", matrix)
    assert not is_matrix("lm_head.weight", matrix)
    assert not is_matrix("model.norm.weight", mx.zeros((4,)))


@pytest.mark.parametrize("name", RULES)
def test_weight_decay_is_decoupled_and_spares_norms_and_biases(config: Callable[..., Config], name: str) -> None:
    plain = run(config(optimizer=name), 1)
    decayed = run(config(optimizer=name, weight_decay=0.5), 1)
    start = gradients(1000)
    for key, shape in SHAPES.items():
        expected = plain[key] - (1e-2 * 0.5 * start[key] if len(shape) > 1 else 0)
        np.testing.assert_allclose(decayed[key], expected, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("name", RULES)
def test_a_refused_update_leaves_weights_state_and_count(config: Callable[..., Config], name: str) -> None:
    optimizer = Optimizer(config(optimizer=name))
    params = {key: mx.array(value) for key, value in gradients(1000).items()}
    state = optimizer.init(params)
    params, state = optimizer.apply(params, {k: mx.array(v) for k, v in gradients(0).items()}, state, mx.array(0.1))
    grads = {key: mx.full(value.shape, float("nan")) for key, value in params.items()}
    after, after_state = optimizer.apply(params, grads, state, mx.array(0.1), accept=mx.array(False))
    assert all(mx.array_equal(after[key], params[key]) for key in params)
    assert all(mx.array_equal(after_state[key], state[key]) for key in state)


@pytest.mark.parametrize("name", RULES)
def test_state_has_the_dtype_of_the_weights(config: Callable[..., Config], name: str) -> None:
    optimizer = Optimizer(config(optimizer=name, trainable_dtype="model"))
    params = {"w": mx.ones((4, 3), mx.bfloat16)}
    state = optimizer.init(params)
    after, after_state = optimizer.apply(params, {"w": mx.ones((4, 3))}, state, mx.array(0.1))
    assert after["w"].dtype == mx.bfloat16
    assert {k: v.dtype for k, v in state.items()} == {k: v.dtype for k, v in after_state.items()}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("adamw", {"beta": 0.9}),
        ("adamw", {"betas": [0.9]}),
        ("adamw", {"betas": [0.9, 1.0]}),
        ("adamw", {"eps": 0}),
        ("sgd", {"momentum": 1.0}),
        ("sgd", {"nesterov": 1}),
        ("muon", {"ns_steps": 0}),
        ("adafactor", {"decay_rate": 0.8}),
        ("lion", {"betas": [0.9, float("nan")]}),
    ],
)
def test_an_argument_that_an_optimizer_does_not_take_is_named(
    config: Callable[..., Config], name: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises(ConfigInvalid, match=next(iter(arguments))) as caught:
        Optimizer(config(optimizer=name, optimizer_args=arguments))
    assert caught.value.details == {"key": "optimizer_args"}
    assert caught.value.hint


def rates(config: Config, total: int, peak: float = 1.0) -> list[float]:
    schedule = Schedule(config, total)
    return [schedule.learning_rate(update, peak) for update in range(total)]


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
def test_the_peak_is_exact_at_the_end_of_the_warm_up(config: Callable[..., Config], shape: str) -> None:
    values = rates(config(schedule=shape, warmup_steps=4), 20, peak=3e-4)
    assert values[:4] == pytest.approx([0.75e-4, 1.5e-4, 2.25e-4, 3e-4])
    assert values[3] == 3e-4
    assert max(values) == 3e-4


def test_linear_and_cosine_go_down_to_the_minimum_without_reaching_it_in_the_run(config: Callable[..., Config]) -> None:
    linear = rates(config(schedule="linear", warmup_steps=0, min_learning_rate=0.2), 4)
    assert linear == pytest.approx([1.0, 0.8, 0.6, 0.4])
    cosine = rates(config(schedule="cosine", warmup_steps=0), 4)
    assert cosine == pytest.approx([1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2])
    assert Schedule(config(schedule="cosine", warmup_steps=0), 4).learning_rate(9, 1.0) == 0.0


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
def test_short_runs_have_finite_positive_rates(config: Callable[..., Config], shape: str) -> None:
    for total in (1, 2, 3):
        for warmup in (0, 1, 2, 5):
            assert all(0 < rate <= 1 for rate in rates(config(schedule=shape, warmup_steps=warmup), total))


@pytest.mark.parametrize(("largest", "fused"), [(100, []), (1000, [100, 1000])])
def test_smaller_weights_use_the_kernels_of_a_large_one(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, largest: int, fused: list[int]
) -> None:
    monkeypatch.setattr("trainwire_engine.optimizer.FUSED_FROM", 1000)
    monkeypatch.setattr("trainwire_engine.optimizer.FUSED_WITH", 100)
    met: list[int] = []

    def compiled(one: Callable[..., Any], shapeless: bool) -> Callable[..., Any]:
        assert shapeless
        return lambda param, *rest: (met.append(param.size), one(param, *rest))[1]

    monkeypatch.setattr(mx, "compile", compiled)
    optimizer = Optimizer(config(optimizer="adamw"))
    params = {"small": mx.ones(10), "middle": mx.ones((1, 100)), "large": mx.ones((1, largest))}
    optimizer.apply(params, params, optimizer.init(params), mx.array(1e-3))
    assert sorted(met) == fused
