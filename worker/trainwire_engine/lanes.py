"""Several micro-batches at once on a CPU: each on a stream of its own with a BLAS of one thread.

MLX's CPU backend runs a stream's operations one after another; only products use more cores, and only if their
BLAS does. Two micro-batches on two streams keep two cores busy in everything, and no thread waits in a loop for
another. An update too small to be worth a second stream runs on one; a single large micro-batch gets a BLAS with
all cores. On GPUs there is one lane.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from trainwire_engine import native
from trainwire_engine.batches import MicroBatch, split
from trainwire_engine.fastmath import on_cpu

WORTH = 2**28
"""Weights times padded tokens from which a micro-batch is worth a lane: some ten milliseconds."""


class Lanes:
    """The streams of this process and which micro-batch goes where; the same for the same sizes."""

    def __init__(self, weights: int) -> None:
        self._weights = weights
        self.streams = _streams(native.lanes()) if on_cpu() else [mx.default_stream(mx.default_device())]

    def spread(self, micro_batches: Sequence[MicroBatch]) -> tuple[list[MicroBatch], list[int]]:
        """Cut micro-batches further if lanes would stay empty; returns them with the lane of each.

        Sets the threads of the BLAS: the cores that are left to each lane.
        """
        if len(self.streams) == 1:
            return list(micro_batches), [0] * len(micro_batches)
        batches = sorted(micro_batches, key=lambda batch: -batch.tokens.size)
        work = self._weights * sum(batch.tokens.size for batch in batches)
        lanes = max(1, min(len(self.streams), work // WORTH))
        while len(batches) < lanes and batches[0].tokens.shape[0] > 1:
            batches = sorted([*split(batches[0], 2), *batches[1:]], key=lambda batch: -batch.tokens.size)
        used = min(lanes, len(batches))
        native.use_threads(max(1, len(self.streams) // used) if lanes > 1 else 1)
        loads, lane_of = [0] * used, []
        for batch in batches:
            lane_of.append(loads.index(min(loads)))
            loads[lane_of[-1]] += batch.tokens.size
        return batches, lane_of


def stay_on_one_lane(weights: int, tokens: int) -> None:
    """Set the threads of the BLAS for passes outside an update, by the size of one alone.

    Left as the update before had set them, an evaluation's last bits would depend on whether one was made since
    the process began.
    """
    native.use_threads(native.lanes() if weights * tokens // WORTH > 1 else 1)


@functools.cache
def _streams(count: int) -> list[Any]:
    return [mx.default_stream(mx.cpu), *(mx.new_stream(mx.cpu) for _ in range(count - 1))]
