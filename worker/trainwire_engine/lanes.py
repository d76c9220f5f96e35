"""Several micro-batches at once on a CPU: each on a lane, a thread with a stream of its own and a BLAS of one thread.

MLX's CPU backend runs a stream's operations one after another; only products use more cores, and only if their
BLAS does. Two micro-batches on two streams keep two cores busy in everything, and no thread waits in a loop for
another. An update too small to be worth a second lane runs on one; a single large micro-batch gets a BLAS with
all cores. On GPUs there is one lane.

A lane is a thread because MLX makes the one that hands out work wait while about a hundred operations are open: one
thread would hand a second stream its first operation when the first stream is nearly through. Each lane may have
that many (`open_tasks`), and hands out its passes in pieces (`pieces`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from trainwire_engine import native, open_tasks
from trainwire_engine.batches import MicroBatch, split
from trainwire_engine.fastmath import on_cpu
from trainwire_engine.shapes import policy

Result = TypeVar("Result")

WORTH = 2**25
"""Weights times padded tokens from which a micro-batch is worth a lane: some ten milliseconds."""

THREADS = 2**28
"""Weights times padded tokens from which the products of a pass are worth several threads of the BLAS."""


class Lanes:
    """How many lanes there are and which micro-batch goes where; the same for the same sizes."""

    def __init__(self, weights: int) -> None:
        self._weights = weights
        self.count = native.lanes() if on_cpu() else 1
        if self.count > 1:
            open_tasks.allow(self.count)

    def spread(self, micro_batches: Sequence[MicroBatch]) -> tuple[list[MicroBatch], list[int]]:
        """Cut micro-batches further if lanes would stay empty, or would wait for another; returns them with the lane
        of each.

        Sets the threads of the BLAS: the cores that are left to each lane.
        """
        if self.count == 1:
            return list(micro_batches), [0] * len(micro_batches)
        batches = _falling(micro_batches)
        work = self._weights * sum(batch.tokens.size for batch in batches)
        lanes = max(1, min(self.count, work // WORTH))
        while len(batches) < lanes and (rows := batches[0].tokens.shape[0]) > 1:
            batches = _falling([*split(batches[0], (rows + 1) // 2), *batches[1:]])
        used = min(lanes, len(batches))
        native.use_threads(max(1, self.count // used) if work // THREADS > 1 else 1)
        return _balanced(batches, used, max(policy().pass_cost, WORTH // max(1, self._weights)))


def _balanced(batches: list[MicroBatch], lanes: int, pass_cost: int) -> tuple[list[MicroBatch], list[int]]:
    """Cut rows off the largest micro-batch of the fullest lane as long as that lets the last lane end sooner."""
    lane_of, loads = _dealt(batches, lanes, pass_cost)
    while (excess := max(loads) - sum(loads) / lanes) > pass_cost:
        fullest = loads.index(max(loads))
        at = next((i for i, batch in enumerate(batches) if lane_of[i] == fullest and batch.tokens.shape[0] > 1), None)
        if at is None:
            break
        rows, length = batches[at].tokens.shape
        kept = min(rows - 1, max(1, rows - round((excess - pass_cost / lanes) / length)))
        finer = _falling([*batches[:at], *split(batches[at], kept), *batches[at + 1 :]])
        dealt, levelled = _dealt(finer, lanes, pass_cost)
        if max(levelled) >= max(loads):
            break
        batches, lane_of, loads = finer, dealt, levelled
    return batches, lane_of


def _dealt(batches: Sequence[MicroBatch], lanes: int, pass_cost: int) -> tuple[list[int], list[int]]:
    """Give falling micro-batches each to the lane with the least to do; returns the lane of each, and the lanes' loads
    in padded tokens."""
    loads, lane_of = [0] * lanes, []
    for batch in batches:
        lane_of.append(loads.index(min(loads)))
        loads[lane_of[-1]] += batch.tokens.size + pass_cost
    return lane_of, loads


def _falling(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    return sorted(batches, key=lambda batch: -batch.tokens.size)


def in_pieces(weights: int, batch: MicroBatch) -> bool:
    """Tell whether a pass takes long enough to be handed out in pieces."""
    return on_cpu() and weights * batch.tokens.size >= WORTH


def stay_on_one_lane(weights: int, tokens: int) -> None:
    """Set the threads of the BLAS for passes outside an update, by the size of one alone.

    Left as the update before had set them, an evaluation's last bits would depend on whether one was made since
    the process began.
    """
    native.use_threads(native.lanes() if weights * tokens // THREADS > 1 else 1)


def together(work: Callable[[int], Result], lanes: int) -> list[Result]:
    """Do the work of so many lanes at the same time, the first one in this thread; gives their results in order.

    Raises the first lane's error, else another's, when all have ended.
    """
    others = [_threads.submit(work, lane) for lane in range(1, lanes)]
    try:
        first = work(0)
    finally:
        wait(others)
    return [first, *(other.result() for other in others)]


_threads = ThreadPoolExecutor(max_workers=1024, thread_name_prefix="lane")
