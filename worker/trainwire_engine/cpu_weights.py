"""Frozen weights as the CPU computes with them fastest: in float32.

MLX's CPU backend gives float32 products to the BLAS and makes all others itself, ten to thirty times slower.
"""

from __future__ import annotations

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
