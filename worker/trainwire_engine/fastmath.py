"""The exponential of MLX's CPU backend computes one number at a time; this one is made of operations that do many.

2^t = 2^k · 2^f with k the nearest whole number: k is read off the bits of t + 1.5·2²³, 2^f comes from a polynomial
of degree 5 with a relative error of 1.0e-7 on [-½, ½], and k is added to its exponent's bits. Against float64 the
relative error is that of `mx.exp` (1.8e-6 for arguments down to -40), and it takes a quarter of the time. On other
devices the functions here are MLX's own.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

FUSED_FROM = 2**19
"""Elements from which the passes no longer fit the cache, and a few fused kernels pay for their compilation."""

LOG2_E = 1.4426950408889634
_MAGIC = 12582912.0
_POLYNOMIAL = (
    0.6931468559416916,
    0.24022238002741145,
    0.055508929524512175,
    0.009671697938398914,
    0.0013218672481611782,
)


def on_cpu() -> bool:
    """Tell whether MLX computes on the CPU by default."""
    return bool(mx.default_device() == mx.cpu)


def exp2(t: mx.array) -> mx.array:
    """2^t of float32 numbers up to 127, where below -126 it stays at 1.2e-38; has no gradient rule. CPU only."""
    return (_fused_exp2 if t.size >= FUSED_FROM else _exp2)(t)


def _exp2(t: mx.array) -> mx.array:
    t = mx.maximum(t, -126.0)
    shifted = t + _MAGIC
    f = t - (shifted - _MAGIC)
    power = f * _POLYNOMIAL[4] + _POLYNOMIAL[3]
    for coefficient in (*_POLYNOMIAL[2::-1], 1.0):
        power = power * f + coefficient
    exponent = mx.view(shifted, mx.int32) << 23
    return mx.view(mx.view(power, mx.int32) + exponent, mx.float32)


_fused_exp2 = mx.compile(_exp2)


def exp_below_zero(x: mx.array) -> mx.array:
    """e^x of float32 numbers not above 87; below -87 it stays at 1.2e-38 on the CPU. Has no gradient rule."""
    return exp2(x * LOG2_E) if on_cpu() else mx.exp(x)


def row_sums(x: mx.array) -> mx.array:
    """Sums along the last axis, kept as an axis of length 1: a product with ones is three times as fast. CPU only."""
    return x @ mx.ones((x.shape[-1], 1), x.dtype)


def sigmoid(x: mx.array) -> mx.array:
    """1 / (1 + e^-x) of float32 numbers; has no gradient rule. CPU only."""
    return mx.reciprocal(exp2(mx.minimum(x * -LOG2_E, 126.0)) + 1.0)


@mx.custom_function
def _logsumexp(scores: mx.array) -> mx.array:
    top = mx.max(scores, axis=-1, keepdims=True)
    return top + mx.log(row_sums(exp_below_zero(scores - top)))


@_logsumexp.vjp
def _logsumexp_vjp(scores: mx.array, cotangent: mx.array, value: mx.array) -> mx.array:
    return exp_below_zero(scores - value) * cotangent


def logsumexp(scores: mx.array) -> mx.array:
    """log Σ e^x along the last axis of float32 scores, kept as an axis of length 1."""
    if not on_cpu():
        return mx.logsumexp(scores, axis=-1, keepdims=True)
    value: Any = _logsumexp(scores)
    return value
