"""Products of adapters by kernels, against NumPy in double precision, on a machine with a card."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from doubles import close, draw, exact

from trainwire_engine.cuda import kernels, low_rank
from trainwire_engine.low_rank import Branch, collecting, low_rank_sums

pytestmark = pytest.mark.skipif(
    mx.default_device() == mx.cpu or not kernels.available(), reason="no CUDA card that MLX computes on"
)

TYPES = [(mx.bfloat16, 4e-3), (mx.float16, 6e-4)]
SIZES = [
    (64, 64, [64]),
    (200, 1024, [2048, 1024, 1024]),
    (77, 40, [3072, 8]),
    (1000, 296, [136, 136, 136, 24]),
]
"""Rows, width of the input and of the layers' outputs: whole tiles and such as end within one."""


@pytest.mark.parametrize(("dtype", "relative"), TYPES)
@pytest.mark.parametrize("rank", [8, 16, 24, 64])
@pytest.mark.parametrize(("rows", "width", "outs"), SIZES, ids=str)
def test_each_kernel(dtype: Any, relative: float, rank: int, rows: int, width: int, outs: list[int]) -> None:
    x = draw(1, rows, width, dtype=dtype)
    downs = [draw(2 + i, width, rank, dtype=dtype, scale=width**-0.5) for i in range(len(outs))]
    ups = [draw(12 + i, rank, out, dtype=dtype, scale=rank**-0.5) for i, out in enumerate(outs)]
    wide = [draw(22 + i, rows, out, dtype=dtype) for i, out in enumerate(outs)]
    thin = [draw(32 + i, rows, rank, dtype=dtype) for i in range(len(outs))]
    bases = [draw(42 + i, rows, width, dtype=dtype) for i in range(len(outs))]
    assert low_rank.fits(x, downs, ups)
    for got, down in zip(low_rank.narrow_one(x, downs), downs, strict=True):
        close(got, exact(x) @ exact(down), relative)
    for got, above, up in zip(low_rank.narrow_each(wide, ups), wide, ups, strict=True):
        close(got, exact(above) @ exact(up).T, relative)
    for got, base, z, up in zip(low_rank.widen_each(wide, thin, ups, 1.5), wide, thin, ups, strict=True):
        close(got, exact(base) + 1.5 * exact(z) @ exact(up), relative)
    whole = sum(exact(base) + 0.5 * exact(z) @ exact(down).T for base, z, down in zip(bases, thin, downs))
    close(low_rank.widen_all(bases, thin, downs, 0.5), whole, relative)


@pytest.mark.parametrize(("dtype", "relative"), TYPES)
@pytest.mark.parametrize("rank", [8, 16, 32, 64])
@pytest.mark.parametrize(("rows", "width", "outs"), SIZES, ids=str)
def test_layers_with_one_input_and_their_gradients(
    dtype: Any, relative: float, rank: int, rows: int, width: int, outs: list[int]
) -> None:
    x = draw(1, 1, rows, width, dtype=dtype)
    linears = [nn.Linear(width, out, bias=False) for out in outs]
    for i, linear in enumerate(linears):
        linear.weight = draw(50 + i, *linear.weight.shape, dtype=dtype, scale=width**-0.5)
    downs = [draw(2 + i, width, rank, dtype=dtype, scale=width**-0.5) for i in range(len(outs))]
    ups = [draw(12 + i, rank, out, dtype=dtype, scale=rank**-0.5) for i, out in enumerate(outs)]
    aboves = [draw(22 + i, 1, rows, out, dtype=dtype) for i, out in enumerate(outs)]

    def sums(x: mx.array, *weights: mx.array) -> list[mx.array]:
        layers = zip(linears, weights[: len(outs)], weights[len(outs) :])
        return low_rank_sums(x, [Branch(w, a, b, (f"{i}.a", f"{i}.b")) for i, (w, a, b) in enumerate(layers)], 2.0)

    start = 3.0
    into = {f"{i}.{kind}": mx.full(w.shape, start) for kind, ws in (("a", downs), ("b", ups)) for i, w in enumerate(ws)}
    mx.eval(into)
    with collecting(into) as collected:
        got, (d_x, *_) = mx.vjp(sums, [x, *downs, *ups], aboves)
    mx.eval(got, d_x, collected.marks)
    assert collected.names == set(into)
    _, (_, *d_weights) = mx.vjp(sums, [x, *downs, *ups], aboves)
    inner, d_inner = exact(x)[0], np.zeros((rows, width))
    for i in range(len(outs)):
        w, a, b, up = exact(linears[i].weight), exact(downs[i]), exact(ups[i]), exact(aboves[i])[0]
        close(got[i][0], inner @ w.T + 2 * inner @ a @ b, 3 * relative)
        d_inner += up @ w + 2 * up @ b.T @ a.T
        d_a, d_b = 2 * inner.T @ (up @ b.T), 2 * (inner @ a).T @ up
        close(into[f"{i}.a"] - start, d_a, 2 * relative)
        close(into[f"{i}.b"] - start, d_b, 2 * relative)
        close(d_weights[i], d_a, 3 * relative)
        close(d_weights[len(outs) + i], d_b, 3 * relative)
    close(d_x[0], d_inner, 4 * relative)


def test_what_no_kernel_is_made_for_is_left_to_mlx() -> None:
    x, down, up = draw(1, 64, 32, dtype=mx.bfloat16), mx.zeros((32, 8), mx.bfloat16), mx.zeros((8, 16), mx.bfloat16)
    assert low_rank.fits(x, [down], [up])
    assert not low_rank.fits(x[:63], [down], [up])
    assert not low_rank.fits(x, [mx.zeros((32, 4), mx.bfloat16)], [mx.zeros((4, 16), mx.bfloat16)])
    assert not low_rank.fits(x, [down, mx.zeros((32, 16), mx.bfloat16)], [up, mx.zeros((16, 16), mx.bfloat16)])
    assert not low_rank.fits(x, [down], [mx.zeros((8, 12), mx.bfloat16)])
    assert not low_rank.fits(x.astype(mx.float32), [down.astype(mx.float32)], [up.astype(mx.float32)])
    assert not low_rank.fits(x, [down] * 5, [up] * 5)
