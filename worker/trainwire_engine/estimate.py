"""Predicts memory and time of a run from trials, none of which can exhaust the machine.

The trials are the passes over the run's largest micro-batches with few of the model's blocks (`trials`). By them the
peak of whole passes is known, and a prediction is the larger of that and of the peak of the update's end. If that is
harmless and quick, the run's largest update is made, too. On one lane its peak is the run's. On several lanes it is
one of many: they meet otherwise each time, and one update may take two thirds of what another one does. A run makes
many, so the prediction is for the fullest, and stands unless the update took more. Only where not even the few blocks
are harmless, fewer rows or shorter ones are tried, and their peak is taken in proportion: such a run is far from
fitting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import ceil
from typing import Any

import numpy as np

from trainwire_engine import memory, trials
from trainwire_engine.batches import MicroBatch, Order, plan
from trainwire_engine.lanes import Lanes
from trainwire_engine.model import Model
from trainwire_engine.palette import Palette
from trainwire_engine.proposal import Needs, Proposal
from trainwire_engine.shapes import Shapes
from trainwire_engine.step import UpdateStep
from trainwire_engine.trials import at_once, made_up, tried_share, try_finish, try_passes, try_seconds, try_update
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
_PASSES = 3
"""Passes over its micro-batches that a trial for a proposal makes, about."""


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
    dataset: Any,
    order: Order,
    micro_batch_tokens: int,
    updates: int,
    lanes: Lanes,
    shapes: Shapes | Palette | None = None,
    *,
    packing: bool = False,
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
    planned = {u: plan(dataset, order.rows(0, u), micro_batch_tokens, shapes, packing=packing) for u in looked_into}
    padded = {u: _tokens(batches) for u, batches in planned.items()}
    largest = max(planned.values(), key=weight)
    return Sizes(largest, sum(padded[u] for u in spread) / len(spread), max(padded.values()))


def _at_once(lanes: Lanes, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """The largest micro-batches that are in work at the same time, at most: one on each lane."""
    spread, lane_of = lanes.spread(batches)
    return sorted(spread, key=lambda batch: -batch.tokens.size)[: max(lane_of) + 1]


def estimate(
    model: Model,
    step: UpdateStep,
    planned: Callable[[int], Sizes],
    config: Config,
    *,
    steps: int,
    evaluated_tokens: int,
) -> Estimate:
    """Make the trials and predict a run of so many `steps`; `evaluated_tokens` are those of all its evaluations.

    `planned` gives the sizes of the run's updates for a `micro_batch_tokens`.

    Changes the model's weights: for a process that does not train afterwards.
    """
    before = memory.figures(reset_peak=True)
    free = memory.available()
    clip = config.max_grad_norm or None
    sizes = planned(config.micro_batch_tokens or 0)
    lanes = _largest_of_lanes(step.lanes, sizes.largest)
    # The first update makes the optimizer's state what it is from then on.
    end, rest = try_finish(step, sum(map(len, lanes)), len(lanes), clip)
    step.trace_anew()
    held = memory.figures().active
    safe = _safe_tokens(model, free)
    tried = lanes if _tokens(chain(*lanes)) <= safe else _smaller(model, lanes[0][0], safe)
    needs = _needs(step, lanes, tried, end - held)
    per_token = try_seconds(step, list(chain(*tried))) / _tokens(chain(*tried))
    taken, peak = needs.passes, held + needs.bytes
    if taken <= free * _SAFE_SHARE and per_token * _tokens(sizes.largest) <= trials.PATIENCE_S:
        measured, seconds = try_update(step, sizes.largest, clip)
        # Several lanes may meet at a fuller moment another time.
        peak = measured if len(lanes) == 1 else max(peak, measured)
        per_token = max(0.0, seconds - rest) / _tokens(sizes.largest)
    snapshot = _snapshot_bytes(model, step) if _saves_while_training(config, steps) else 0
    update_seconds = per_token * sizes.mean_tokens + rest

    def attempt(lanes: Sequence[Sequence[MicroBatch]], patience: float) -> Needs | None:
        tokens = _tokens(chain(*lanes))
        if tokens > safe or tokens * per_token * tried_share(model) * _PASSES > patience:
            return None
        return _needs(step, lanes, lanes, end - held)

    most = ceil(sizes.most_tokens / len(lanes))
    proposal = Proposal(
        room=(before.active + free) * _USABLE_SHARE - snapshot - held,
        useful=max(256, 1 << (max(most, needs.length) - 1).bit_length()),
        most=most,
        plan=lambda budget: _largest_of_lanes(step.lanes, planned(budget).largest),
        attempt=attempt,
        planned=lanes,
        latest=needs,
    )
    return Estimate(
        peak_bytes=max(before.peak, peak + snapshot),
        available_bytes=before.active + free,
        update_seconds=update_seconds,
        total_seconds=update_seconds * steps + per_token * _FORWARD_SHARE * evaluated_tokens,
        largest_micro_batch_tokens=proposal.find(),
    )


def _tokens(batches: Iterable[MicroBatch]) -> int:
    return sum(batch.tokens.size for batch in batches)


def _largest_of_lanes(lanes: Lanes, batches: Sequence[MicroBatch]) -> list[list[MicroBatch]]:
    """The two largest micro-batches of each lane; more only repeat, as the gradients of one are there in the second."""
    in_order, lane_of = lanes.spread(batches)
    return [[batch for batch, of in zip(in_order, lane_of) if of == lane][:2] for lane in range(max(lane_of) + 1)]


def _safe_tokens(model: Model, free: int) -> int:
    """The tokens over which the passes of a trial are harmless, by a bound."""
    logits = 0 if model.head == "chunked" else 4 * 4 * model.vocab_size
    bound = memory.bytes_per_token(model.model_config) * tried_share(model) + logits
    return int(free * _SAFE_SHARE / bound)


def _smaller(model: Model, batch: MicroBatch, safe: int) -> list[list[MicroBatch]]:
    """A micro-batch of fewer rows, or of shorter ones, that has no more tokens than are safe."""
    rows, length = batch.tokens.shape
    # Trained positions go through the head in chunks: with as many as there are, its memory is that of the run.
    positions = batch.positions.size
    rows, length = max(1, min(rows, safe // length)), min(length, max(32, safe // 32 * 32))
    return [[made_up(rows, length, min(positions, rows * length), model.vocab_size)]]


def _needs(
    step: UpdateStep, lanes: Sequence[Sequence[MicroBatch]], tried: Sequence[Sequence[MicroBatch]], end: int
) -> Needs:
    """What micro-batches take of each lane, from those that are `tried`: themselves, or smaller ones."""
    grows = _tokens(chain(*lanes)) / _tokens(chain(*tried))
    found = try_passes(step, tried)
    return Needs(
        length=lanes[0][0].tokens.shape[1],
        tokens=lanes[0][0].tokens.size,
        passes=round(at_once(found) * grows),
        kept=round(sum(lane.kept for lane in found) * grows),
        end=end,
        # A lane with a second pass holds the gradients of its first.
        again=sum(leaf.nbytes for leaf in step.model.trainable.values()) * sum(len(lane) == 1 for lane in lanes),
    )


def _saves_while_training(config: Config, steps: int) -> bool:
    return 0 < config.save_every < steps


def _snapshot_bytes(model: Model, step: UpdateStep) -> int:
    """What a checkpoint that is being written keeps of the update it was taken after."""
    return sum(leaf.nbytes for leaf in (*model.trainable.values(), *step.state.values()))
