"""Products of wide rows with the rank-wide weights of adapters on a CUDA card, for layers with one input together.

To cuBLAS each is a product of its own, ten microseconds for a few columns, and gradients need a copy besides. Here
tensor cores make those of up to four layers in a launch; sums are made in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from trainwire_engine.cuda import kernels

MOST = 4
"""Layers in a launch."""
_TYPES = (mx.bfloat16, mx.float16)
_THREADS = 128
_FEWEST, _WIDEST_RANK = 64, 64
_NARROW_ROWS, _WIDEN_ROWS, _WIDEN_COLUMNS, _GRADIENT_COLUMNS = 16, 64, 128, 32
"""Rows and columns of a block, as low_rank.cu has them."""

Arrays = Sequence[mx.array]


def fits(x: mx.array, downs: Arrays, ups: Arrays) -> bool:
    """Tell whether the kernels can: x [..., in], downs [in, rank] and ups [rank, out] of one rank and 16-bit type."""
    ranks = {down.shape[1] for down in downs} | {up.shape[0] for up in ups}
    widths = [x.shape[-1], *(up.shape[1] for up in ups)]
    return (
        x.dtype in _TYPES
        and x.size // x.shape[-1] >= _FEWEST
        and len(downs) <= MOST
        and ranks.issubset(range(8, _WIDEST_RANK + 1, 8))
        and len(ranks) == 1
        and all(map(wide_enough, widths))
        and kernels.ready(x, *downs, *ups)
    )


def wide_enough(width: int) -> bool:
    """Tell whether rows of a width consist of whole loads of 16 bytes."""
    return width % 8 == 0


def begin(dtype: mx.Dtype, count: int, rank: int) -> None:
    """Start to compile the kernels for so many layers with one input, if there are any."""
    if dtype in _TYPES and rank % 8 == 0 and rank <= _WIDEST_RANK:
        kernels.begin("low_rank", dtype, **constants_of(dtype, count, rank))


def narrow_one(x: mx.array, downs: Arrays) -> list[mx.array]:
    """x · down for each [rows, rank]."""
    rows, width = x.size // x.shape[-1], x.shape[-1]
    inputs = [x, *downs]
    return _narrow("narrow_one", inputs, rows, len(downs), downs[0].shape[1], [width])


def narrow_each(xs: Arrays, ups: Arrays) -> list[mx.array]:
    """An x [..., out] times its up turned over, for each [rows, rank]."""
    rows = xs[0].size // xs[0].shape[-1]
    inputs = [*xs, *ups]
    return _narrow("narrow_each", inputs, rows, len(ups), ups[0].shape[0], [x.shape[-1] for x in xs])


def widen_each(bases: Arrays, zs: Arrays, ups: Arrays, scale: float) -> list[mx.array]:
    """base + scale · z · up for each, shaped as its base."""
    widths = [base.shape[-1] for base in bases]
    shapes = [base.shape for base in bases]
    return _widen("widen_each", [*bases, *zs, *ups], shapes, zs, scale, widths, layers=len(bases))


def widen_all(bases: Arrays, zs: Arrays, downs: Arrays, scale: float) -> mx.array:
    """The sum of base + scale · z · down turned over, shaped as a base."""
    width = bases[0].shape[-1]
    return _widen("widen_all", [*bases, *zs, *downs], [bases[0].shape], zs, scale, [width], layers=1)[0]


def add_gradients(
    x: mx.array, aboves: Arrays, zs: Arrays, d_zs: Arrays, d_downs: Arrays, d_ups: Arrays, scale: float
) -> mx.array:
    """Add scale · xᵀ d_z and scale · zᵀ above to float32 sums in place; gives what must be evaluated for it to happen.

    As `tensors.add_to`: MLX knows nothing of the change.
    """
    count, rank, width = len(zs), zs[0].shape[1], x.shape[-1]
    widths = [above.shape[-1] for above in aboves]
    (mark,) = kernels.launch(
        "add_gradients", "low_rank", x.dtype, [x, *aboves, *zs, *d_zs, *d_downs, *d_ups],
        shapes=[(1,)], dtypes=[mx.uint8], scalars=[zs[0].shape[0], scale, width, *widths],
        grid=(-(-max(width, *widths) // _GRADIENT_COLUMNS) * _THREADS, 2 * count, 1), threads=_THREADS,
        constants=constants_of(x.dtype, count, rank),
    )  # fmt: skip
    return mark


def constants_of(dtype: mx.Dtype, count: int, rank: int) -> dict[str, int]:
    """What the kernels are compiled for."""
    return {"COUNT": count, "RANK": rank, "BFLOAT": int(dtype == mx.bfloat16)}


def _narrow(name: str, inputs: list[mx.array], rows: int, count: int, rank: int, widths: list[int]) -> list[mx.array]:
    dtype, threads = inputs[0].dtype, 2 * _THREADS if rank <= 16 else _THREADS
    return kernels.launch(
        name, "low_rank", dtype, inputs,
        shapes=[(rows, rank)] * count, dtypes=[dtype] * count, scalars=[rows, *widths],
        grid=(-(-rows // _NARROW_ROWS) * threads, count, 1), threads=threads,
        constants=constants_of(dtype, count, rank),
    )  # fmt: skip


def _widen(
    name: str, inputs: list[mx.array], shapes: list[Any], zs: Arrays, scale: float, widths: list[int], *, layers: int
) -> list[mx.array]:
    rows, rank = zs[0].shape
    dtype = inputs[0].dtype
    return kernels.launch(
        name, "low_rank", dtype, inputs,
        shapes=shapes, dtypes=[dtype] * len(shapes), scalars=[rows, scale, *widths],
        grid=(-(-max(widths) // _WIDEN_COLUMNS) * _THREADS, -(-rows // _WIDEN_ROWS), layers), threads=_THREADS,
        constants=constants_of(dtype, len(zs), rank),
    )  # fmt: skip
