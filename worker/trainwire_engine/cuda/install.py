"""Puts our CUDA kernels where mlx-lm's architectures look up SwiGLU, norms, rotary positions and embeddings."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from trainwire_engine.cuda import kernels, tracing
from trainwire_engine.cuda.compiler import DTYPES
from trainwire_engine.cuda.norms import RMSNorm, constants_of, fits
from trainwire_engine.cuda.rotary import rotating, turns


def install(module: nn.Module) -> None:
    """Let a loaded model compute with them, and MLX compile without fusing, if the card can."""
    if not kernels.available():
        return
    tracing.stop_fusing()
    _begin(module)
    homes = {type(layer).__module__ for _, layer in module.named_modules()}
    for home in (sys.modules[name] for name in homes if name.startswith("mlx_lm.models.")):
        original = getattr(home, "swiglu", None)
        if original is not None and not hasattr(original, "__wrapped__"):
            home.swiglu = swiglu(original)  # type: ignore[attr-defined]
    for _, layer in module.named_modules():
        if type(layer) is nn.Embedding:
            layer.__class__ = Embedding
        elif type(layer) is nn.RMSNorm:
            layer.__class__ = RMSNorm
        elif turns(layer):
            layer.__class__ = rotating(type(layer))


def _begin(module: nn.Module) -> None:
    """Let kernels be compiled side by side, which the first pass would wait for one after the other."""
    norms = [layer.weight for _, layer in module.named_modules() if type(layer) is nn.RMSNorm]
    for dtype in {weight.dtype for weight in norms} & set(DTYPES):
        for file in ("rotate", "loss", "swiglu", "take"):
            kernels.begin(file, dtype)
    for width, dtype in {(weight.size, weight.dtype) for weight in norms if fits(weight, weight)}:
        kernels.begin("norm", dtype, **constants_of(width, dtype))


def swiglu(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Make mlx-lm's `swiglu(gate, x)` = silu(gate) · x with one kernel each way where there is one."""

    def product(gate: mx.array, x: mx.array) -> mx.array:
        if gate.shape == x.shape and kernels.ready(gate, x):
            return kernels.swiglu(gate, x)
        return original(gate, x)

    product.__wrapped__ = original  # type: ignore[attr-defined]
    return product


class Embedding(nn.Embedding):
    """An embedding that looks words up with our kernel; a module becomes one by its class."""

    def __call__(self, x: mx.array) -> mx.array:
        weight = self.weight
        if x.dtype not in (mx.int32, mx.uint32) or not kernels.ready(weight):
            return weight[x]

        @mx.custom_function
        def look_up(weight: mx.array) -> mx.array:
            return kernels.take(weight, x.astype(mx.int32).reshape(-1)).reshape(*x.shape, weight.shape[-1])

        @look_up.vjp
        def pull(weight: mx.array, upstream: mx.array, _: Any) -> mx.array:
            _, (gradient,) = mx.vjp(lambda weight: weight[x], [weight], [upstream])
            return gradient

        rows: mx.array = look_up(weight)  # type: ignore[assignment]
        return rows
