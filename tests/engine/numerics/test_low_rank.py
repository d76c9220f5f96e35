"""Adapted layers with one input are found and made together, and a gradient goes to the sums it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from trainwire_engine import adapters
from trainwire_engine.adapters import Beside, LoRALinear, put_together
from trainwire_engine.low_rank import Branch, Collector, collecting, low_rank_sums
from trainwire_engine.model import load_model
from trainwire_protocol.config import Config

TOKENS = mx.array([[3, 5, 7, 9, 11, 13]])


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "on_cpu", lambda: False)


def drawn(layer: LoRALinear, seed: int) -> LoRALinear:
    layer.initialize(mx.random.key(seed))
    layer.lora_b = mx.random.normal(layer.lora_b.shape, key=mx.random.key(seed + 100))
    return layer


class Block(nn.Module):
    """Two layers with one input, one with another, one that is used twice and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.after, self.twice, self.never = (
            drawn(LoRALinear(nn.Linear(8, 8), 2, 1.5, 0.0), seed) for seed in range(5)
        )

    def __call__(self, x: mx.array) -> mx.array:
        y = self.after(self.left(x) * self.right(x))
        return self.twice(y) + self.twice(y * 2)


def test_the_layers_of_a_model_are_grouped_by_their_input(config: Callable[..., Config]) -> None:
    module = load_model(config()).module
    sizes = put_together(module, lambda: module(TOKENS), 4)
    assert sizes == [3, 1, 2, 1] * len(module.layers)
    assert put_together(module, lambda: module(TOKENS), 2) == [2, 1, 1, 2, 1] * len(module.layers)


def test_a_group_gives_what_its_layers_give_alone(config: Callable[..., Config]) -> None:
    model = load_model(config())
    names = list(model.trainable)
    model.set_trainable({name: mx.random.normal(model.trainable[name].shape) * 0.1 for name in names})

    def loss(params: dict[str, mx.array]) -> mx.array:
        return mx.sum(mx.square(model.bind(params)(TOKENS)))

    alone = mx.value_and_grad(loss)(model.trainable)
    put_together(model.module, lambda: model.module(TOKENS), 4)
    together = mx.value_and_grad(loss)(model.trainable)
    for (name, ours), (_, theirs) in zip(tree_flatten(together), tree_flatten(alone), strict=True):
        np.testing.assert_allclose(np.array(ours), np.array(theirs), rtol=1e-5, atol=1e-5, err_msg=name)


def test_layers_that_are_used_twice_or_never_stay_alone() -> None:
    block, x = Block(), mx.random.normal((3, 8), key=mx.random.key(7))
    expected, other = block(x), block(x + 1)
    assert put_together(block, lambda: block(x), 4) == [2, 1]
    assert isinstance(block.left._beside, Beside)
    assert block.left._beside is block.right._beside is not block.after._beside
    assert block.twice._beside is None
    assert block.never._beside is None
    np.testing.assert_allclose(np.array(block(x)), np.array(expected), rtol=1e-5, atol=1e-6)
    # One of a group for itself, then another input.
    alone = block.left(x)
    np.testing.assert_allclose(np.array(block(x + 1)), np.array(other), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.array(block.left(x)), np.array(alone), rtol=1e-6)


def test_a_collector_takes_what_it_has_sums_for_and_that_once() -> None:
    def branch(*names: str) -> Branch:
        return Branch(nn.Linear(2, 2), mx.zeros((2, 8)), mx.zeros((8, 2)), names or None)  # type: ignore[arg-type]

    collector = Collector({"p.a": mx.zeros((2, 8)), "p.b": mx.ones((8, 2)), "q.a": mx.zeros((2, 8))})
    assert not collector.takes([branch()])
    assert not collector.takes([branch("p.a", "p.b"), branch("q.a", "q.b")])
    assert collector.names == set()
    assert collector.takes([branch("p.a", "p.b")])
    assert collector.names == {"p.a", "p.b"}
    assert collector.sums([branch("p.a", "p.b")], 1)[0].tolist() == [[1.0, 1.0]] * 8
    assert not collector.takes([branch("p.a", "p.b")])


def test_without_kernels_nothing_is_collected() -> None:
    layer = drawn(LoRALinear(nn.Linear(8, 8), 8, 1.0, 0.0), 0)
    x = mx.random.normal((70, 8), key=mx.random.key(3))

    def out(a: Any, b: Any) -> mx.array:
        return mx.sum(low_rank_sums(x, [Branch(layer.linear, a, b, ("a", "b"))], 1.0)[0])

    with collecting({"a": mx.zeros((8, 8)), "b": mx.zeros((8, 8))}) as collected:
        d_a, d_b = mx.grad(out, argnums=(0, 1))(layer.lora_a, layer.lora_b)
    assert not collected.marks
    assert not collected.names
    assert float(mx.abs(d_a).max()) > 0
    assert float(mx.abs(d_b).max()) > 0
