"""What the shapes of micro-batches cost on a CUDA card, by the costs in `trainwire_engine.shapes`; needs no card.

`python -m benchmarks.shapes` makes the micro-batches of an epoch of chat rows of log-normal lengths, in the shapes
chosen for the run and on the grid of shapes that is the same for every run, and prints a table.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from trainwire_engine.batches import Order, sizes
from trainwire_engine.feed import shapes_of_run
from trainwire_engine.forms import Cut
from trainwire_engine.shapes import CUDA

BUDGET = 16_384


class ChatRows:
    """Rows of log-normal lengths, three quarters of each trained."""

    def __init__(self, count: int) -> None:
        self.lengths = np.clip(np.exp(np.random.default_rng(7).normal(5.4, 0.9, count)), 16, 1900).astype(int)
        self.trained = self.lengths - np.maximum(1, self.lengths // 4)

    def __len__(self) -> int:
        return len(self.lengths)

    def mask(self, row: int) -> np.ndarray:
        return np.arange(self.lengths[row]) >= self.lengths[row] - self.trained[row]


@dataclass(frozen=True)
class Figures:
    """What an epoch is made of: shapes, micro-batches, padding, slots of attention and cost, each for a real token."""

    shapes: int
    passes: float
    padding: float
    slots: float
    cost: float
    cost_with_new_shapes: float


def figures(updates: list[list[Cut]], real: int) -> Figures:
    """Sum an epoch up."""
    costs = CUDA.costs
    assert costs is not None
    shapes = [cut.shape for cuts in updates for cut in cuts]
    computed, slots, cost = 0, 0, 0.0
    for shape in shapes:
        groups = shape.groups or ((shape.rows, shape.length),)
        tokens = shape.rows * shape.length
        computed, slots = computed + tokens, slots + sum(rows * length for rows, length in groups)
        cost += costs.once + tokens * (1 - costs.position) + shape.positions * costs.position
        cost += sum(costs.attention(*group) for group in groups) + costs.group * (len(groups) - 1)
    met = len(set(shapes))
    return Figures(
        met, len(shapes) / len(updates), 1 - real / computed, slots / real, cost / real, (cost + met * costs.new) / real
    )


def line(count: int, batch_size: int, *, packing: bool) -> str:
    """The table's line for an epoch of so many rows."""
    rows, order = ChatRows(count), Order(count, batch_size, seed=0)
    config: Any = SimpleNamespace(batch_size=batch_size, micro_batch_tokens=BUDGET, packing=packing)
    started = time.process_time()
    chosen = shapes_of_run(rows, order, config, order.updates_per_epoch, device=CUDA)
    seconds = time.process_time() - started
    updates = [sizes(rows, order.rows(0, update)) for update in range(order.updates_per_epoch)]
    real = sum(int(update.sizes.sum()) for update in updates)
    started = time.process_time()
    cuts = [chosen.cuts(update, BUDGET, packing=packing) for update in updates]
    each = (time.process_time() - started) / len(updates) * 1000
    ours = figures(cuts, real)
    grid = figures([CUDA.cuts(update, BUDGET, packing=packing) for update in updates], real)
    return (
        f"| {count:,}{', `packing`' if packing else ''} | {batch_size} | {ours.shapes} / {grid.shapes} |"
        f" {ours.passes:.1f} / {grid.passes:.1f} | {100 * ours.padding:.0f} / {100 * grid.padding:.0f} % |"
        f" {ours.slots:.1f} / {grid.slots:.1f} | {ours.cost:.2f} / {grid.cost:.2f} |"
        f" {ours.cost_with_new_shapes:.2f} / {grid.cost_with_new_shapes:.2f} | {seconds:.1f} s, {each:.1f} ms |"
    )


if __name__ == "__main__":
    print("| rows | an update | shapes: chosen / grid | micro-batches an update | padding", end="")
    print(" | slots of attention a token | time a token | with that of new shapes | planning |\n" + "|---" * 9 + "|")
    for packing in (False, True):
        for count in (2_000, 20_000):
            for batch_size in (8, 16, 64, 256):
                print(line(count, batch_size, packing=packing), flush=True)
