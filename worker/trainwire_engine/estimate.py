"""Predicts memory and time of a run from two trial updates, neither of which can exhaust the machine.

The first trial is a small part of the run's largest micro-batch. What it took bounds what the largest update can
take: if that is harmless and quick, the second trial is that update, and its peak is the run's. If not, the second
is twice the first, and the rest is extrapolated: over rows in a straight line, over the length of one row in a
parabola, since attention may grow with its square.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

import mlx.core as mx
import numpy as np

from trainwire_engine import memory
from trainwire_engine.batches import MicroBatch, Order, plan, single
from trainwire_engine.cpu_ops import as_if_large
from trainwire_engine.lanes import Lanes
from trainwire_engine.model import Model
from trainwire_engine.step import UpdateStep
from trainwire_protocol.config import Config

PATIENCE_S = 10.0
"""Seconds that the second trial may take."""
_SAFE_SHARE = 0.5
"""Share of the free memory that a trial may take by the bound on it."""
_USABLE_SHARE = 0.85
"""Share of the memory that a run may be told to fill."""
_UPDATES = 10_000
"""Updates of the first epoch whose lengths are looked at."""
_ROWS, _EXTREMES = 4096, 8
"""Rows whose updates are planned as a sample of the epoch, and updates with the most tokens or the longest rows."""
_CHUNKS = 256
"""Trained positions that fill the chunks of the head on each lane."""
_FORWARD_SHARE = 0.35
"""Time of a forward pass as a share of forward and backward."""


@dataclass(frozen=True)
class Estimate:
    """Bytes and seconds. `update_seconds` is that of a mean update after the first, `total_seconds` includes the
    evaluations; `largest_micro_batch_tokens` is None if not even the longest row fits."""

    peak_bytes: int
    available_bytes: int
    update_seconds: float
    total_seconds: float
    largest_micro_batch_tokens: int | None


@dataclass(frozen=True)
class Sizes:
    """What the updates of a run are like: the largest one, and their mean padded tokens."""

    largest: list[MicroBatch]
    mean_tokens: float
    most_tokens: int


def sizes(
    dataset: Any, order: Order, micro_batch_tokens: int, updates: int, lanes: Lanes, *, packing: bool = False
) -> Sizes:
    """Find the largest update among the first epoch's, and their mean, from those with the longest rows, those with
    the most tokens, and a sample that is spread over the epoch."""

    def weight(batches: Sequence[MicroBatch]) -> tuple[int, int, int]:
        """Rank an update by what is in memory at the same time: padded tokens, then trained positions."""
        live = _together(lanes, batches)
        positions = sum(batch.positions.size for batch in live)
        return _tokens(live), positions, _tokens(batches)

    count = max(1, min(updates, order.updates_per_epoch))
    looked_at = max(8, _ROWS // len(order.rows(0, 0)))
    spread = np.unique(np.linspace(0, count - 1, min(count, looked_at)).astype(int)).tolist()
    lengths = [dataset.lengths[order.rows(0, update)] for update in range(min(count, _UPDATES))]
    longest = sorted(range(len(lengths)), key=lambda update: -int(lengths[update].max()))[:_EXTREMES]
    fullest = sorted(range(len(lengths)), key=lambda update: -int(lengths[update].sum()))[:_EXTREMES]
    looked_into = {*spread, *longest, *fullest}
    planned = {u: plan(dataset, order.rows(0, u), micro_batch_tokens, packing=packing) for u in looked_into}
    padded = {u: _tokens(batches) for u, batches in planned.items()}
    largest = max(planned.values(), key=weight)
    return Sizes(largest, sum(padded[u] for u in spread) / len(spread), max(padded.values()))


def _together(lanes: Lanes, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """The largest micro-batches that are in work at the same time, at most: one on each lane."""
    spread, lane_of = lanes.spread(batches)
    return sorted(spread, key=lambda batch: -batch.tokens.size)[: max(lane_of) + 1]


def estimate(
    model: Model, step: UpdateStep, sizes: Sizes, config: Config, *, steps: int, evaluated_tokens: int
) -> Estimate:
    """Make the trials and predict a run of so many `steps`; `evaluated_tokens` are those of all its evaluations.

    Changes the model's weights: for a process that does not train afterwards.
    """
    before = memory.figures(reset_peak=True)
    free = memory.available()
    held = before.active + sum(leaf.nbytes for leaf in model.trainable.values())
    together = _together(step.lanes, sizes.largest)
    live, count = _tokens(together), len(together)
    rows, length = together[0].tokens.shape
    positions = max(batch.positions.size for batch in together)
    small_rows, small_length = _small(model, rows, length, positions, free // count)
    # As many trained positions as it can have: the head takes them in chunks, and its memory does not grow with rows.
    positions = min(positions, small_rows * small_length)
    first = [_part(small_rows, small_length, positions, model.vocab_size)] * count
    entries = 0 if config.packing else rows * length * length * int(model.model_config.get("num_attention_heads", 1))
    grows = live / _tokens(first)
    with _as_in_large(step, entries, grows):
        low, low_seconds = _measure(step, first)
    finish, update_seconds = _update(step, first, config)
    rest = max(0.0, update_seconds - low_seconds)
    bound = (low - held) * grows * (1 if length == small_length else grows)
    if bound <= free * _SAFE_SHARE and low_seconds * grows <= PATIENCE_S:
        peak, seconds = _update(step, sizes.largest, config)
        per_token = max(0.0, seconds - rest) / _tokens(sizes.largest)
    else:
        twice_rows, twice_length = (2 * small_rows, length) if length == small_length else (1, 2 * small_length)
        second = [_part(twice_rows, twice_length, positions, model.vocab_size)] * count
        with _as_in_large(step, entries, grows):
            high, seconds = _measure(step, second)
        points = [(0, held), (_tokens(first), low), (_tokens(second), high)]
        peak = _extrapolate(points, live, None if length == small_length else count * length)
        per_token = seconds / _tokens(second)
    kept = _snapshot_bytes(model, step) if _saves_while_training(config, steps) else 0
    update_seconds = per_token * sizes.mean_tokens + rest
    return Estimate(
        peak_bytes=max(before.peak, peak + kept, finish + kept),
        available_bytes=before.active + free,
        update_seconds=update_seconds,
        total_seconds=update_seconds * steps + per_token * _FORWARD_SHARE * evaluated_tokens,
        largest_micro_batch_tokens=_largest_that_fits(
            (before.active + free) * _USABLE_SHARE - kept - held,
            max(peak - held, 1) / live,
            length,
            live / (rows * length),
            sizes.most_tokens,
        ),
    )


def _tokens(batches: Sequence[MicroBatch]) -> int:
    return sum(batch.tokens.size for batch in batches)


@contextmanager
def _as_in_large(step: UpdateStep, entries: int, grows: float) -> Iterator[None]:
    """Let small trials compute as an update does that has so many times their tokens: attention keeps or drops its
    probabilities as in a matrix of `entries`, and as many lanes are in use."""
    before = step.lanes
    step.lanes = Lanes(ceil(step.model.total_parameters * grows))
    try:
        with as_if_large(entries):
            yield
    finally:
        step.lanes = before


def _small(model: Model, rows: int, length: int, positions: int, free: int) -> tuple[int, int]:
    """Rows and length of the first trial: a quarter of the rows, or of a single row, and within what is safe; up to
    half of them if it takes so many to fill the chunks of the head."""
    logits = 0 if model.head == "chunked" else 4 * 4 * model.vocab_size
    safe = int(free * _SAFE_SHARE / (memory.bytes_per_token(model.model_config) + logits))
    if rows >= 2 and length <= safe:
        filling = min(-(-min(positions, _CHUNKS) // length), rows // 2)
        return max(1, min(max(rows // 4, filling), safe // length)), length
    return 1, max(32, min(length // 4, safe) // 32 * 32)


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


def _part(rows: int, length: int, positions: int, vocabulary: int) -> MicroBatch:
    """Make up a micro-batch of a shape, with at least so many trained positions."""
    return single(_MadeUpRows(length, -(-positions // rows), vocabulary), range(rows))


def _measure(step: UpdateStep, batches: Sequence[MicroBatch]) -> tuple[int, float]:
    """Peak bytes and seconds of the passes over micro-batches; the seconds are those of a second time."""
    memory.figures(reset_peak=True)
    seconds = 0.0
    for _ in range(2):
        started = time.perf_counter()
        mx.eval(step.sums(batches, 1))
        seconds = time.perf_counter() - started
    return memory.figures(reset_peak=True).peak, seconds


def _update(step: UpdateStep, batches: Sequence[MicroBatch], config: Config) -> tuple[int, float]:
    """Peak bytes and seconds of whole updates: new weights and a new state exist beside the old ones."""
    memory.figures(reset_peak=True)
    seconds = 0.0
    begun = time.perf_counter()
    for number in (1, 2, 3):
        if number == 3 and time.perf_counter() - begun > PATIENCE_S:
            break
        started = time.perf_counter()
        step(batches, step=number, learning_rate=0.0, max_grad_norm=config.max_grad_norm or None)
        seconds = time.perf_counter() - started
    return memory.figures(reset_peak=True).peak, seconds


def _extrapolate(points: Sequence[tuple[int, int]], tokens: int, longer: int | None) -> int:
    """Follow the trials' tokens and peaks to so many tokens, in rows as long, or so much longer that all the lanes
    would hold `longer` tokens."""
    tokens_of, peaks = [float(t) for t, _ in points], [float(p) for _, p in points]
    (_, t1, t2), (nothing, p1, p2) = tokens_of, peaks
    line = p2 + (p2 - p1) / (t2 - t1) * ((longer or tokens) - t2)
    if longer is None:
        return round(line)
    full = max(line, float(np.polyval(np.polyfit(tokens_of, peaks, 2), longer)))
    return round(nothing + (full - nothing) * tokens / longer)


def _saves_while_training(config: Config, steps: int) -> bool:
    return 0 < config.save_every < steps


def _snapshot_bytes(model: Model, step: UpdateStep) -> int:
    """What a checkpoint that is being written keeps of the update it was taken after."""
    return sum(leaf.nbytes for leaf in (*model.trainable.values(), *step.state.values()))


def _largest_that_fits(room: float, per_token: float, longest: int, together: float, most_tokens: int) -> int | None:
    """The largest power of two for `micro_batch_tokens`, not above what any update can use.

    `together` micro-batches are in work at the same time; a row of `longest` tokens goes alone if it must.
    """
    if longest * per_token > room:
        return None
    useful = max(256, 1 << (max(most_tokens, longest) - 1).bit_length())
    fitting = [1 << power for power in range(5, 18) if (1 << power) * together * per_token <= room]
    return min(fitting[-1], useful) if fitting else None
