"""What the shapes of micro-batches cost on a CUDA card, by the costs in `trainwire_engine.shapes`; needs no card.

`python -m benchmarks.shapes` makes the micro-batches of an epoch of chat rows of log-normal lengths, in the shapes
chosen for the run and on the grid of shapes that is the same for every run, and prints a table.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
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
        rows, length = shape.attention or (shape.rows, shape.length)
        tokens = shape.rows * shape.length
        computed, slots = computed + tokens, slots + rows * length
        cost += costs.once + tokens * (1 - costs.position) + shape.positions * costs.position
        cost += costs.attention(rows, length)
    met = len(set(shapes))
    return Figures(
        met, len(shapes) / len(updates), 1 - real / computed, slots / real, cost / real, (cost + met * costs.new) / real
    )


def lines(count: int, batch_size: int, *, packing: bool) -> Iterator[str]:
    """The table's lines for an epoch of so many rows."""
    rows, order = ChatRows(count), Order(count, batch_size, seed=0)
    config: Any = SimpleNamespace(batch_size=batch_size, micro_batch_tokens=BUDGET, packing=packing)
    started = time.process_time()
    chosen = shapes_of_run(rows, order, config, order.updates_per_epoch, device=CUDA)
    seconds = time.process_time() - started
    updates = [sizes(rows, order.rows(0, update)) for update in range(order.updates_per_epoch)]
    real = sum(int(update.sizes.sum()) for update in updates)
    for name, policy in (("chosen", chosen), ("grid", CUDA)):
        started = time.process_time()
        found = figures([policy.cuts(update, BUDGET, packing=packing) for update in updates], real)
        each = (time.process_time() - started) / len(updates) * 1000
        took = f"{seconds:.1f} s, {each:.1f} ms" if policy is chosen else f"{each:.1f} ms"
        yield (
            f"| {'packed' if packing else 'apart'} | {count:,} | {batch_size} | {name} | {found.shapes} |"
            f" {found.passes:.1f} | {found.padding:.0%} | {found.slots:.1f} | {found.cost:.2f} |"
            f" {found.cost_with_new_shapes:.2f} | {took} |"
        )


if __name__ == "__main__":
    print(
        "| rows are | rows | an update | shapes | number | passes an update | padding | slots of attention a token |",
        end="",
    )
    print(" tokens' time a token | and new shapes | planning |\n" + "|---" * 11 + "|")
    for packing in (False, True):
        for count in (2_000, 20_000):
            for batch_size in (8, 16, 64, 256):
                for line in lines(count, batch_size, packing=packing):
                    print(line, flush=True)
