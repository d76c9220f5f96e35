"""LoRA and DoRA layers with mlx-lm's parameter names, whose products are made in the model's dtype.

An adapted layer computes `W x + scale · B A x`. mlx-lm keeps A as [in, rank] and B as [rank, out] (experts:
[experts, rank, in] and [experts, out, rank]); so do these, and its tools load what they train. The scale is
applied to the rank-wide product, not to the output, and everything stays in the dtype of the input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from trainwire_engine.cuda import low_rank
from trainwire_engine.fastmath import on_cpu
from trainwire_engine.low_rank import Branch, low_rank_sums
from trainwire_engine.unpacking import dense

_APART, _MASK = 0x9E3779B97F4A7C15, 2**64 - 1
"""Multiples of it, modulo 2**64, tell the layers' keys apart: the golden ratio's, as far apart as they can be."""


class Adapter(nn.Module):
    """What the layers share: the scale, the dropout and a switch that gives the base layer back.

    Dropout takes its keys from `_dropout_keys`, one for each token of the micro-batch, which the update step sets: a
    token's mask is its own in whatever micro-batch it is, and a pass that is computed again draws the same places.
    Where the input is not laid out by rows and tokens (experts that sort them, a head that gets the trained positions
    alone) the first key draws for the whole micro-batch.
    """

    lora_a: mx.array
    lora_b: mx.array

    def __init__(self, scale: float, dropout: float, inputs: int) -> None:
        super().__init__()
        self.scale = scale
        self.dropout = dropout
        self.enabled = True
        self._dropout_keys: mx.array | None = None
        self._inputs = inputs

    @property
    def drops(self) -> bool:
        """Whether `dropped` changes anything now."""
        return bool(self.training and self.dropout and self._dropout_keys is not None)

    def dropped(self, x: mx.array) -> mx.array:
        """Zero a share of the entries while training and scale up the others."""
        keys = self._dropout_keys
        if keys is None or not self.drops:
            return x
        if x.ndim > 2 and x.shape[:2] == keys.shape[:2]:
            draw = mx.vmap(lambda key: mx.random.bernoulli(1 - self.dropout, x.shape[2:], key=key))
            kept = draw(keys.reshape(-1, 2)).reshape(x.shape)
        else:
            kept = mx.random.bernoulli(1 - self.dropout, x.shape, key=keys[:1, :1].reshape(2))
        return mx.where(kept, x * (1 / (1 - self.dropout)), mx.zeros((), x.dtype))

    def initialize(self, key: mx.array) -> None:
        """Draw A as mlx-lm does, uniform within ±1/sqrt(in), from a key of its own; B stays zero."""
        bound = 1 / math.sqrt(self._inputs)
        self.lora_a = mx.random.uniform(-bound, bound, self.lora_a.shape, key=key)


class LoRALinear(Adapter):
    """A linear layer, packed or not, with a low-rank update."""

    def __init__(self, linear: nn.Module, rank: int, scale: float, dropout: float) -> None:
        outputs, inputs = linear_shape(linear)
        super().__init__(scale, dropout, inputs)
        self.linear = linear
        self.lora_a = mx.zeros((inputs, rank))
        self.lora_b = mx.zeros((rank, outputs))
        self._beside: Beside | None = None

    def low_rank(self, x: mx.array) -> mx.array:
        """Give what the adapter adds to the layer's product, `scale · B A x`."""
        return ((self.dropped(x) @ self.lora_a) * self.scale) @ self.lora_b

    def __call__(self, x: mx.array) -> mx.array:
        if not self.enabled:
            return self.linear(x)
        if _calls is not None:
            _calls.append((self, x))
        if self.drops or on_cpu():
            return self.linear(x) + self.low_rank(x)
        if self._beside is not None:
            return self._beside(self, x)
        return low_rank_sums(x, [self.branch()], self.scale)[0]

    @property
    def alike(self) -> tuple[int, bool]:
        """What layers that are made together must have in common: the rank, and outputs that kernels can make."""
        rank, outputs = self.lora_b.shape
        return rank, low_rank.wide_enough(outputs)

    def branch(self, names: tuple[str, str] | None = None) -> Branch:
        """The layer as one of those that are computed together."""
        return Branch(self.linear, self.lora_a, self.lora_b, names)


class Beside:
    """Layers that are given one input in every pass and used once: all are made when the first is asked for."""

    def __init__(self, layers: Sequence[LoRALinear], paths: Sequence[str]) -> None:
        self._layers = layers
        self._names = [(f"{path}.lora_a", f"{path}.lora_b") for path in paths]
        self._of: list[mx.array] = []
        self._made: dict[int, mx.array] = {}

    def __call__(self, layer: LoRALinear, x: mx.array) -> mx.array:
        of = [x, *(weight for own in self._layers for weight in (own.lora_a, own.lora_b))]
        made_of_these = len(of) == len(self._of) and all(one is other for one, other in zip(of, self._of))
        if not made_of_these or id(layer) not in self._made:
            branches = [own.branch(names) for own, names in zip(self._layers, self._names)]
            self._of = of
            self._made = dict(zip(map(id, self._layers), low_rank_sums(x, branches, layer.scale)))
        made = self._made.pop(id(layer))
        if not self._made:
            self._of = []
        return made


_calls: list[tuple[LoRALinear, mx.array]] | None = None


