"""Frozen weights as the CPU computes with them fastest: in float32, packed ones unpacked layer by layer.

MLX's CPU backend gives float32 products to the BLAS and makes all others itself, ten to thirty times slower.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from trainwire_engine import memory


def widen(module: nn.Module) -> bool:
    """Turn half-precision weights into float32 if they take at most half of the machine's memory so; True if done."""
    sizes: list[int] = []

    def measure(leaf: mx.array) -> mx.array:
        sizes.append(leaf.size * 4 if mx.issubdtype(leaf.dtype, mx.floating) else leaf.nbytes)
        return leaf

    tree_map(measure, module.parameters())
    if sum(sizes) > memory.total_memory() // 2:
        return False
    module.apply(lambda leaf: leaf.astype(mx.float32) if mx.issubdtype(leaf.dtype, mx.floating) else leaf)
    mx.eval(module.parameters())
    return True


def unpack_on_use(module: nn.Module) -> None:
    """Make packed linear layers multiply by their unpacked weight, which lives as long as one product."""
    for _, layer in module.named_modules():
        if type(layer) is nn.QuantizedLinear:
            layer.__class__ = UnpackedLinear


class UnpackedLinear(nn.QuantizedLinear):
    """A packed linear layer whose products go through the BLAS, forward and backward."""

    def __call__(self, x: mx.array) -> mx.array:
        if x.size == x.shape[-1]:
            # One token, as in a generation: unpacking costs more than it saves.
            alone: mx.array = super().__call__(x)
            return alone

        @mx.custom_function
        def product(x: mx.array) -> mx.array:
            return x @ dense(self).astype(x.dtype).T

        @product.vjp
        def pull(x: mx.array, cotangent: mx.array, _: Any) -> mx.array:
            return cotangent @ dense(self).astype(x.dtype)

        y: Any = product(x)
        return y + self["bias"] if "bias" in self else y


def dense(layer: nn.Module) -> mx.array:
    """Give a layer's weight, unpacked if it is packed."""
    if "scales" not in layer:
        return layer.weight
    return mx.dequantize(
        layer.weight, layer.scales, layer.get("biases"), group_size=layer.group_size, bits=layer.bits, mode=layer.mode
    )


def plain_weight(layer: nn.Module) -> mx.array | None:
    """Give the float32 weight of a layer that computes `x @ weight.T` and nothing more, unpacked if it is packed."""
    if not isinstance(layer, nn.Linear | nn.Embedding | nn.QuantizedLinear | nn.QuantizedEmbedding) or "bias" in layer:
        return None
    weight = dense(layer)
    return weight if weight.dtype == mx.float32 else None
