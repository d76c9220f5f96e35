"""Which shapes micro-batches may have: decided by what a pass and a new shape cost on the device.

A micro-batch is rows × length, with some of its positions trained. Padding computes nothing of use; a pass has a
cost of its own, whatever its size; and a compiled step is traced again for every new shape.

- CPU: the step is not compiled, so there may be any number of shapes. Lengths and trained positions go up in steps of
  8, whole vectors of the processor, lengths from 512 on in 32nds of a power of two; rows are as many as there are. A
  pass more costs as much as 64 padded tokens (measured with 2 million weights; some 45 with 135 million).
- CUDA: the passes of a run's updates are recorded when a shape is met first, and played back later. Their shapes are
  chosen for the run's own rows (`palette`) by `costs`, measured on an H200 with Qwen3 0.6B and LoRA: a pass takes 9
  ms and 6.4 µs for each token, a fifth of which is the head's; a slot of attention 0.73 µs and 1 µs for each 1,024
  tokens of the length; a new shape 0.45 s. Recordings share their memory, but each takes some: 24 shapes at most.
  Attention's fused gradient wants lengths in multiples of 128; MLX makes all scores where they are not. Of packed
  rows it works in up to four groups of rows of one length; a group more is launches for 0.3 ms more.
- CUDA, what is not recorded (evaluations, and rows that no shape of the run holds): the host takes 70 to 100 ms to
  hand over a pass of 28 blocks with adapters, while the card computes 9,000 tokens. So lengths are powers of two from
  256 on, rows are powers of two, a micro-batch is filled up to a quarter of `micro_batch_tokens`, and half or all of
  its positions are trained. Of packed rows attention gets two, four or eight times as many slots as there are tokens.
- Metal: nothing is measured yet. Tracing is as dear as on CUDA but computing is slower, so padding weighs more:
  lengths in quarters and rows in halves of a power of two, positions in quarters.

The head runs over chunks of positions. On a CPU 32 MB of logits stay near the cache; on a GPU every chunk adds to
the graph, and products of 4,096 positions use the card: as many as fit into a 48th of its memory, at most 4,096.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np

from trainwire_engine import memory
from trainwire_engine.cuts import Cost, Cuts
from trainwire_engine.forms import Apart, Costs, Cut, Form, Rows, Shape
from trainwire_engine.packed import Packed


@dataclass(frozen=True)
class Shapes:
    """A policy. Lengths, rows and positions are rounded up to grids of `step` (rows: 1), wider where a power of two, or
    of positions the micro-batch, divided by its `parts` is more.

    `filled` is the share of the budget, as 1 / filled, that rows of padding fill at least (0: none); `pass_cost` is
    in padded tokens, and a pass takes as long as one of `least_pass`; `chunk_bytes` is what the float32 logits of a
    chunk of the head may take; `slots` are the multiples of a flat row that attention may be padded to (none: any).
    `costs` are those of recorded passes, where there are any.
    """

    length_step: int
    length_parts: int
    row_parts: int
    position_step: int
    position_parts: int
    filled: int
    pass_cost: int
    chunk_bytes: int
    chunk_most: int = 2**20
    flat_grid: tuple[int, int] = (64, 8)
    least_pass: int = 0
    slots: tuple[int, ...] = ()
    costs: Costs | None = None

    def length(self, length: int) -> int:
        """The padded length of a row."""
        return _up(length, self.length_step, self.length_parts)

    def rows(self, rows: int, length: int, budget: int) -> int:
        """The padded number of rows of a micro-batch of a padded length."""
        least = budget // self.filled // length if self.filled else 1
        return max(_up(rows, 1, self.row_parts), least)

    def positions(self, trained: int, area: int) -> int:
        """The padded number of trained positions in a micro-batch of so many positions."""
        step = max(self.position_step, area // self.position_parts if self.position_parts else 0)
        return -(-trained // step) * step

    def chunk(self, vocabulary: int, positions: int) -> int:
        """Positions of one chunk of the head: a power of two, never below 64 if there are as many."""
        fitting = max(64, self.chunk_bytes // 4 // vocabulary)
        return min(positions, self.chunk_most, 1 << (fitting.bit_length() - 1))

    def flat(self, tokens: int) -> int:
        """The padded length of a flat row of packed examples."""
        return _up(tokens, *self.flat_grid)

    def packed_rows(self, rows: int, length: int, flat: int) -> int:
        """The padded number of rows of attention for a flat row of packed examples."""
        return int(self._attention_rows(np.array([rows]), np.array([length]), np.array([flat]))[0])

    def _attention_rows(self, rows: Any, lengths: Any, flat: Any) -> Any:
        padded = np.array([self.rows(int(count), 1, 0) for count in rows])
        for multiple in reversed(self.slots):
            fitting = flat * multiple // lengths
            padded = np.where(fitting >= rows, fitting, padded)
        return padded

    def shape(self, rows: Rows, budget: int, *, packing: bool = False) -> Shape:
        """The shape of one micro-batch of all rows."""
        length, trained = self.length(int(rows.sizes[0])), int(rows.trained.sum())
        if not packing:
            count = self.rows(len(rows), length, budget)
            return Shape(count, length, self.positions(trained, count * length))
        flat = self.flat(int(rows.sizes.sum()))
        return Shape(1, flat, self.positions(trained, flat), ((self.packed_rows(len(rows), length, flat), length),))

    def cuts(self, rows: Rows, budget: int, *, packing: bool = False) -> list[Cut]:
        """Cut rows into micro-batches of least cost, each within the budget unless it is a single row.

        The cost is the sum of the padded tokens and of `pass_cost` for each. Of packed rows a slot of attention, which
        is padded, counts as 0.08 of a token and a tenth more for every 1,000 of the length: what it takes of a layer of
        Qwen3 0.6B.
        """
        cuts = []
        for start, end in self._ways(rows, budget, packing=packing).spans():
            part = Rows(rows.sizes[start:end], rows.trained[start:end])
            cuts.append(Cut(start, end, self.shape(part, budget, packing=packing)))
        return cuts

    def form(self, budget: int, sizes: np.ndarray, groups: int | None = None, *, packing: bool) -> Form:
        """What recorded micro-batches of rows of such sizes need and cost; for a device that has `costs`."""
        assert self.costs is not None
        if not packing:
            return Apart(self.costs, budget)
        return Packed(self.costs, budget, sizes, groups or self.costs.groups)

    def shares(self, rows: Rows, budget: int, count: int, *, packing: bool = False) -> list[tuple[int, int]]:
        """Divide rows into so many spans, some perhaps empty; the dearest costs as little as it can.

        Rows of like length stay together, so that a share needs hardly more passes and padding than it is of the
        whole: rows dealt out one by one cost up to a tenth more on a GPU.
        """
        if self.costs is None or not len(rows):
            return self._ways(rows, budget, packing=packing).divide(count)
        return self.form(budget, rows.sizes, packing=packing).cuts(rows).divide(count)

    def _ways(self, rows: Rows, budget: int, *, packing: bool) -> Cuts:
        sizes = rows.sizes.tolist()
        cost = self._packed_cost(sizes, budget) if packing else self._cost([*map(self.length, sizes)], budget)
        return Cuts(len(rows), budget, cost)

    def _cost(self, lengths: Sequence[int], budget: int) -> Cost:
        padded = np.array(lengths, np.int64)
        rows = np.array([self.rows(count, 1, 0) for count in range(len(lengths) + 1)])
        least = np.array([self.rows(1, length, budget) for length in lengths])

        def cost(end: int) -> tuple[Any, Any]:
            sizes = padded[:end] * np.maximum(rows[end:0:-1], least[:end])
            return sizes, np.maximum(sizes, self.least_pass) + float(self.pass_cost)

        return cost

    def _packed_cost(self, sizes: Sequence[int], budget: int) -> Cost:
        ends = [0, *accumulate(sizes)]
        lengths = np.array([self.length(size) for size in sizes])

        def cost(end: int) -> tuple[Any, Any]:
            first = min(end - 1, bisect_left(ends, ends[end] - budget))
            flat = np.array([self.flat(ends[end] - before) for before in ends[first:end]])
            padded = lengths[first:end]
            rows = self._attention_rows(np.arange(end - first, 0, -1), padded, flat)
            tokens = flat + padded * rows * (0.08 + padded / 10_000)
            return flat, np.maximum(tokens, self.least_pass) + self.pass_cost

        return cost


CPU = Shapes(8, 32, 2**20, 8, 0, filled=0, pass_cost=64, chunk_bytes=2**25, flat_grid=(8, 32))
CUDA = Shapes(
    256, 1, 1, 64, 2, filled=4, pass_cost=512, chunk_bytes=0, chunk_most=4096,
    flat_grid=(2048, 2), least_pass=9000, slots=(2, 4, 8),
    costs=Costs(
        once=1450, position=0.2, slot=0.114, growth=0.16 / 1024, new=70_000, most=24, tile=128, group=50, groups=4,
    ),
)  # fmt: skip
METAL = Shapes(64, 4, 2, 64, 4, filled=0, pass_cost=256, chunk_bytes=0, chunk_most=4096)


@functools.cache
def policy() -> Shapes:
    """The policy of this process's device."""
    if mx.default_device() == mx.cpu:
        return CPU
    kind = METAL if mx.metal.is_available() else CUDA
    return replace(kind, chunk_bytes=memory.total_memory() // 48)


def _up(value: int, step: int, parts: int) -> int:
    """Round up to a multiple of `step`, or of the power of two below `value` divided by `parts` if that is more."""
    below = 1 << max(0, (value - 1).bit_length() - 1)
    step = max(step, below // parts)
    return -(-value // step) * step
