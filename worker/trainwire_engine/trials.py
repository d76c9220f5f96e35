"""Small trials of a model's passes: in the shape of the run's largest micro-batches, with few of its blocks.

A model's blocks are of few kinds, and blocks of a kind take the same memory and time. So a trial leaves most of them
out, and what each one more adds is known: in memory, what the backward pass keeps of it; in time, the difference of
two trials. Nothing is extrapolated over rows or lengths, of which attention, lanes and the head make crooked curves.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from trainwire_engine import memory
from trainwire_engine.batches import MicroBatch, single
from trainwire_engine.lanes import Lanes
from trainwire_engine.model import Model
from trainwire_engine.step import UpdateStep

PATIENCE_S = 10.0
"""Seconds after which no further update is tried."""
_OF_A_KIND = 3
"""Blocks of a kind in the larger trial: with fewer, MLX's dispatch ahead of the computation blurs the peak."""
_PROBE_ROWS = 5


@dataclass(frozen=True)
class Trials:
    """What whole passes would take by the trials: `peak` in bytes, `kept` of it by the backward pass of one
    micro-batch, `together` micro-batches at the same time on average, `seconds` for all tried."""

    peak: int
    kept: int
    together: float
    seconds: float


def try_passes(step: UpdateStep, batches: Sequence[MicroBatch], lanes: int, held: int) -> Trials:
    """Make the passes over micro-batches, the largest first, with few blocks; they go over so many lanes at most, and
    `held` bytes are in use without them."""
    kinds = _kinds(step.model)
    few, some = _first(kinds, 1), _first(kinds, _OF_A_KIND)
    blocks = sum(len(kind) for kind in kinds)
    with _only(step, some):
        peak, seconds = _passes(step, batches)
        with _on_lanes(step, 0):
            alone = _passes(step, batches[:1])[0] if lanes > 1 else peak
    if len(some) == blocks:
        return Trials(peak, 0, 1.0, seconds)
    # Two lanes hold twice as much where they are at their fullest at the same time, as equal micro-batches are.
    at_once = min(float(lanes), max(1.0, (peak - held) / max(1, alone - held)))
    with _only(step, few):
        _, least_seconds = _passes(step, batches)
    base = _kept(step, few, batches[0])
    more, kept = 0, base
    for kind in kinds:
        if len(kind) > 1:
            one_more = max(0, _kept(step, [*few, kind[1]], batches[0]) - base)
            kept += one_more * (len(kind) - 1)
            more += one_more * max(0, len(kind) - _OF_A_KIND)
    each = max(0.0, seconds - least_seconds) / max(1, len(some) - len(few))
    return Trials(peak + round(more * at_once), kept, at_once, seconds + each * (blocks - len(some)))


def tried_share(model: Model) -> float:
    """The share of a model's blocks that the larger trial computes."""
    kinds = _kinds(model)
    return len(_first(kinds, _OF_A_KIND)) / max(1, sum(len(kind) for kind in kinds))


def try_update(step: UpdateStep, batches: Sequence[MicroBatch], max_grad_norm: float | None) -> tuple[int, float]:
    """Peak bytes and seconds of whole updates: new weights and a new state exist beside the old ones."""
    memory.figures(reset_peak=True)
    seconds = 0.0
    begun = time.perf_counter()
    for number in (1, 2, 3):
        if number == 3 and time.perf_counter() - begun > PATIENCE_S:
            break
        started = time.perf_counter()
        step(batches, step=number, learning_rate=0.0, max_grad_norm=max_grad_norm)
        seconds = time.perf_counter() - started
    return memory.figures(reset_peak=True).peak, seconds


def try_finish(step: UpdateStep, passes: int, max_grad_norm: float | None) -> tuple[int, float]:
    """Peak bytes of an update whose passes are next to nothing, and the seconds it takes beside its passes."""
    least = [made_up(1, 32, 16, step.model.vocab_size)] * passes
    with _on_lanes(step, 2**62):
        peak, seconds = try_update(step, least, max_grad_norm)
        return peak, max(0.0, seconds - _passes(step, least)[1])


def made_up(rows: int, length: int, positions: int, vocabulary: int) -> MicroBatch:
    """Make up a micro-batch of a shape from random tokens, with at least so many trained positions."""
    return single(_MadeUpRows(length, -(-positions // rows), vocabulary), range(rows))


class _MadeUpRows:
    """Rows of random tokens as long as given, with so many trained ones at their ends."""

    def __init__(self, length: int, trained: int, vocabulary: int) -> None:
        self._draw = np.random.default_rng(0)
        self._length, self._vocabulary = length, vocabulary
        self._mask = np.arange(length + 1) > length - min(trained, length)

    def tokens(self, row: int) -> np.ndarray:
        return self._draw.integers(0, self._vocabulary, self._length + 1).astype(np.int32)

    def mask(self, row: int) -> np.ndarray:
        return self._mask


def _passes(step: UpdateStep, batches: Sequence[MicroBatch]) -> tuple[int, float]:
    """Peak bytes of the passes over micro-batches, and the seconds of a second time."""
    memory.figures(reset_peak=True)
    seconds = 0.0
    for _ in range(2):
        started = time.perf_counter()
        mx.eval(step.sums(batches, 1))
        seconds = time.perf_counter() - started
    return memory.figures(reset_peak=True).peak, seconds


def _kept(step: UpdateStep, blocks: Sequence[int], batch: MicroBatch) -> int:
    """Bytes that the graph of a gradient holds when the loss is computed and the gradient is not."""
    with _only(step, blocks):
        before = memory.figures().active
        (loss, correct), gradients = step.uncompiled_sums(batch)
        mx.eval(loss, correct)
        kept = memory.figures().active - before
        del gradients
        step.model.release()
    return kept


def _kinds(model: Model) -> list[list[int]]:
    """The numbers of the blocks of each kind; one block of each kind, if the model cannot do without any."""
    blocks = model.module.layers
    kinds: dict[Any, list[int]] = {}
    for number, block in enumerate(blocks):
        kinds.setdefault(_signature(block), []).append(number)
    found = list(kinds.values())
    skipped = set(range(len(blocks))) - set(_first(found, 1))
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


def _first(kinds: Sequence[Sequence[int]], count: int) -> list[int]:
    return sorted(number for kind in kinds for number in kind[:count])


@contextmanager
def _only(step: UpdateStep, blocks: Sequence[int]) -> Iterator[None]:
    """Let the step's model have these blocks alone."""
    layers = step.model.module.layers
    step.trace_anew()
    try:
        with _leaving_out(layers, set(range(len(layers))) - set(blocks)):
            yield
    finally:
        step.trace_anew()


@contextmanager
def _on_lanes(step: UpdateStep, weights: int) -> Iterator[None]:
    """Let micro-batches go over as many lanes as those of a model with so many weights: one, or all there are."""
    before = step.lanes
    step.lanes = Lanes(weights)
    try:
        yield
    finally:
        step.lanes = before


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
