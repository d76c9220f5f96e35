"""Small trials of a model's passes: in the shape of the run's largest micro-batches, with few of its blocks.

A model's blocks are of few kinds, and blocks of a kind take the same memory and time. So a trial leaves most of them
out, and what each one more adds is known: in memory, what the backward pass keeps of it; in time, the difference of
two trials. Nothing is extrapolated over rows or lengths, of which attention, lanes and the head make crooked curves.

What several lanes hold at once depends on how they meet, which no trial repeats. So each lane's passes are tried alone,
whose peak is the same every time, and `at_once` says what they come to when all are at their fullest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from trainwire_engine import memory
from trainwire_engine.batches import MicroBatch, single
from trainwire_engine.few_blocks import first_of, kinds_of, only
from trainwire_engine.lanes import Lanes
from trainwire_engine.model import Model
from trainwire_engine.step import UpdateStep

PATIENCE_S = 10.0
"""Seconds after which no further update is tried, and no further plan for a proposal."""
_OF_A_KIND = 3
"""Blocks of a kind in the larger trial: with fewer, MLX's dispatch ahead of the computation blurs the peak."""


@dataclass(frozen=True)
class Fullest:
    """Bytes above what is held between updates when a lane is at its fullest, `kept` of them by the backward pass."""

    taken: int
    kept: int


def at_once(lanes: Sequence[Fullest]) -> int:
    """Bytes that lanes take at the same time in a run's fullest moment.

    What their backward passes keep adds up, as it is there for long. What a lane takes for a moment beside it meets
    half of the others': measured over models, methods and lengths, the peak of some dozens of updates lies within a
    tenth of that. It is the piece of a pass that MLX makes in advance, and steps of the head and of blocks that are
    computed again.
    """
    brief = [lane.taken - lane.kept for lane in lanes]
    return sum(lane.kept for lane in lanes) + (max(brief) + sum(brief)) // 2


def try_passes(step: UpdateStep, lanes: Sequence[Sequence[MicroBatch]]) -> list[Fullest]:
    """Make the passes over micro-batches of each lane, the largest first, with few blocks: what whole ones take."""
    kinds = kinds_of(step.model)
    peaks: dict[Any, int] = {}
    with only(step, first_of(kinds, _OF_A_KIND)), _on_lanes(step, 1):
        # What a card keeps of recorded passes counts with them.
        held = memory.figures().active
        for lane in lanes:
            for count in range(1, len(lane) + 1):
                if _shapes(lane[:count]) not in peaks:
                    peaks[_shapes(lane[:count])] = _peak(step, lane[:count]) - held
    return [_fullest(step, lane, kinds, peaks) for lane in lanes]


def try_seconds(step: UpdateStep, batches: Sequence[MicroBatch]) -> float:
    """What whole passes over micro-batches would take on all lanes together, from passes with few blocks."""
    kinds = kinds_of(step.model)
    few, some = first_of(kinds, 1), first_of(kinds, _OF_A_KIND)
    left_out = sum(len(kind) for kind in kinds) - len(some)
    with only(step, some):
        seconds = _seconds(step, batches)
    if left_out:
        with only(step, few):
            each = (seconds - _seconds(step, batches)) / (len(some) - len(few))
        seconds += max(0.0, each) * left_out
    return seconds


def _fullest(step: UpdateStep, lane: Sequence[MicroBatch], kinds: list[list[int]], peaks: dict[Any, int]) -> Fullest:
    """Add the blocks that were left out; the gradients of a lane's first pass are there while its second is made."""
    gradients = sum(leaf.nbytes for leaf in step.model.trainable.values())
    found = []
    for before, batch in enumerate(lane):
        kept, more = _kept_by(step, batch, kinds)
        taken = peaks[_shapes(lane[: before + 1])] + more
        found.append(Fullest(taken, min(taken, kept + before * gradients)))
    return max(found, key=lambda one: one.taken)


def _shapes(batches: Sequence[MicroBatch]) -> Any:
    return tuple(batch.shape for batch in batches)


def _kept_by(step: UpdateStep, batch: MicroBatch, kinds: list[list[int]]) -> tuple[int, int]:
    """Bytes that the backward pass keeps of a micro-batch in all blocks, and in those that the larger trial lacks."""
    few = first_of(kinds, 1)
    base = kept = _kept(step, few, batch)
    more = 0
    for kind in kinds:
        if len(kind) > 1:
            one_more = max(0, _kept(step, [*few, kind[1]], batch) - base)
            kept += one_more * (len(kind) - 1)
            more += one_more * max(0, len(kind) - _OF_A_KIND)
    return kept, more


def tried_share(model: Model) -> float:
    """The share of a model's blocks that the larger trial computes."""
    kinds = kinds_of(model)
    return len(first_of(kinds, _OF_A_KIND)) / max(1, sum(len(kind) for kind in kinds))


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


def try_finish(step: UpdateStep, passes: int, lanes: int, max_grad_norm: float | None) -> tuple[int, float]:
    """Peak bytes of an update whose passes are next to nothing, and the seconds it takes beside its passes."""
    least = [made_up(1, 32, 16, step.model.vocab_size)] * passes
    with _on_lanes(step, lanes):
        peak, seconds = try_update(step, least, max_grad_norm)
        return peak, max(0.0, seconds - _seconds(step, least))


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


def _peak(step: UpdateStep, batches: Sequence[MicroBatch]) -> int:
    """Bytes in use at the peak of the passes over micro-batches."""
    memory.figures(reset_peak=True)
    mx.eval(step.sums(batches, 1))
    return memory.figures(reset_peak=True).peak


def _seconds(step: UpdateStep, batches: Sequence[MicroBatch]) -> float:
    """Seconds of the passes over micro-batches, made a second time."""
    seconds = 0.0
    for _ in range(2):
        started = time.perf_counter()
        mx.eval(step.sums(batches, 1))
        seconds = time.perf_counter() - started
    return seconds


def _kept(step: UpdateStep, blocks: Sequence[int], batch: MicroBatch) -> int:
    """Bytes that the graph of a gradient holds when the loss is computed and the gradient is not."""
    with only(step, blocks):
        before = memory.figures().active
        (loss, correct), gradients = step.uncompiled_sums(batch)
        mx.eval(loss, correct)
        kept = memory.figures().active - before
        del gradients
        step.model.release()
    return kept


@contextmanager
def _on_lanes(step: UpdateStep, count: int) -> Iterator[None]:
    """Let micro-batches go over so many lanes, however small they are."""
    before = step.lanes
    step.lanes = Lanes(2**62)
    step.lanes.count = count
    try:
        yield
    finally:
        step.lanes = before
