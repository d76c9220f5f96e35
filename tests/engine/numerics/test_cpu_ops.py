"""The CPU's own exponential, SwiGLU and attention: MLX's values and gradients, to 1e-5."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from trainwire_engine import cpu_ops, fastmath
from trainwire_engine.cpu_weights import train_in_rows
from trainwire_engine.pieces import compute, noted

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="these functions are for the CPU backend")

MLX_ATTENTION = getattr(mx.fast.scaled_dot_product_attention, "__wrapped__", mx.fast.scaled_dot_product_attention)


def gradients(function: Callable[..., mx.array], *arguments: mx.array) -> Any:
    def loss(*arguments: mx.array) -> mx.array:
        value = function(*arguments)
        return mx.sum(value * mx.random.normal(value.shape, key=mx.random.key(1)))

    found = mx.grad(loss, argnums=tuple(range(len(arguments))))(*arguments)
    return found if isinstance(found, tuple | list) else (found,)


def assert_close(ours: mx.array, theirs: mx.array) -> None:
    """Equal to 1e-5 of the largest entry."""
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * max(1.0, float(mx.abs(theirs).max())))


@pytest.mark.parametrize("size", [1000, fastmath.FUSED_FROM])
def test_the_exponential_is_as_exact_as_mlxs(size: int) -> None:
    x = np.linspace(-87, 87, size, dtype=np.float32)
    exact = np.exp(x.astype(np.float64))
    ours = np.array(fastmath.exp_below_zero(mx.array(x))).astype(np.float64)
    theirs = np.array(mx.exp(mx.array(x))).astype(np.float64)
    assert np.abs(ours / exact - 1).max() < max(4e-6, 1.1 * np.abs(theirs / exact - 1).max())


def test_far_below_zero_nothing_is_left() -> None:
    x = mx.array([0.0, -0.0, -88.0, -1e30, -float("inf")])
    np.testing.assert_allclose(fastmath.exp_below_zero(x), [1, 1, 0, 0, 0], atol=2e-38)
    assert mx.isnan(fastmath.exp_below_zero(mx.array([float("nan")]))).item()


def test_logsumexp_and_its_gradient_are_mlxs() -> None:
    x = mx.random.normal((20, 300)) * 5
    np.testing.assert_allclose(fastmath.logsumexp(x), mx.logsumexp(x, axis=-1, keepdims=True), atol=1e-5)
    (ours,), (theirs,) = gradients(fastmath.logsumexp, x), gradients(lambda x: mx.logsumexp(x, -1, True), x)
    assert_close(ours, theirs)


def test_swiglu_and_its_gradients_are_mlx_lms() -> None:
    from mlx_lm.models.activations import swiglu

    ours = cpu_ops.swiglu(swiglu)
    gate, x = mx.random.normal((40, 70)) * 8, mx.random.normal((40, 70))
    gate[0, :4] = mx.array([-200.0, 200.0, -88.0, 0.0])
    np.testing.assert_allclose(ours(gate, x), swiglu(gate, x), atol=1e-5)
    for mine, its in zip(gradients(ours, gate, x), gradients(swiglu, gate, x)):
        assert_close(mine, its)
    half = gate.astype(mx.bfloat16)
    assert mx.array_equal(ours(half, half), swiglu(half, half))


@pytest.mark.parametrize("keep", [0, 2**22])
@pytest.mark.parametrize("length", [2, 31, 128, 129, 300])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (3, 1)])
def test_attention_and_its_gradients_are_mlxs(
    monkeypatch: pytest.MonkeyPatch, heads: int, groups: int, length: int, keep: int
) -> None:
    monkeypatch.setattr(cpu_ops, "KEEP_BELOW", keep)
    ours = cpu_ops.attention(MLX_ATTENTION)
    q = mx.random.normal((2, heads, length, 16)) * 3
    k, v = mx.random.normal((2, groups, length, 16)), mx.random.normal((2, groups, length, 16))

    def form(attention: Callable[..., mx.array]) -> Callable[..., mx.array]:
        return lambda q, k, v: attention(q, k, v, scale=0.3, mask="causal")

    np.testing.assert_allclose(form(ours)(q, k, v), form(MLX_ATTENTION)(q, k, v), atol=1e-5)
    for mine, its in zip(gradients(form(ours), q, k, v), gradients(form(MLX_ATTENTION), q, k, v)):
        assert_close(mine, its)


@pytest.mark.parametrize("case", ["no mask", "array mask", "one token", "cache", "bfloat16"])
def test_attention_of_another_kind_goes_to_mlx(case: str) -> None:
    calls = []

    def original(*arguments: Any, **keys: Any) -> mx.array:
        calls.append(keys["mask"])
        return MLX_ATTENTION(*arguments, **keys)

    length, more = (1, 0) if case == "one token" else (4, 3) if case == "cache" else (4, 0)
    dtype = mx.bfloat16 if case == "bfloat16" else mx.float32
    q = mx.random.normal((1, 2, length, 8)).astype(dtype)
    k = mx.random.normal((1, 2, length + more, 8)).astype(dtype)
    masks: dict[str, Any] = {"no mask": None, "array mask": mx.ones((4, 4), mx.bool_)}
    mask = masks.get(case, "causal")
    result = cpu_ops.attention(original)(q, k, k, scale=1.0, mask=mask)
    assert len(calls) == 1
    assert mx.array_equal(result, MLX_ATTENTION(q, k, k, scale=1.0, mask=mask))


def test_attentions_memory_grows_with_the_length_not_with_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ops, "KEEP_BELOW", 0)
    ours = cpu_ops.attention(MLX_ATTENTION)

    def peak(length: int) -> int:
        q, k, v = (mx.random.normal((1, heads, length, 16)) for heads in (2, 1, 1))
        mx.eval(q, k, v)
        mx.reset_peak_memory()
        held = mx.get_active_memory()
        gradient = mx.grad(lambda *qkv: mx.sum(ours(*qkv, scale=0.3, mask="causal")), argnums=(0, 1, 2))
        with noted() as notes:
            made = gradient(q, k, v)
        compute(notes)
        mx.eval(made)
        return mx.get_peak_memory() - held

    peak(256)
    assert peak(4096) < 6 * peak(1024)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(3, 5, 8), (7, 8)])
def test_a_trained_linear_layer_gives_the_same_gradients_laid_out_as_its_weights(
    shape: tuple[int, ...], bias: bool
) -> None:
    x, layer = mx.random.normal(shape, key=mx.random.key(0)), nn.Linear(8, 6, bias=bias)
    above = mx.random.normal((*shape[:-1], 6), key=mx.random.key(1))

    def outcome() -> tuple[Any, Any]:
        def loss(parameters: Any, x: mx.array) -> mx.array:
            layer.update(parameters)
            return (layer(x) * above).sum()

        return mx.value_and_grad(loss, argnums=(0, 1))(layer.trainable_parameters(), x)

    value, (plain, d_x) = outcome()
    train_in_rows(layer)
    again, (in_rows, d_x_again) = outcome()
    assert again.item() == pytest.approx(value.item(), rel=1e-6)
    np.testing.assert_allclose(d_x_again, d_x, rtol=1e-5, atol=1e-6)
    assert plain.keys() == in_rows.keys()
    for name, gradient in in_rows.items():
        np.testing.assert_allclose(gradient, plain[name], rtol=1e-5, atol=1e-6)
        assert np.array(gradient, copy=False).flags.c_contiguous
