"""Packed weights unpacked layer by layer, where products of many rows are faster so.

On a CPU only plain products go to the BLAS. On a CUDA card MLX compiles its packed products for each layer's shape
when they are first met, a minute in all, and those of cuBLAS need no compiler.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn


def unpack_on_use(module: nn.Module) -> None:
    """Make packed layers multiply by their unpacked weight, which lives as long as one product."""
    for _, layer in module.named_modules():
        if type(layer) is nn.QuantizedLinear:
            layer.__class__ = UnpackedLinear
        elif type(layer) is nn.QuantizedEmbedding:
            layer.__class__ = UnpackedEmbedding


class UnpackedLinear(nn.QuantizedLinear):
    """A packed linear layer whose products are those of its unpacked weight, forward and backward."""

    def __call__(self, x: mx.array) -> mx.array:
        if x.size == x.shape[-1]:
            # One token, as in a generation: unpacking costs more than it saves.
            alone: mx.array = super().__call__(x)
            return alone

        y = _product(self, x)
        return y + self["bias"] if "bias" in self else y


class UnpackedEmbedding(nn.QuantizedEmbedding):
    """A packed embedding that is unpacked where it serves as the head."""

    def as_linear(self, x: mx.array) -> mx.array:
        if x.size == x.shape[-1]:
            alone: mx.array = super().as_linear(x)
            return alone
        return _product(self, x)


def _product(layer: nn.Module, x: mx.array) -> mx.array:
    @mx.custom_function
    def product(x: mx.array) -> mx.array:
        return x @ dense(layer).astype(x.dtype).T

    @product.vjp
    def pull(x: mx.array, cotangent: mx.array, _: Any) -> mx.array:
        return cotangent @ dense(layer).astype(x.dtype)

    y: mx.array = product(x)  # type: ignore[assignment]
    return y


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
