"""SwiGLU and attention for training on the CPU: the values of MLX's own, from operations that are fast there.

Both have a gradient rule of their own and take float32 alone; anything else, and any
call of a kind that training does not make, goes to MLX's function. `install` puts them where mlx-lm's
architectures look these functions up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from trainwire_engine.fastmath import LOG2_E, exp2, row_sums, sigmoid
from trainwire_engine.pieces import note

BLOCK = 128
"""Rows of a block of the attention matrix; blocks above the diagonal are not computed."""

KEEP_BELOW = 2**22
"""Entries of an attention matrix up to which its probabilities are kept for the backward pass."""


@mx.custom_function
def _silu_product(gate: mx.array, x: mx.array) -> mx.array:
    product = gate * sigmoid(gate) * x
    note(product)
    return product


@_silu_product.vjp
def _silu_product_vjp(primals: Any, upstream: mx.array, _: Any) -> tuple[mx.array, mx.array]:
    # The sigmoid is made again: kept, it would be an eighth of what all activations take, and save 1 % of the time.
    gate, x = primals
    share = sigmoid(gate)
    silu = gate * share
    above_gate, above_x = upstream * x * (share + silu * (1 - share)), upstream * silu
    note(above_gate, above_x)
    return above_gate, above_x


@mx.custom_function
def _causal_attention(queries: mx.array, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
    """queries [B, K, G, L, D] already scaled by log2 e, keys and values [B, K, L, D]; K heads of G queries each.

    Returns the output and per block of rows what its backward pass needs: the probabilities, or in their place
    the logarithm of their sum.
    """
    batch, heads, group, length, width = queries.shape
    keep = batch * heads * group * length * length <= KEEP_BELOW
    parts: list[mx.array] = []
    kept = []
    for start, end in _blocks(length):
        asked = queries[:, :, :, start:end].reshape(batch, heads, group * (end - start), width)
        scores = _scores(asked if keep else _after(asked, parts[-1:]), keys, start, end)
        top = mx.max(scores, axis=-1, keepdims=True)
        powers = exp2(scores - top)
        total = row_sums(powers)
        shares = powers * mx.reciprocal(total)
        parts.append(shares @ values[:, :, :end])
        note(parts[-1])
        kept.append(shares if keep else top + mx.log(total) * LOG2_E)
    return _joined(parts, group), *kept


@_causal_attention.vjp
def _causal_attention_vjp(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, ...]:
    queries, keys, values = primals
    batch, heads, group, length, width = queries.shape
    upstream, kept = cotangents[0], outputs[1:]
    keep = kept[0].shape[-1] > 1 or length == 1
    d_keys, d_values = mx.zeros_like(keys), mx.zeros_like(values)
    d_queries: list[mx.array] = []
    for (start, end), saved in zip(_blocks(length), kept):
        rows = (batch, heads, group * (end - start), width)
        asked = queries[:, :, :, start:end].reshape(rows)
        if keep:
            shares = saved
        else:
            asked = _after(asked, [d_queries[-1], d_keys, d_values] if d_queries else [])
            shares = exp2(_scores(asked, keys, start, end) - saved)
        above = upstream[:, :, :, start:end].reshape(rows)
        pulled = shares * (above @ values[:, :, :end].swapaxes(-1, -2))
        # Its sums are those of output times gradient, for which the output would have to be kept.
        d_scores = pulled - shares * row_sums(pulled)
        d_queries.append(d_scores @ keys[:, :, :end])
        for_keys, for_values = d_scores.swapaxes(-1, -2) @ asked, shares.swapaxes(-1, -2) @ above
        # Not the sums: what is added to them later changes them here, too.
        note(d_queries[-1], for_keys, for_values)
        d_keys[:, :, :end] += for_keys
        d_values[:, :, :end] += for_values
    # The scores are in base 2, their gradient in base e.
    return _joined(d_queries, group) * (1 / LOG2_E), d_keys * (1 / LOG2_E), d_values


def _scores(asked: mx.array, keys: mx.array, start: int, end: int) -> mx.array:
    """Scores [B, K, G·rows, end] of a block of rows, those of the future far below all others."""
    batch, heads, many, _ = asked.shape
    rows = end - start
    past = asked @ keys[:, :, :start].swapaxes(-1, -2)
    now = (asked @ keys[:, :, start:end].swapaxes(-1, -2)).reshape(batch, heads, many // rows, rows, rows)
    hidden = (mx.arange(rows)[None] > mx.arange(rows)[:, None]).astype(mx.float32) * -1e30
    now = (now + hidden).reshape(batch, heads, many, rows)
    return mx.concatenate([past, now], axis=-1) if start else now


def _after(array: mx.array, done: list[mx.array]) -> mx.array:
    # All blocks could be made at the same time, and would, a matrix of the length's square; it is kept if it is small.
    return mx.depends([array], done)[0] if done else array


def _joined(parts: list[mx.array], group: int) -> mx.array:
    batch, heads, _, width = parts[0].shape
    split = (part.reshape(batch, heads, group, part.shape[2] // group, width) for part in parts)
    return mx.concatenate(list(split), axis=3)


def _blocks(length: int) -> list[tuple[int, int]]:
    """Blocks of rows, each of which sees the keys up to its end."""
    return [(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK)]


def attention(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Make `mx.fast.scaled_dot_product_attention` with the causal float32 case computed here."""

    def scaled_dot_product_attention(
        q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any = None, sinks: Any = None, **more: Any
    ) -> mx.array:
        batch, heads, length, width = q.shape
        plain = isinstance(mask, str) and mask == "causal" and sinks is None and not more
        if not plain or q.dtype != mx.float32 or k.dtype != mx.float32 or k.shape[2] != length or length < 2:
            return original(q, k, v, scale=scale, mask=mask, sinks=sinks, **more)
        groups = k.shape[1]
        asked = (q * (scale * LOG2_E)).reshape(batch, groups, heads // groups, length, width)
        outputs: Any = _causal_attention(asked, k, v)
        return outputs[0].reshape(batch, heads, length, v.shape[-1])

    scaled_dot_product_attention.__wrapped__ = original  # type: ignore[attr-defined]
    return scaled_dot_product_attention


def swiglu(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Make mlx-lm's `swiglu(gate, x)` = silu(gate) · x with the float32 case computed here."""

    def product(gate: mx.array, x: mx.array) -> mx.array:
        if gate.dtype != mx.float32 or x.dtype != mx.float32:
            return original(gate, x)
        made: Any = _silu_product(gate, x)
        return made

    product.__wrapped__ = original  # type: ignore[attr-defined]
    return product


def install(module: nn.Module) -> None:
    """Let a loaded model's architecture use these functions, where MLX computes on the CPU.

    They take the place of `mx.fast.scaled_dot_product_attention` in the process, and of `swiglu` in the modules that
    define the model's layers. MLX's own activations stay: architectures call them in functions compiled for any
    shape, where the exponential here cannot be traced.
    """
    if not hasattr(mx.fast.scaled_dot_product_attention, "__wrapped__"):
        mx.fast.scaled_dot_product_attention = attention(mx.fast.scaled_dot_product_attention)
    homes = {type(layer).__module__ for _, layer in module.named_modules()}
    for home in (sys.modules[name] for name in homes if name.startswith("mlx_lm.models.")):
        original = getattr(home, "swiglu", None)
        if original is not None and not hasattr(original, "__wrapped__"):
            home.swiglu = swiglu(original)  # type: ignore[attr-defined]
