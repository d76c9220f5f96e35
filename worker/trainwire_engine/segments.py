"""Several examples in one row, apart from each other: everything but attention works on a flat row of tokens.

Norms, projections and feed-forward layers look at one token at a time. Rotary positions and attention do not: for
them the flat row [1, heads, T, width] is spread to [rows, heads, length, width], one example in each row, and what
attention gives is put back. So attention sees what it sees without packing, its causal kernel and the windows of
sliding attention included, and nothing else computes padding. `install` puts this into architectures of which a test
proves it; others are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from trainwire_engine.cuda import kernels, rotary
from trainwire_engine.taking import taken
from trainwire_protocol.errors import Unsupported

PROVED = (
    "cohere2",
    "ernie4_5",
    "exaone4",
    "gemma",
    "gemma3_text",
    "glm4",
    "gpt_oss",
    "granite",
    "helium",
    "hunyuan_v1_dense",
    "internlm3",
    "llama",
    "mimo",
    "mixtral",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
)
"""Modules of mlx-lm, which serve one or more model types, whose loss and gradients are proved to be those of unpacked
rows."""

_active: tuple[mx.array, mx.array] | None = None


@contextmanager
def apart(spread: mx.array | None = None, back: mx.array | None = None) -> Iterator[None]:
    """Keep examples apart inside the block: `spread` [rows, length] is the place of each slot in the flat row, `back`
    [T] the slot of each of its places, -1 where there is none. Must hold until gradients are traced too."""
    global _active
    before = _active
    _active = None if spread is None or back is None else (spread, back)
    try:
        yield
    finally:
        _active = before


def install(module: nn.Module, model_type: object) -> None:
    """Let a loaded model's attention obey `apart`; without it everything is as before. Raises Unsupported."""
    if type(module).__module__.rpartition(".")[2] not in PROVED:
        raise Unsupported(
            f"packing is not proved to be exact for models of the type {model_type!r}.",
            hint=f"Leave packing out; mlx-lm's architectures that it is proved for are {', '.join(PROVED)}.",
        )
    for _, layer in module.named_modules():
        rope = layer.get("rope")
        if isinstance(rope, nn.Module) and not hasattr(type(rope), "spreads"):
            rope.__class__ = _spreading(type(rope))
    homes = {type(layer).__module__ for _, layer in module.named_modules()}
    for home in (sys.modules[name] for name in homes if name.startswith("mlx_lm.models.")):
        for name, replace in _REPLACED.items():
            original = getattr(home, name, None)
            if original is not None and not hasattr(original, "obeys"):
                obeying = replace(original)
                obeying.obeys = True
                setattr(home, name, obeying)


def _spreading(base: type) -> type:
    def call(self: nn.Module, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        by = rotary.rotation(self, x, *args, **kwargs) if _active is not None else None
        if by is not None and _active is not None:
            return rotary.spread(by, x, *_active)
        return base.__call__(self, _spread(x), *args, **kwargs)

    return type(base.__name__, (base,), {"__call__": call, "__module__": base.__module__, "spreads": True})


def _masking(original: Callable[..., Any]) -> Callable[..., Any]:
    def mask(h: mx.array, *args: Any, **kwargs: Any) -> Any:
        # A mask depends on the length alone: the one of an example, [rows, length], not of the flat row.
        return original(h if _active is None else _active[0], *args, **kwargs)

    return mask


def _putting_back(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attention(queries: mx.array, keys: mx.array, values: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        if _active is None:
            return original(queries, keys, values, *args, **kwargs)
        # Queries and keys are flat still in blocks without rotary positions.
        flat = (1, _active[1].size)
        spread = (_spread(x) if (x.shape[0], x.shape[2]) == flat else x for x in (queries, keys, values))
        return _put_back(original(*spread, *args, **kwargs))

    return attention


_REPLACED: dict[str, Callable[[Any], Any]] = {
    "scaled_dot_product_attention": _putting_back,
    "create_attention_mask": _masking,
}


def _spread(x: mx.array) -> mx.array:
    """[1, heads, T, width] to [rows, heads, length, width]."""
    if _active is None:
        return x
    spread, back = _active
    if kernels.ready(x):
        return _moved(x, _to_rows, _to_flat, spread, back)
    rows = taken(x[0], spread.reshape(-1), back)
    return rows.reshape(x.shape[1], *spread.shape, x.shape[3]).swapaxes(0, 1)


def _put_back(x: mx.array) -> mx.array:
    """[rows, heads, length, width] to [1, heads, T, width]."""
    assert _active is not None
    spread, back = _active
    if kernels.ready(x):
        return _moved(x, _to_flat, _to_rows, spread, back)
    rows, heads, length, width = x.shape
    return taken(x.swapaxes(0, 1).reshape(heads, rows * length, width), back, spread.reshape(-1))[None]


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


def _to_rows(x: mx.array, spread: mx.array, _: mx.array) -> mx.array:
    # Projections leave the heads of a token side by side: in that order nothing is copied before the kernel.
    rows, length = spread.shape
    heads, width = x.shape[1], x.shape[3]
    flat = x.swapaxes(1, 2)
    return kernels.take(flat, spread.reshape(-1), heads, length_to=length).reshape(rows, heads, length, width)


def _to_flat(x: mx.array, _: mx.array, back: mx.array) -> mx.array:
    heads, length, width = x.shape[1:]
    flat = kernels.take(x, back, heads, length_from=length)
    return flat.reshape(1, back.size, heads, width).swapaxes(1, 2)
