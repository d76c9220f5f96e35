"""SwiGLU, cross entropy and taking rows on a CUDA card: MLX's values, each in one pass over the memory.

Sums and exponentials are made in float32 whatever the type, and rounded once. Where no kernel can be had (`ready`
says so) callers use MLX's operations.
"""

from __future__ import annotations

import functools
from importlib import resources
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np

from trainwire_engine.cuda import compiler
from trainwire_engine.cuda.compiler import DTYPES, CompileFailed, architecture, compile_source, prelude

_LIMIT = 2**31 - 2**20
"""Elements of an array that 32-bit counts reach."""


@functools.cache
def available() -> bool:
    """Tell whether MLX computes on a CUDA card for which kernels can be compiled, and whether one computes right."""
    if mx.default_device() == mx.cpu or not mx.cuda.is_available():
        return False
    try:
        architecture()
        return _computes()
    except (CompileFailed, AttributeError, RuntimeError, TypeError, ValueError):
        return False


def ready(*arrays: mx.array) -> bool:
    """Tell whether kernels exist for these arrays: of one type that they are made for, and not too large."""
    dtype = arrays[0].dtype
    fitting = dtype in DTYPES and all(array.dtype == dtype and array.size < _LIMIT for array in arrays)
    return fitting and available()


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) · up of arrays of one shape, with its gradient."""
    product: mx.array = _swiglu(gate, up)  # type: ignore[assignment]
    return product


@mx.custom_function
def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return _pass("swiglu", gate.dtype, [gate, up], [gate.shape], packs=gate.size)[0]


@_swiglu.vjp
def _swiglu_vjp(primals: Any, upstream: mx.array, _: Any) -> tuple[mx.array, mx.array]:
    gate, up = primals
    d_gate, d_up = _pass(
        "swiglu_gradient", gate.dtype, [gate, up, upstream], [gate.shape] * 2, packs=gate.size, file="swiglu"
    )
    return d_gate, d_up


def cross_entropy(
    logits: mx.array, targets: mx.array, weights: mx.array, smoothing: float
) -> tuple[mx.array, mx.array, mx.array]:
    """Sum of the weighted losses, sum of the weights guessed right, and the gradient of the first for the logits.

    logits [P, V], targets int32 [P], weights float32 [P]; the gradient has the logits' type. Has no gradient itself.
    """
    rows, words = logits.shape
    threads = 1024 if words >= 8192 else 256
    gradient, losses, correct = launch(
        "cross_entropy",
        "loss",
        logits.dtype,
        [logits, targets.astype(mx.int32), weights],
        shapes=[logits.shape, (rows,), (rows,)],
        dtypes=[logits.dtype, mx.float32, mx.float32],
        scalars=[words, smoothing],
        grid=(rows * threads, 1, 1),
        threads=threads,
    )
    return mx.sum(losses), mx.sum(correct), gradient


def take(x: mx.array, index: mx.array, heads: int = 1, *, length_from: int = 0, length_to: int = 0) -> mx.array:
    """Put x[index[i]] at i, zeros where the index is negative; flat, has no gradient itself.

    x holds slots of [heads, width], width being its last axis; with a length they lie as [slots / length, heads,
    length, width], else one behind the other. `length_from` tells of x, `length_to` of what is returned.
    """
    slots, width = index.size, x.shape[-1]
    (taken,) = launch(
        "take",
        "take",
        x.dtype,
        [x, index],
        shapes=[(slots * heads * width,)],
        dtypes=[x.dtype],
        scalars=[slots, heads, width, length_from, length_to],
        grid=(round_up(slots * heads * -(-width * x.itemsize // 16), 256), 1, 1),
        threads=256,
    )
    return taken


def join(sources: list[mx.array], index: mx.array) -> mx.array:
    """Take rows by an index over up to four sources [rows, width] behind each other, zeros where it is negative."""
    width, rows = sources[0].shape[1], [source.shape[0] for source in sources]
    ends = [*accumulate(rows), *[sum(rows)] * 3][:3]
    (joined,) = launch(
        "join", "join", sources[0].dtype, [*sources, *sources[-1:] * (4 - len(sources)), index],
        shapes=[(index.size, width)], dtypes=[sources[0].dtype], scalars=[index.size, width, *ends],
        grid=(round_up(index.size * -(-width * sources[0].itemsize // 16), 256), 1, 1), threads=256,
    )  # fmt: skip
    return joined


def _pass(
    name: str, dtype: mx.Dtype, inputs: list[mx.array], shapes: list[Any], *, packs: int, file: str | None = None
) -> list[mx.array]:
    """Call an elementwise kernel whose threads take 16 bytes each."""
    threads = round_up(-(-packs * dtype.size // 16), 256)
    return launch(
        name,
        file or name,
        dtype,
        inputs,
        shapes=shapes,
        dtypes=[dtype] * len(shapes),
        scalars=[packs],
        grid=(threads, 1, 1),
        threads=256,
    )


def launch(
    name: str,
    file: str,
    dtype: mx.Dtype,
    inputs: list[mx.array],
    *,
    shapes: list[Any],
    dtypes: list[mx.Dtype],
    scalars: list[Any],
    grid: tuple[int, int, int],
    threads: int,
    constants: dict[str, int] | None = None,
) -> list[mx.array]:
    """Launch a kernel of a file, compiled for a type and constants, over contiguous inputs; gives its outputs."""
    return mx.fast.precompiled_cuda_kernel(
        name=name,
        compiled_source=_code(file, dtype, tuple((constants or {}).items())),
        inputs=inputs,
        output_shapes=shapes,
        output_dtypes=dtypes,
        # MLX takes no double that is no single-precision number.
        scalars=[float(np.float32(value)) if isinstance(value, float) else value for value in scalars],
        grid=grid,
        threadgroup=(threads, 1, 1),
        ensure_row_contiguous=True,
    )


@functools.cache
def _code(file: str, dtype: mx.Dtype, constants: tuple[tuple[str, int], ...]) -> bytes:
    return compile_source(source(file, dtype, **dict(constants)))


def begin(file: str, dtype: mx.Dtype, **constants: int) -> None:
    """Start to compile a file's kernels, which are needed soon."""
    compiler.begin(source(file, dtype, **constants), architecture())


def source(file: str, dtype: mx.Dtype, **constants: int) -> str:
    """The whole CUDA source of a file's kernels for a type, with the constants that it is compiled for."""
    folder = resources.files(__package__)
    defined = "".join(f"#define {name} {value}\n" for name, value in constants.items())
    return defined + prelude(dtype) + "".join((folder / f"{part}.cu").read_text() for part in ("packs", file))


def round_up(value: int, step: int) -> int:
    """Round a whole number up to a multiple of another."""
    return -(-value // step) * step


def _computes() -> bool:
    """Take rows by a kernel and compare: what is copied is exact, whatever the card."""
    x = mx.arange(24, dtype=mx.float32).reshape(6, 4)
    rows = take(x, mx.array([5, -1, 0], mx.int32)).reshape(3, 4)
    return bool(rows.tolist() == [[20.0, 21.0, 22.0, 23.0], [0.0] * 4, [0.0, 1.0, 2.0, 3.0]])
