"""Root mean square norms on a CUDA card: a kernel each way, and no gradient of a weight that is not trained.

MLX's backward pass makes the gradient of a norm's weight whether it is wanted or not, and adds it up over all rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from trainwire_engine.cuda import kernels

_THREADS = 256
_BLOCKS = 1056
"""Blocks of the backward pass at most: eight for each multiprocessor of an H200."""
_WIDEST = 8192


class RMSNorm(nn.RMSNorm):
    """A norm that is computed by our kernels; a module becomes one by its class."""

    def __call__(self, x: mx.array) -> mx.array:
        weight = self.weight
        if not fits(x, weight):
            return super().__call__(x)
        if "weight" in self._no_grad:
            return _normed(lambda x: _forward(x, weight, self.eps), partial(_backward, weight, self.eps))(x)
        return _normed(lambda x, weight: _forward(x, weight, self.eps), partial(_both, self.eps))(x, weight)


def fits(x: mx.array, weight: mx.array) -> bool:
    """Tell whether the kernels can: 16 bytes are whole numbers, and a row is not too wide for a warp's registers."""
    width = x.shape[-1]
    return width % (16 // x.itemsize) == 0 and width * x.itemsize <= 2 * _WIDEST and kernels.ready(x, weight)


def _normed(forward: Any, backward: Any) -> Any:
    function = mx.custom_function(forward)

    @function.vjp
    def pull(primals: Any, upstream: mx.array, _: Any) -> Any:
        return backward(primals, upstream)

    return function


def _forward(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    width = x.shape[-1]
    rows, constants = x.size // width, constants_of(width, x.dtype)
    (out,) = kernels.launch(
        "rms_norm", "norm", x.dtype, [x, weight],
        shapes=[x.shape], dtypes=[x.dtype], scalars=[rows, eps],
        grid=(kernels.round_up(rows * constants["LANES"], _THREADS), 1, 1), threads=_THREADS, constants=constants,
    )  # fmt: skip
    return out


def _gradients(x: mx.array, weight: mx.array, above: mx.array, eps: float, weighs: bool) -> tuple[mx.array, mx.array]:
    width = x.shape[-1]
    rows, constants = x.size // width, constants_of(width, x.dtype)
    blocks = min(_BLOCKS, -(-rows * constants["LANES"] // _THREADS))
    d_x, sums = kernels.launch(
        "rms_norm_gradient", "norm", x.dtype, [x, weight, above],
        shapes=[x.shape, (blocks if weighs else 1, width)], dtypes=[x.dtype, mx.float32],
        scalars=[rows, int(weighs), eps],
        grid=(blocks * _THREADS, 1, 1), threads=_THREADS, constants=constants,
    )  # fmt: skip
    return d_x, sums


def _backward(weight: mx.array, eps: float, x: mx.array, above: mx.array) -> mx.array:
    return _gradients(x, weight, above, eps, False)[0]


def _both(eps: float, primals: Any, above: mx.array) -> tuple[mx.array, mx.array]:
    x, weight = primals
    d_x, sums = _gradients(x, weight, above, eps, True)
    return d_x, mx.sum(sums, axis=0).astype(weight.dtype)


def constants_of(width: int, dtype: mx.Dtype) -> dict[str, int]:
    """What the kernels are compiled for: the threads of a row, a power of two up to a warp, and packs of each."""
    packs = width * dtype.size // 16
    lanes = min(32, packs & -packs)
    return {"WIDTH": width, "LANES": lanes, "PER": packs // lanes}
