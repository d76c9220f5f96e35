"""Weights as the CPU computes with them fastest: in float32, their gradients laid out as they are.

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


def train_in_rows(module: nn.Module) -> None:
    """Give the weights of linear layers gradients that lie in memory as the weights do."""
    for _, layer in module.named_modules():
        if type(layer) is nn.Linear:
            layer.__class__ = TrainedLinear


class TrainedLinear(nn.Linear):
    """A linear layer whose weight's gradient is no transposed view: an update goes over both, which takes twice as
    long where their numbers are in another order."""

    def __call__(self, x: mx.array) -> mx.array:
        product: Any = _product(x, self["weight"])
        return product + self["bias"] if "bias" in self else product


@mx.custom_function
def _product(x: mx.array, weight: mx.array) -> mx.array:
    return x @ weight.T


@_product.vjp
def _product_vjp(primals: Any, upstream: mx.array, _: Any) -> tuple[mx.array, mx.array]:
    x, weight = primals
    rows, above = x.reshape(-1, x.shape[-1]), upstream.reshape(-1, upstream.shape[-1])
    return upstream @ weight, above.T @ rows