def put_together(module: nn.Module, run: Callable[[], Any], most: int) -> list[int]:
    """Find out by a run of the module which layers of a block get one input, and let up to `most` be made together.

    Layers outside the blocks stay alone, since a head is used once for each chunk of a loss, and layers of two blocks
    apart, since blocks may be computed again. Gives how many layers there are in each group.
    """
    global _calls
    _calls = []
    try:
        run()
        # It holds on to the inputs, so that no two have one identity.
        calls = _calls
    finally:
        _calls = None
    paths = {id(layer): path for path, layer in module.named_modules() if isinstance(layer, LoRALinear)}
    blocks = {id(layer): number for number, block in enumerate(module.layers) for _, layer in block.named_modules()}
    used = [id(layer) for layer, _ in calls]
    groups: dict[Any, list[LoRALinear]] = {}
    for layer, x in calls:
        if used.count(id(layer)) == 1 and id(layer) in blocks and id(layer) in paths:
            groups.setdefault((blocks[id(layer)], id(x), *layer.alike), []).append(layer)
    sizes = []
    for layers in groups.values():
        for start in range(0, len(layers), most):
            part = layers[start : start + most]
            beside = Beside(part, [paths[id(layer)] for layer in part])
            sizes.append(len(part))
            for layer in part:
                layer._beside = beside
    return sizes


class DoRALinear(LoRALinear):
    """A linear layer whose rows keep a trained length `m` while the low-rank update turns them.

    The length of an adapted row follows from |w|², w·(BA) and |BA|² (arXiv 2402.09353, section 4.3 for the
    detached norm), so no weight of the layer's size is made, nor is a packed one unpacked.
    """

    def __init__(self, linear: nn.Module, rank: int, scale: float, dropout: float) -> None:
        super().__init__(linear, rank, scale, dropout)
        self.m = mx.linalg.norm(dense(linear).astype(mx.float32), axis=1)
        self._row_square = mx.square(self.m)

    def __call__(self, x: mx.array) -> mx.array:
        y = self.linear(x)
        if not self.enabled:
            return y
        bias = self.linear.get("bias")
        if bias is not None:
            y = y - bias
        out = y + self.low_rank(x)
        out = (self.m / self._adapted_norm()).astype(x.dtype) * out
        return out if bias is None else out + bias

    def _adapted_norm(self) -> mx.array:
        a, b = mx.stop_gradient(self.lora_a), mx.stop_gradient(self.lora_b).astype(mx.float32)
        base = self.linear
        along = base(a.T) - base["bias"] if "bias" in base else base(a.T)
        cross = mx.sum(along.astype(mx.float32) * b, axis=0)
        a = a.astype(mx.float32)
        update = mx.sum(((a.T @ a) @ b) * b, axis=0)
        return mx.sqrt(mx.maximum(self._row_square + 2 * self.scale * cross + self.scale**2 * update, 1e-24))


class LoRASwitchLinear(Adapter):
    """The linear layers of a mixture's experts, each with its own low-rank update."""

    def __init__(self, linear: nn.Module, rank: int, scale: float, dropout: float) -> None:
        super().__init__(scale, dropout, linear.input_dims)
        self.linear = linear
        self.lora_a = mx.zeros((linear.num_experts, rank, linear.input_dims))
        self.lora_b = mx.zeros((linear.num_experts, linear.output_dims, rank))

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        y = self.linear(x, indices, sorted_indices=sorted_indices)
        if not self.enabled:
            return y
        how: Any = {"rhs_indices": indices, "sorted_indices": sorted_indices}
        z = mx.gather_mm(self.dropped(x), self.lora_a.swapaxes(-1, -2), **how) * self.scale
        return y + mx.gather_mm(z, self.lora_b.swapaxes(-1, -2), **how)


class LoRAEmbedding(Adapter):
    """An embedding with a low-rank update, also where it serves as the head."""

    def __init__(self, embedding: nn.Module, rank: int, scale: float, dropout: float) -> None:
        words, width = linear_shape(embedding)
        super().__init__(scale, dropout, words)
        self.embedding = embedding
        self.lora_a = mx.zeros((words, rank))
        self.lora_b = mx.zeros((rank, width))

    def __call__(self, x: mx.array) -> mx.array:
        y = self.embedding(x)
        return y + self.dropped((self.lora_a[x] * self.scale) @ self.lora_b) if self.enabled else y

    def as_linear(self, x: mx.array) -> mx.array:
        y = self.embedding.as_linear(x)
        if not self.enabled:
            return y
        return y + ((self.dropped(x) @ self.lora_b.T) * self.scale) @ self.lora_a.T


def linear_shape(layer: nn.Module) -> tuple[int, int]:
    """Give (outputs, inputs) of a linear layer or embedding, packed or not."""
    rows, columns = layer.weight.shape
    return rows, columns * 32 // layer.bits if "scales" in layer else columns


def adapter_layers(module: nn.Module) -> Iterator[Adapter]:
    """Go through the adapted layers of a module."""
    return (layer for _, layer in module.named_modules() if isinstance(layer, Adapter))


def set_dropout_keys(layers: list[Adapter], keys: mx.array) -> None:
    """Give each layer keys of its own, from those of the micro-batch's tokens, uint32 [rows, length, 2]."""
    for index, layer in enumerate(layers):
        if layer.dropout:
            own = (index + 1) * _APART & _MASK
            layer._dropout_keys = keys ^ mx.array([own >> 32, own & 0xFFFFFFFF], mx.uint32)
