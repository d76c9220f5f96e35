"""The passes of lanes in pieces of about a block: a thread hands MLX the next one when the last is computed.

Where MLX lets each lane have many operations open (`open_tasks`), a lane would else make the results of hundreds of
them room in advance. While a pass is traced, what goes into each block is noted, and so is its gradient; these arrays
are then computed one after another, each block's gradient with those of its weights. They are the pass's own, in an
order that it may have anyway: no number changes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import mlx.core as mx
import mlx.nn as nn

Arrays = dict[str, mx.array]

Note = tuple[str, tuple[mx.array, ...]]
"""Arrays of a pass, and the path of the block whose backward pass they end, or nothing."""

LARGE = 2**16
"""Numbers of a weight from which its update is a piece."""

_noted: ContextVar[list[Note] | None] = ContextVar("noted", default=None)


@contextmanager
def noted(wanted: bool = True) -> Iterator[list[Note]]:
    """Note the arrays of the pass that is traced inside the block, if wanted, in an order to compute them in."""
    notes: list[Note] = []
    token = _noted.set(notes if wanted else None)
    try:
        yield notes
    except BaseException:
        # The arrays' graphs hold the notes, which nobody would find to be garbage.
        notes.clear()
        raise
    finally:
        _noted.reset(token)


def note(*arrays: mx.array) -> None:
    """Note arrays that are a piece, if a pass is noted."""
    notes = _noted.get()
    if notes is not None:
        notes.append(("", arrays))


def compute(notes: list[Note], grads: Arrays | None = None) -> None:
    """Compute a noted pass piece by piece; `grads`, by names of weights, may be more than this pass's.

    Takes the notes away as it goes: an array that nothing else needs is let go when it is computed.
    """
    if not notes:
        return
    blocks = {path for path, _ in notes if path}
    of_block: dict[str, list[mx.array]] = {}
    for name, grad in (grads or {}).items():
        parts = name.split(".")
        path = next((path for end in range(len(parts), 0, -1) if (path := ".".join(parts[:end])) in blocks), "")
        of_block.setdefault(path, []).append(grad)
    notes.reverse()
    try:
        while notes:
            path, arrays = notes.pop()
            mx.eval(*arrays, *(of_block.get(path, ()) if path else ()))
            del arrays
    finally:
        notes.clear()


def install(module: nn.Module) -> None:
    """Let a model's blocks note what they are given."""
    paths = {id(layer): path for path, layer in module.named_modules()}
    for block in module.layers:
        if id(block) in paths:
            base: Any = type(block)
            block._noted_as = paths[id(block)]
            block.__class__ = _noting(base)


@functools.cache
def _noting(base: Any) -> Any:
    def call(self: Any, x: Any, *rest: Any, **named: Any) -> Any:
        return base.__call__(self, _through(x, self._noted_as), *rest, **named)

    return type(base.__name__, (base,), {"__call__": call, "__module__": base.__module__})


def _through(x: Any, path: str) -> Any:
    notes = _noted.get()
    if notes is None or not isinstance(x, mx.array):
        return x

    @mx.custom_function
    def same(x: mx.array) -> mx.array:
        return x

    @same.vjp
    def pull(_: Any, gradient: mx.array, __: Any) -> mx.array:
        notes.append((path, (gradient,)))
        return gradient

    passed: Any = same(x)
    notes.append(("", (passed,)))
    return passed
