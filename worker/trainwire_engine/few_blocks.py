"""A model with few of its blocks: which of them are alike, and passes that leave the others out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from trainwire_engine.model import Model
from trainwire_engine.step import UpdateStep

_PROBE_ROWS = 5


def kinds_of(model: Model) -> list[list[int]]:
    """The numbers of the blocks of each kind; one block of each kind, if the model cannot do without any."""
    blocks = model.module.layers
    kinds: dict[Any, list[int]] = {}
    for number, block in enumerate(blocks):
        kinds.setdefault(_signature(block), []).append(number)
    found = list(kinds.values())
    skipped = set(range(len(blocks))) - set(first_of(found, 1))
    try:
        with _leaving_out(blocks, skipped):
            mx.eval(model.module(mx.ones((_PROBE_ROWS, 2), mx.int32)))
    except (TypeError, ValueError):
        # Blocks that hand on more than hidden states.
        return [[number] for number in range(len(blocks))]
    return found


def _signature(block: nn.Module) -> Any:
    """What two blocks share that compute alike: their layers, their weights' shapes, their switches."""
    return tuple(
        (
            path,
            type(layer).__name__,
            tuple((name, value.shape) for name, value in layer.items() if isinstance(value, mx.array)),
            tuple((name, value) for name, value in vars(layer).items() if isinstance(value, bool) and name[0] != "_"),
        )
        for path, layer in block.named_modules()
    )


def first_of(kinds: Sequence[Sequence[int]], count: int) -> list[int]:
    """The numbers of the first blocks of each kind."""
    return sorted(number for kind in kinds for number in kind[:count])


@contextmanager
def only(step: UpdateStep, blocks: Sequence[int]) -> Iterator[None]:
    """Let the step's model have these blocks alone."""
    layers = step.model.module.layers
    step.trace_anew()
    try:
        with _leaving_out(layers, set(range(len(layers))) - set(blocks)):
            yield
    finally:
        step.trace_anew()


@contextmanager
def _leaving_out(blocks: Sequence[nn.Module], skipped: set[int]) -> Iterator[None]:
    """Let blocks hand on what they are given; everything else about them stays."""
    classes = [type(block) for block in blocks]
    for number in skipped:
        base = classes[number]
        blocks[number].__class__ = type(base.__name__, (base,), {"__call__": lambda self, x, *_, **__: x})
    try:
        yield
    finally:
        for block, base in zip(blocks, classes):
            block.__class__ = base
