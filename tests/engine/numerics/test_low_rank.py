"""Adapted layers with one input are found and made together, and a gradient goes to the sums it belongs to."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tiny import RandomRows

from trainwire_engine import adapters, low_rank
from trainwire_engine.adapters import Beside, LoRALinear, put_together
from trainwire_engine.batches import plan
from trainwire_engine.cuda.recordings import RecordingFailed
from trainwire_engine.low_rank import Branch, Collector, collecting, low_rank_sums
from trainwire_engine.model import load_model
from trainwire_engine.optimizer import Optimizer
from trainwire_engine.passes import device_arrays
from trainwire_engine.step import UpdateStep
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
    """Layers with one input, two with another, one of another rank, one that is used twice and one that never is."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        shapes = {
            "left": (8, 2),
            "right": (8, 2),
            "higher": (8, 4),
            "odd": (1, 2),
            "after": (8, 2),
            "twice": (8, 2),
            "never": (8, 2),
        }
        for index, (name, (outputs, rank)) in enumerate(shapes.items()):
            setattr(self, name, drawn(LoRALinear(nn.Linear(8, outputs), rank, 1.5, 0.0), 10 * seed + index))

    def __call__(self, x: mx.array) -> mx.array:
        y = self.after(self.left(x) * self.right(x) + self.higher(x) * self.odd(x))
        return self.twice(y) + self.twice(y * 2)


class Stack(nn.Module):
    """Two blocks that are given the same input, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [Block(1), Block(2)]
        self.head = drawn(LoRALinear(nn.Linear(8, 8), 2, 1.5, 0.0), 99)

    def __call__(self, x: mx.array) -> mx.array:
        return self.head(self.layers[0](x) + self.layers[1](x))


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


def test_layers_stay_alone_that_are_used_twice_or_never_or_are_of_another_rank_or_block() -> None:
    stack, x = Stack(), mx.random.normal((3, 8), key=mx.random.key(7))
    expected = stack(x)
    assert put_together(stack, lambda: stack(x), 4) == [2, 1, 1, 1] * 2
    for block in stack.layers:
        assert isinstance(block.left._beside, Beside)
        assert block.left._beside is block.right._beside
        others = [block.left, block.higher, block.odd, block.after]
        assert len({id(layer._beside) for layer in others}) == 4
        assert block.twice._beside is None
        assert block.never._beside is None
    assert stack.layers[0].left._beside is not stack.layers[1].left._beside
    assert stack.head._beside is None
    np.testing.assert_allclose(np.array(stack(x)), np.array(expected), rtol=1e-5, atol=1e-5)


def test_what_was_made_for_another_input_or_other_weights_is_not_given() -> None:
    stack, x = Stack(), mx.random.normal((3, 8), key=mx.random.key(7))
    block = stack.layers[0]
    wanted = [block.left(x), block.right(x + 1), block.left(x + 1), block.left(x) * 0 + block.left.linear(x)]
    put_together(stack, lambda: stack(x), 4)
    # The second of a group that was made for the first's input.
    got = [block.left(x), block.right(x + 1), block.left(x + 1)]
    beside = block.left._beside
    assert beside is not None
    block.right(x)
    block.left.lora_b = mx.zeros_like(block.left.lora_b)
    got.append(block.left(x))
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(np.array(ours), np.array(theirs), rtol=1e-5, atol=1e-5)
    block.right(x)
    assert not beside._made
    assert not beside._of


def test_a_layer_that_computes_in_another_type_is_told_apart() -> None:
    linear = nn.Linear(8, 8)
    linear.set_dtype(mx.bfloat16)
    branch = Branch(linear, mx.zeros((8, 8), mx.bfloat16), mx.zeros((8, 8), mx.bfloat16))
    assert branch.computes_in(mx.bfloat16)
    linear.bias = mx.zeros(8)
    assert not branch.computes_in(mx.bfloat16)
    packed = nn.QuantizedLinear.from_linear(nn.Linear(64, 8), group_size=32, bits=4)
    assert Branch(packed, branch.a, branch.b).computes_in(mx.float32)
    assert not Branch(packed, branch.a, branch.b).computes_in(mx.bfloat16)


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
    assert not collector.again
    assert not collector.takes([branch("p.a", "p.b")])
    assert collector.again == {"p.a", "p.b"}


def test_a_pass_in_which_a_gradient_comes_twice_is_not_recorded(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config()
    step = UpdateStep(load_model(settings), Optimizer(settings), settings)
    name = next(iter(step.model.trainable))

    @contextmanager
    def twice(into: Any) -> Iterator[Collector]:
        collector = Collector(into)
        collector.again.add(name)
        yield collector

    monkeypatch.setattr(low_rank, "collecting", twice)
    (batch,) = plan(RandomRows(2), range(2), 4096)
    inputs = (*device_arrays(batch), step.dropout_keys(batch, 1))
    with pytest.raises(RecordingFailed, match=re.escape(name)):
        step._trace_into(step.model.trainable, inputs, dict(step.model.trainable))


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
