"""A flat row of tokens to the groups of rows that attention works on, and back: one kernel each way, on a CUDA card.

Tokens keep their heads side by side, as projections leave them; attention takes and gives any order of axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx

from trainwire_engine.cuda import kernels


def dealt(x: mx.array, slots: mx.array, back: mx.array, shapes: Sequence[tuple[int, ...]]) -> Sequence[mx.array]:
    """Spread x [1, heads, T, width] to a [rows, heads, length, width] for each of the shapes [rows, length].

    `slots` is the token of each slot of all groups, `back` [T] the slot of each token, -1 where there is none.
    """

    @mx.custom_function
    def deal(x: mx.array) -> Sequence[mx.array]:
        return _to_groups(x, slots, shapes)

    @deal.vjp
    def pull(_: Any, above: Sequence[mx.array], __: Any) -> mx.array:
        return _to_row(above, back)

    parts: Sequence[mx.array] = deal(x)  # type: ignore[assignment]
    return parts


def joined(parts: Sequence[mx.array], slots: mx.array, back: mx.array) -> mx.array:
    """Put the groups' [rows, heads, length, width] back into [1, heads, T, width]."""
    shapes = [(part.shape[0], part.shape[2]) for part in parts]

    @mx.custom_function
    def join(*parts: mx.array) -> mx.array:
        return _to_row(parts, back)

    @join.vjp
    def pull(_: Any, above: mx.array, __: Any) -> Sequence[mx.array]:
        return _to_groups(above, slots, shapes)

    row: mx.array = join(*parts)  # type: ignore[assignment]
    return row


def _to_groups(x: mx.array, slots: mx.array, shapes: Sequence[tuple[int, ...]]) -> Sequence[mx.array]:
    heads, width = x.shape[1], x.shape[3]
    tokens = x.swapaxes(1, 2).reshape(-1, heads * width)
    taken = kernels.take(tokens, slots).reshape(-1, heads, width)
    ends = list(accumulate(rows * length for rows, length in shapes))
    parts = (taken[end - rows * length : end] for end, (rows, length) in zip(ends, shapes))
    return tuple(part.reshape(*shape, heads, width).swapaxes(1, 2) for part, shape in zip(parts, shapes))


def _to_row(parts: Sequence[mx.array], back: mx.array) -> mx.array:
    heads, width = parts[0].shape[1], parts[0].shape[3]
    rows = [part.swapaxes(1, 2).reshape(-1, heads * width) for part in parts]
    return kernels.join(rows, back).reshape(1, back.size, heads, width).swapaxes(1, 2)
