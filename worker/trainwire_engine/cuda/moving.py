"""A flat row of tokens to the rows that attention works on, and back: one kernel each way, on a CUDA card.

Of several groups of rows the tokens keep their heads side by side, as projections leave them; attention takes and gives
any order of axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx

from trainwire_engine.cuda import kernels


def to_rows(x: mx.array, spread: mx.array, back: mx.array) -> mx.array:
    """Spread x [1, heads, T, width] to [rows, heads, length, width]: `spread` [rows, length] is the token of each slot,
    `back` [T] the slot of each token, -1 where there is none."""
    return _moved(x, _one_to_rows, _one_to_flat, spread, back)


def to_flat(x: mx.array, spread: mx.array, back: mx.array) -> mx.array:
    """Put [rows, heads, length, width] back into [1, heads, T, width]."""
    return _moved(x, _one_to_flat, _one_to_rows, spread, back)


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


_Move = Callable[[mx.array, mx.array, mx.array], mx.array]


def _moved(x: mx.array, there: _Move, back_again: _Move, spread: mx.array, back: mx.array) -> mx.array:
    """One way by a kernel, and the gradient the other way."""

    @mx.custom_function
    def move(x: mx.array) -> mx.array:
        return there(x, spread, back)

    @move.vjp
    def pull(_: Any, upstream: mx.array, __: Any) -> mx.array:
        return back_again(upstream, spread, back)

    moved: mx.array = move(x)  # type: ignore[assignment]
    return moved


def _one_to_rows(x: mx.array, spread: mx.array, _: mx.array) -> mx.array:
    # Projections leave the heads of a token side by side: in that order nothing is copied before the kernel.
    rows, length = spread.shape
    heads, width = x.shape[1], x.shape[3]
    flat = x.swapaxes(1, 2)
    return kernels.take(flat, spread.reshape(-1), heads, length_to=length).reshape(rows, heads, length, width)


def _one_to_flat(x: mx.array, _: mx.array, back: mx.array) -> mx.array:
    heads, length, width = x.shape[1:]
    flat = kernels.take(x, back, heads, length_from=length)
    return flat.reshape(1, back.size, heads, width).swapaxes(1, 2)
