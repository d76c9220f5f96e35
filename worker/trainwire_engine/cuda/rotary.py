"""Rotary positions on a CUDA card: one kernel each way, which moves tokens to their places in attention on the way.

Projections leave the heads of a token side by side, attention wants the tokens of a head side by side. MLX's kernel
reads across, which takes it three times as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from trainwire_engine.cuda import kernels

_HEADS = 4
"""As in rotate.cu: heads of a thread, which share their angles."""


@dataclass(frozen=True)
class Rotation:
    """What a rotary module says: the angles' base or the frequencies, and the scale of places."""

    base: float
    scale: float
    frequencies: mx.array | None = None


def turns(module: nn.Module) -> bool:
    """Tell whether a module is of a kind that is known here; mlx-lm is not imported for its name."""
    home, name = type(module).__module__, type(module).__name__
    return isinstance(module, nn.RoPE) or (home, name) == ("mlx_lm.models.rope_utils", "Llama3RoPE")


def rotation(rope: nn.Module, x: mx.array, *args: Any, **kwargs: Any) -> Rotation | None:
    """What a module does to x [rows, heads, length, width] if the kernel can: from place 0 on, over the whole width."""
    width = x.shape[-1]
    offset = kwargs.get("offset", args[0] if args else 0)
    if (
        not turns(rope)
        or rope.traditional
        or rope.dims != width
        or x.ndim != 4
        or not isinstance(offset, int)
        or offset
    ):
        return None
    if width * x.itemsize % 32 or not kernels.ready(x):
        return None
    if isinstance(rope, nn.RoPE):
        return Rotation(float(np.log2(np.float32(rope.base))), float(rope.scale))
    return Rotation(0.0, 1.0, rope._freqs)


def rotated(by: Rotation, x: mx.array) -> mx.array:
    """Turn x [rows, heads, length, width], which may lie in memory as [rows, length, heads, width]."""
    rows, heads, length, width = x.shape

    @mx.custom_function
    def turn(x: mx.array) -> mx.array:
        return _turn(by, x.swapaxes(1, 2), None, rows * length, heads, to=length).reshape(rows, heads, length, width)

    @turn.vjp
    def pull(_: Any, above: mx.array, __: Any) -> mx.array:
        flat = _turn(by, above, None, rows * length, heads, of=length, sign=-1.0)
        return flat.reshape(rows, length, heads, width).swapaxes(1, 2)

    turned: mx.array = turn(x)  # type: ignore[assignment]
    return turned


def spread(by: Rotation, x: mx.array, slots: mx.array, back: mx.array) -> mx.array:
    """Spread x [1, heads, T, width] to [rows, heads, length, width] by `slots` [rows, length], as `segments` does, and
    turn each token by its place in its row; `back` [T] is the slot of each token."""
    heads, width = x.shape[1], x.shape[3]
    rows, length = slots.shape

    @mx.custom_function
    def turn(x: mx.array) -> mx.array:
        placed = _turn(by, x.swapaxes(1, 2), slots.reshape(-1), slots.size, heads, to=length)
        return placed.reshape(rows, heads, length, width)

    @turn.vjp
    def pull(_: Any, above: mx.array, __: Any) -> mx.array:
        flat = _turn(by, above, back, back.size, heads, of=length, sign=-1.0)
        return flat.reshape(1, back.size, heads, width).swapaxes(1, 2)

    turned: mx.array = turn(x)  # type: ignore[assignment]
    return turned


def placed(by: Rotation, x: mx.array, places: mx.array) -> mx.array:
    """Turn x [1, heads, T, width], which may lie in memory as [T, heads, width], by the `places` [T] of its tokens; it
    comes back lying so."""
    heads, tokens, width = x.shape[1:]

    def turned(x: mx.array, sign: float) -> mx.array:
        flat = _turn(by, x.swapaxes(1, 2), places, tokens, heads, placed=True, sign=sign)
        return flat.reshape(1, tokens, heads, width).swapaxes(1, 2)

    @mx.custom_function
    def turn(x: mx.array) -> mx.array:
        return turned(x, 1.0)

    @turn.vjp
    def pull(_: Any, above: mx.array, __: Any) -> mx.array:
        return turned(above, -1.0)

    result: mx.array = turn(x)  # type: ignore[assignment]
    return result


def rotating(base: type) -> type:
    """Make a class of rotary modules that use the kernel where it can."""

    def call(self: nn.Module, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        by = rotation(self, x, *args, **kwargs)
        return base.__call__(self, x, *args, **kwargs) if by is None else rotated(by, x)

    return type(base.__name__, (base,), {"__call__": call, "__module__": base.__module__})


def _turn(
    by: Rotation,
    x: mx.array,
    index: mx.array | None,
    slots: int,
    heads: int,
    *,
    of: int = 0,
    to: int = 0,
    placed: bool = False,
    sign: float = 1.0,
) -> mx.array:
    """Call the kernel: flat, with `of` and `to` as the lengths that `kernels.take` calls length_from and length_to.

    The index holds the slots to take from, or with `placed` the places of slots that stay where they are.
    """
    width = x.shape[-1]
    frequencies = mx.zeros(1) if by.frequencies is None else by.frequencies.astype(mx.float32)
    (turned,) = kernels.launch(
        "rotate", "rotate", x.dtype, [x, mx.zeros(1, mx.int32) if index is None else index, frequencies],
        shapes=[(slots * heads * width,)], dtypes=[x.dtype],
        scalars=[slots, heads, width, of, to, 0 if index is None else 2 if placed else 1, by.base, by.scale, sign],
        grid=(kernels.round_up(slots * -(-heads // _HEADS) * (width * x.itemsize // 32), 256), 1, 1), threads=256,
    )  # fmt: skip
    return turned
