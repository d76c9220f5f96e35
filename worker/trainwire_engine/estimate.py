"""Predicts memory and time of a run from trials, none of which can exhaust the machine.

The trials are the passes over the run's largest micro-batches with few of the model's blocks (`trials`). By them the
peak of whole passes is known. If that is harmless and quick, the run's largest update is made, and its peak is the
run's. If it is not, the prediction stands, which is the larger of the passes' peak and that of the update's end. Only
where not even the few blocks are harmless, fewer rows or shorter ones are tried, and their peak is taken in proportion:
such a run is far from fitting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from trainwire_engine import memory, trials
from trainwire_engine.batches import MicroBatch, Order, plan
from trainwire_engine.lanes import Lanes
from trainwire_engine.model import Model
from trainwire_engine.step import UpdateStep
from trainwire_engine.trials import made_up, tried_share, try_finish, try_passes, try_update
from trainwire_protocol.config import Config

_SAFE_SHARE = 0.5
"""Share of the free memory that a trial may take by the bound on it."""
_USABLE_SHARE = 0.85
"""Share of the memory that a run may be told to fill."""
_UPDATES = 10_000
"""Updates of the first epoch whose lengths are looked at."""
_ROWS, _EXTREMES = 4096, 8
"""Rows whose updates are planned as a sample of the epoch, and updates with the most tokens or the longest rows."""
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
        live = _at_once(lanes, batches)
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


def _at_once(lanes: Lanes, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
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
    clip = config.max_grad_norm or None
    held = before.active + sum(leaf.nbytes for leaf in model.trainable.values())
    in_order, lane_of = step.lanes.spread(sizes.largest)
    # More than two on a lane only repeat: the gradients of one are there while the second is made.
    together = sorted(in_order, key=lambda batch: -batch.tokens.size)[: 2 * (max(lane_of) + 1)]
    tried = _harmless(model, together, free)
    grows = _tokens(together) / _tokens(tried)
    found = try_passes(step, tried, min(len(tried), max(lane_of) + 1), held)
    end, rest = try_finish(step, len(together), clip)
    peak = max(held + round((found.peak - held) * grows), end)
    per_token = found.seconds / _tokens(tried)
    if peak - held <= free * _SAFE_SHARE and per_token * _tokens(sizes.largest) <= trials.PATIENCE_S:
        peak, seconds = try_update(step, sizes.largest, clip)
        per_token = max(0.0, seconds - rest) / _tokens(sizes.largest)
    snapshot = _snapshot_bytes(model, step) if _saves_while_training(config, steps) else 0
    update_seconds = per_token * sizes.mean_tokens + rest
    return Estimate(
        peak_bytes=max(before.peak, peak + snapshot),
        available_bytes=before.active + free,
        update_seconds=update_seconds,
        total_seconds=update_seconds * steps + per_token * _FORWARD_SHARE * evaluated_tokens,
        largest_micro_batch_tokens=_largest_that_fits(
            (before.active + free) * _USABLE_SHARE - snapshot - held,
            peak - held,
            round(found.kept * found.together * grows),
            together[0].tokens.shape,
            ceil(sizes.most_tokens / (max(lane_of) + 1)),
        ),
    )


def _tokens(batches: Sequence[MicroBatch]) -> int:
    return sum(batch.tokens.size for batch in batches)


def _harmless(model: Model, batches: list[MicroBatch], free: int) -> list[MicroBatch]:
    """The micro-batches themselves, if the passes of a trial over them are harmless by a bound, else smaller ones."""
    logits = 0 if model.head == "chunked" else 4 * 4 * model.vocab_size
    bound = memory.bytes_per_token(model.model_config) * tried_share(model) + logits
    safe = int(free * _SAFE_SHARE / bound)
    if _tokens(batches) <= safe:
        return batches
    rows, length = batches[0].tokens.shape
    # Trained positions go through the head in chunks: with as many as there are, its memory is that of the run.
    positions = batches[0].positions.size
    rows, length = max(1, min(rows, safe // length)), min(length, max(32, safe // 32 * 32))
    return [made_up(rows, length, min(positions, rows * length), model.vocab_size)]


def _saves_while_training(config: Config, steps: int) -> bool:
    return 0 < config.save_every < steps


def _snapshot_bytes(model: Model, step: UpdateStep) -> int:
    """What a checkpoint that is being written keeps of the update it was taken after."""
    return sum(leaf.nbytes for leaf in (*model.trainable.values(), *step.state.values()))


def _largest_that_fits(room: float, taken: int, kept: int, shape: tuple[int, ...], most_tokens: int) -> int | None:
    """The largest power of two for `micro_batch_tokens`, not above what any update can use.

    Of the `taken` bytes of a micro-batch of this shape, `kept` grow and shrink with its tokens; the rest is taken to
    grow likewise but not to shrink. A row goes alone if it must.
    """
    rows, length = shape
    now = rows * length

    def takes(tokens: int) -> float:
        share = max(length, min(tokens, max(most_tokens, now))) / now
        return kept * share + (taken - kept) * max(1.0, share)

    if takes(length) > room:
        return None
    useful = max(256, 1 << (max(most_tokens, length) - 1).bit_length())
    fitting = [1 << power for power in range(5, 18) if takes(1 << power) <= room]
    return min(fitting[-1], useful) if fitting else None
