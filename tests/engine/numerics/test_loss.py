"""The chunked head against the plain form: same sums, same gradients, a fraction of the memory."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from peaks import peak_of

from trainwire_engine.adapters import LoRALinear
from trainwire_engine.head import Head
from trainwire_engine.loss import chunked_cross_entropy, cross_entropy, head_projection

WORDS, WIDTH, POSITIONS = 96, 32, 50


def head_layer(kind: str) -> Any:
    mx.random.seed(1)
    if kind == "tied":
        return nn.Embedding(WORDS, WIDTH)
    linear = nn.Linear(WIDTH, WORDS, bias=kind == "biased")
    if kind == "quantized":
        linear = nn.QuantizedLinear.from_linear(linear, 32, 4)
        linear.freeze()
    if kind == "adapted":
        linear.freeze()
        linear = LoRALinear(linear, 4, 2.0, 0.0)
        linear.lora_a, linear.lora_b = mx.random.normal((WIDTH, 4)) / 6, mx.random.normal((4, WORDS)) / 6
    return linear


def inputs(dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array, mx.array]:
    mx.random.seed(2)
    weights = (mx.arange(POSITIONS) < POSITIONS - 7).astype(mx.float32)
    return mx.random.normal((POSITIONS, WIDTH)).astype(dtype), mx.random.randint(0, WORDS, (POSITIONS,)), weights


def both_ways(layer: Any, chunk: int, smoothing: float, dtype: mx.Dtype = mx.float32) -> list[tuple[Any, Any]]:
    """Sums and gradients, for hidden states and head, by the chunked and by the plain form."""
    layer.update(_cast(layer.parameters(), dtype))
    hidden, targets, weights = inputs(dtype)
    project = head_projection(Head(nn.Identity(), getattr(layer, "as_linear", layer), layer, "head"))
    head = dict(tree_flatten(layer.trainable_parameters()))

    def chunked(hidden: mx.array, head: dict[str, mx.array]) -> Any:
        loss, correct = chunked_cross_entropy(project, hidden, head, targets, weights, chunk=chunk, smoothing=smoothing)
        return 3 * loss, correct

    def plain(hidden: mx.array, head: dict[str, mx.array]) -> Any:
        loss, correct = cross_entropy(project(hidden, head), targets, weights, smoothing)
        return 3 * loss, correct

    return [mx.value_and_grad(form, argnums=(0, 1))(hidden, head) for form in (chunked, plain)]


def _cast(tree: Any, dtype: mx.Dtype) -> Any:
    if isinstance(tree, dict):
        return {key: _cast(value, dtype) for key, value in tree.items()}
    return tree.astype(dtype) if mx.issubdtype(tree.dtype, mx.floating) else tree


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [1, 16, 50, 64])
@pytest.mark.parametrize("kind", ["tied", "untied", "biased", "quantized", "adapted"])
def test_chunks_give_the_sums_and_gradients_of_the_plain_form(kind: str, chunk: int, smoothing: float) -> None:
    ours, plain = both_ways(head_layer(kind), chunk, smoothing)
    np.testing.assert_allclose(ours[0][0], plain[0][0], rtol=1e-6)
    assert ours[0][1].item() == plain[0][1].item()
    np.testing.assert_allclose(ours[1][0], plain[1][0], atol=1e-5)
    assert ours[1][1].keys() == plain[1][1].keys()
    for name, gradient in ours[1][1].items():
        np.testing.assert_allclose(gradient, plain[1][1][name], atol=2e-5, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_in_bfloat16_chunks_agree_within_rounding(kind: str) -> None:
    ours, plain = both_ways(head_layer(kind), 16, 0.0, mx.bfloat16)
    np.testing.assert_allclose(ours[0][0], plain[0][0], rtol=2e-3)
    assert ours[1][0].dtype == mx.bfloat16
    for mine, its in ((ours[1][0], plain[1][0]), *((v, plain[1][1][k]) for k, v in ours[1][1].items())):
        scale = float(mx.abs(its.astype(mx.float32)).max())
        np.testing.assert_allclose(mine.astype(mx.float32), its.astype(mx.float32), atol=0.02 * scale)


def test_the_gradient_is_that_of_finite_differences() -> None:
    layer = head_layer("untied")
    hidden, targets, weights = inputs()
    project = head_projection(Head(nn.Identity(), layer, layer, "head"))

    def loss(hidden: mx.array) -> mx.array:
        return chunked_cross_entropy(project, hidden, {}, targets, weights, chunk=16, smoothing=0.2)[0]

    gradient = mx.grad(loss)(hidden)
    direction = mx.random.normal(hidden.shape)
    measured = (loss(hidden + 1e-2 * direction) - loss(hidden - 1e-2 * direction)) / 2e-2
    np.testing.assert_allclose(measured, mx.sum(gradient * direction), rtol=2e-3)


@pytest.mark.parametrize("trained", [False, True])
def test_the_peak_is_that_of_one_chunk(trained: bool) -> None:
    words, width, positions = 4096, 16, 1536
    layer = nn.Linear(width, words, bias=False)
    hidden, targets = mx.random.normal((positions, width)), mx.random.randint(0, words, (positions,))
    weights = mx.ones((positions,))
    project = head_projection(Head(nn.Identity(), layer, layer, "head"))
    head = dict(tree_flatten(layer.parameters())) if trained else {}
    mx.eval(layer.parameters(), hidden, targets, weights)

    def chunked() -> Any:
        def loss(hidden: mx.array, head: dict[str, mx.array]) -> mx.array:
            return chunked_cross_entropy(project, hidden, head, targets, weights, chunk=64)[0]

        return mx.value_and_grad(loss, argnums=(0, 1))(hidden, head)

    def plain() -> Any:
        def loss(hidden: mx.array, head: dict[str, mx.array]) -> mx.array:
            return cross_entropy(project(hidden, head), targets, weights)[0]

        return mx.value_and_grad(loss, argnums=(0, 1))(hidden, head)

    one_chunk = 64 * words * 4
    whole = positions * words * 4
    assert peak_of(plain) > 2 * whole
    # The results of a chunk's operations get their room at once; a trained head adds two sums.
    assert peak_of(chunked) < 14 * one_chunk + (2 * words * width * 4 if trained else 0)
