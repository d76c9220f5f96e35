"""Several examples in one row, apart from each other: everything but attention works on a flat row of tokens.

Norms, projections and feed-forward layers look at one token at a time. Rotary positions and attention do not: for
them the flat row [1, heads, T, width] is spread to [rows, heads, length, width], one example in each row, and what
attention gives is put back. So attention sees what it sees without packing, its causal kernel and the windows of
sliding attention included, and nothing else computes padding. `install` puts this into architectures of which a test
proves it; others are refused.

The rows may be several groups, each with a length of its own, so that short examples are not padded to long ones.
Rotary positions then leave the row flat, and attention works on one group after another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from trainwire_engine.cuda import kernels, moving, rotary
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

_MOST = 4
"""Groups that the kernel which puts rows back can read."""


@dataclass(frozen=True)
class _Apart:
    """The indices of `apart`, and what follows from them: the slots of all groups behind each other."""

    back: mx.array
    spread: tuple[mx.array, ...]
    slots: mx.array

    @cached_property
    def places(self) -> mx.array:
        """int32 [T]: the place of each token in its example."""
        places, start = mx.zeros_like(self.back), 0
        for rows in self.spread:
            places = mx.where(self.back < start, places, (self.back - start) % rows.shape[1])
            start += rows.size
        return places


_active: _Apart | None = None


@contextmanager
def apart(back: mx.array | None = None, *spread: mx.array) -> Iterator[None]:
    """Keep examples apart inside the block: `spread`, a [rows, length] for each group, is the place of each slot in the
    flat row, `back` [T] the slot of each of its places, counted over all groups, -1 where there is none. Must hold
    until gradients are traced too."""
    global _active
    before = _active
    slots = mx.concatenate([rows.reshape(-1) for rows in spread]) if spread else None
    _active = None if back is None or slots is None else _Apart(back, spread, slots)
    try:
        yield
    finally:
        _active = before


def most_groups(module: nn.Module) -> int:
    """Tell how many groups pay for a model: more than one where rotary positions can leave the row flat by a kernel."""
    ropes = [layer.get("rope") for _, layer in module.named_modules()]
    flat = all(rotary.turns(rope) and not rope.traditional for rope in ropes if isinstance(rope, nn.Module))
    return _MOST if flat else 1


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
        if _active is None:
            return base.__call__(self, x, *args, **kwargs)
        by = rotary.rotation(self, x, *args, **kwargs)
        if len(_active.spread) == 1:
            if by is not None:
                return rotary.spread(by, x, _active.spread[0], _active.back)
            return base.__call__(self, _spread(x), *args, **kwargs)
        if by is not None:
            return rotary.placed(by, x, _active.places)
        return _joined([base.__call__(self, rows, *args, **kwargs) for rows in _groups(x)])

    return type(base.__name__, (base,), {"__call__": call, "__module__": base.__module__, "spreads": True})


class _ByGroup(tuple[Any, ...]):
    """Masks, one for each group."""


def _masking(original: Callable[..., Any]) -> Callable[..., Any]:
    def mask(h: mx.array, *args: Any, **kwargs: Any) -> Any:
        if _active is None:
            return original(h, *args, **kwargs)
        # A mask depends on the length alone: the one of an example, [rows, length], not of the flat row.
        masks = _ByGroup(original(rows, *args, **kwargs) for rows in _active.spread)
        same = all(mask is None or isinstance(mask, str) for mask in masks) and len(set(masks)) == 1
        return masks[0] if same or len(masks) == 1 else masks

    return mask


def _putting_back(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attention(queries: mx.array, keys: mx.array, values: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        if _active is None:
            return original(queries, keys, values, *args, **kwargs)
        if len(_active.spread) > 1:
            parts = zip(*map(_groups, (queries, keys, values)))
            return _joined([original(*part, *_of(n, args), **_of(n, kwargs)) for n, part in enumerate(parts)])
        # Queries and keys are flat still in blocks without rotary positions.
        flat = (1, _active.back.size)
        spread = (_spread(x) if (x.shape[0], x.shape[2]) == flat else x for x in (queries, keys, values))
        return _put_back(original(*spread, *args, **kwargs))

    return attention


def _of(group: int, values: Any) -> Any:
    """Arguments for one group."""
    if isinstance(values, dict):
        return {name: value[group] if isinstance(value, _ByGroup) else value for name, value in values.items()}
    return [value[group] if isinstance(value, _ByGroup) else value for value in values]


_REPLACED: dict[str, Callable[[Any], Any]] = {
    "scaled_dot_product_attention": _putting_back,
    "create_attention_mask": _masking,
}


def _spread(x: mx.array) -> mx.array:
    """[1, heads, T, width] to the only group's [rows, heads, length, width]."""
    assert _active is not None
    (spread,), back = _active.spread, _active.back
    if kernels.ready(x):
        return moving.to_rows(x, spread, back)
    rows = taken(x[0], spread.reshape(-1), back)
    return rows.reshape(x.shape[1], *spread.shape, x.shape[3]).swapaxes(0, 1)


def _put_back(x: mx.array) -> mx.array:
    """[rows, heads, length, width] to [1, heads, T, width]."""
    assert _active is not None
    (spread,), back = _active.spread, _active.back
    if kernels.ready(x):
        return moving.to_flat(x, spread, back)
    rows, heads, length, width = x.shape
    return taken(x.swapaxes(0, 1).reshape(heads, rows * length, width), back, spread.reshape(-1))[None]


def _groups(x: mx.array) -> Sequence[mx.array]:
    """[1, heads, T, width] to a [rows, heads, length, width] for each group."""
    assert _active is not None
    slots, back, shapes = _active.slots, _active.back, [rows.shape for rows in _active.spread]
    if kernels.ready(x):
        return moving.dealt(x, slots, back, shapes)
    ends = list(accumulate(rows.size for rows in _active.spread))[:-1]
    parts = mx.split(taken(x[0], slots, back), ends, axis=1)
    return [part.reshape(x.shape[1], *shape, x.shape[3]).swapaxes(0, 1) for part, shape in zip(parts, shapes)]


def _joined(parts: Sequence[mx.array]) -> mx.array:
    """The groups' [rows, heads, length, width] to [1, heads, T, width]."""
    assert _active is not None
    if kernels.ready(*parts):
        return moving.joined(parts, _active.slots, _active.back)
    flat = [part.swapaxes(0, 1).reshape(part.shape[1], -1, part.shape[3]) for part in parts]
    return taken(mx.concatenate(flat, axis=1), _active.back, _active.slots)[None]
