"""Taking rows of which each is taken at most once: the gradient takes too, by the inverse index, and sums nothing."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from trainwire_engine.cuda import kernels


def taken(x: mx.array, index: mx.array, inverse: mx.array) -> mx.array:
    """Rows of x [..., n, width] by index [m], zeros for -1; `inverse` [n] holds each row's place in the result.

    A row may be taken again where no gradient comes back; `inverse` names the place that one comes from.
    """

    @mx.custom_function
    def take(x: mx.array) -> mx.array:
        return _pick(x, index)

    @take.vjp
    def pull(_: Any, upstream: mx.array, __: Any) -> mx.array:
        return _pick(upstream, inverse)

    rows: mx.array = take(x)  # type: ignore[assignment]
    return rows


def _pick(x: mx.array, index: mx.array) -> mx.array:
    if x.ndim == 2 and kernels.ready(x):
        return kernels.take(x, index).reshape(index.size, x.shape[1])
    # -1 takes the zeros behind the end; hiding places after the taking costs three times as much on a CPU.
    ended = mx.concatenate([x, mx.zeros((*x.shape[:-2], 1, x.shape[-1]), x.dtype)], axis=-2)
    return mx.take(ended, mx.where(index < 0, x.shape[-2], index), axis=-2)
