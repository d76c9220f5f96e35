"""What an adapted layer computes, its frozen layer's product and the adapter's: in few and wide products."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx


def low_rank_sum(linear: Any, x: mx.array, a: mx.array, b: mx.array, scale: float) -> mx.array:
    """`linear(x) + scale · x A B` for a frozen layer, in few and wide products: what a GPU takes most time for.

    x [..., in], a [in, rank], b [rank, out]. The rank-wide parts of the output and of the gradient are added by the
    products that make them, which scale too.
    """

    @mx.custom_function
    def together(x: mx.array, a: mx.array, b: mx.array) -> tuple[mx.array, mx.array]:
        z = x @ a
        return mx.addmm(linear(x), z, b, alpha=scale), z

    @together.vjp
    def pull(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, ...]:
        x, a, b = primals
        above, z = cotangents[0], outputs[1]
        _, (d_x,) = mx.vjp(linear, [x], [above])
        d_z = above @ b.T
        # Rank-wide rows times wide rows: the other way round the card takes twice as long.
        d_a = _scaled(scale, _rows(d_z).T, _rows(x)).T
        return mx.addmm(d_x, d_z, a.T, alpha=scale), d_a, _scaled(scale, _rows(z).T, _rows(above))

    outputs: Any = together(x, a, b)
    return outputs[0]


def _scaled(scale: float, left: mx.array, right: mx.array) -> mx.array:
    """`scale · left right`, by the product itself."""
    return mx.addmm(_zeros(left.shape[0], right.shape[1], left.dtype), left, right, alpha=scale, beta=0.0)


@functools.cache
def _zeros(rows: int, columns: int, dtype: mx.Dtype) -> mx.array:
    """Zeros that nobody reads, made once: inside a trace they would be filled in every pass."""
    zeros = mx.zeros((rows, columns), dtype)
    mx.eval(zeros)
    return zeros


def _rows(x: mx.array) -> mx.array:
    return x.reshape(-1, x.shape[-1])
