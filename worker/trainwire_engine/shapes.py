"""Which shapes micro-batches may have: decided once, by what a pass and a new shape cost on the device.

A micro-batch is rows × length, with some of its positions trained. Padding computes nothing of use; a pass has a
cost of its own, whatever its size; and a compiled step is traced again for every new shape.

- CPU: the step is not compiled, so there may be any number of shapes. Lengths and trained positions go up in steps of
  8, whole vectors of the processor, lengths from 512 on in 32nds of a power of two; rows are as many as there are. A
  pass more costs as much as 64 padded tokens (measured with 2 million weights; some 45 with 135 million).
- CUDA: tracing a shape costs 0.3 s, and the host takes 70 to 100 ms to hand over a pass of 28 blocks with adapters,
  while the card computes 9,000 tokens: a smaller pass takes as long (H200, Qwen3 0.6B, LoRA: a pass of 2,048 tokens 84
  ms, 8,192 in 100 ms, 16,384 in 179 ms). So lengths are powers of two from 256 on, rows are powers of two, a
  micro-batch is filled up to a quarter of `micro_batch_tokens`, and half or all of its positions are trained. Of packed
  rows attention gets two, four or eight times as many slots as there are tokens.
- Metal: nothing is measured yet. Tracing is as dear as on CUDA but computing is slower, so padding weighs more:
  lengths in quarters and rows in halves of a power of two, positions in quarters.

The head runs over chunks of positions. On a CPU 32 MB of logits stay near the cache; on a GPU every chunk adds to
the graph, and products of 4,096 positions use the card: as many as fit into a 48th of its memory, at most 4,096.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np

from trainwire_engine import memory

Cost = Callable[[int, int], tuple[Any, Any]]
"""Of the spans to `end`, from `start` or the first later one that may be within the budget, `start` + 1, …: their
sizes, and what their passes cost, in padded tokens."""


@dataclass(frozen=True)
class Shapes:
    """A policy. Lengths, rows and positions are rounded up to grids of `step` (rows: 1), wider where a power of two, or
    of positions the micro-batch, divided by its `parts` is more.

    `filled` is the share of the budget, as 1 / filled, that rows of padding fill at least (0: none); `pass_cost` is
    in padded tokens, and a pass takes as long as one of `least_pass`; `chunk_bytes` is what the float32 logits of a
    chunk of the head may take; `slots` are the multiples of a flat row that attention may be padded to (none: any).
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

    def cuts(self, lengths: Sequence[int], budget: int) -> list[tuple[int, int]]:
        """Cut falling padded lengths into spans of least cost, each padded to its first length.

        The cost is the sum of the padded tokens and of `pass_cost` for each span; a span stays within the budget
        unless it is a single row.
        """
        return _Cuts(len(lengths), budget, self._cost(lengths, budget)).spans()

    def packed_cuts(self, sizes: Sequence[int], budget: int) -> list[tuple[int, int]]:
        """Cut falling lengths into spans, each one flat row within the budget unless it is a single example.

        A slot of attention, which is padded, counts as 0.08 of a token and a tenth more for every 1,000 of the length:
        what it takes of a layer of Qwen3 0.6B.
        """
        return _Cuts(len(sizes), budget, self._packed_cost(sizes, budget)).spans()

    def shares(self, sizes: Sequence[int], budget: int, count: int, *, packing: bool = False) -> list[tuple[int, int]]:
        """Divide falling lengths into so many spans, some perhaps empty; the dearest costs as little as it can.

        Rows of like length stay together, so that a share needs hardly more passes and padding than it is of the
        whole: rows dealt out one by one cost up to a tenth more on a GPU.
        """
        lengths = sizes if packing else [self.length(size) for size in sizes]
        cost = self._packed_cost(lengths, budget) if packing else self._cost(lengths, budget)
        return _Cuts(len(sizes), budget, cost).divide(count)

    def _cost(self, lengths: Sequence[int], budget: int) -> Cost:
        padded = np.array(lengths, np.int64)
        rows = np.array([self.rows(count, 1, 0) for count in range(len(lengths) + 1)])
        least = np.array([self.rows(1, length, budget) for length in lengths])

        def cost(start: int, end: int) -> tuple[Any, Any]:
            sizes = padded[start:end] * np.maximum(rows[end - start : 0 : -1], least[start:end])
            return sizes, np.maximum(sizes, self.least_pass) + float(self.pass_cost)

        return cost

    def _packed_cost(self, sizes: Sequence[int], budget: int) -> Cost:
        ends = [0, *accumulate(sizes)]
        lengths = np.array([self.length(size) for size in sizes])

        def cost(start: int, end: int) -> tuple[Any, Any]:
            first = min(end - 1, bisect_left(ends, ends[end] - budget, start))
            flat = np.array([self.flat(ends[end] - before) for before in ends[first:end]])
            padded = lengths[first:end]
            rows = self._attention_rows(np.arange(end - first, 0, -1), padded, flat)
            tokens = flat + padded * rows * (0.08 + padded / 10_000)
            return flat, np.maximum(tokens, self.least_pass) + self.pass_cost

        return cost


class _Cuts:
    """Ways to cut 0 … count-1 into spans, each within a budget unless it is a single one."""

    def __init__(self, count: int, budget: int, cost: Cost) -> None:
        self._count = count
        self._budget = budget
        self._cost = cost

    def spans(self) -> list[tuple[int, int]]:
        """The spans of least cost."""
        _, last = self._cheapest(0)
        spans, end = [], self._count
        while end:
            spans.append((last[end], end))
            end = last[end]
        return spans[::-1]

    def divide(self, shares: int) -> list[tuple[int, int]]:
        """Divide into so many shares, each of any number of spans, so that the dearest is within 2 % of the least."""
        whole = float(self._cheapest(0)[0][-1])
        least, most = whole / shares, 1.25 * whole / shares
        while (best := self._fill(shares, most)) is None:
            least, most = most, 2 * most
        while most - least > 0.02 * least:
            middle = (least + most) / 2
            found = self._fill(shares, middle)
            least, most, best = (middle, most, best) if found is None else (least, middle, found)
        return best

    def _fill(self, shares: int, most: float) -> list[tuple[int, int]] | None:
        """Fill one share after another up to a cost; None if something is left over."""
        found, start = [], 0
        for _ in range(shares):
            end = start + len(self._cheapest(start, most)[0]) - 1
            found.append((start, end))
            start = end
        return found if start == self._count else None

    def _cheapest(self, start: int, most: float = float("inf")) -> tuple[Any, list[int]]:
        """For each end from `start` on, as far as that costs no more than `most`: the least cost up to it, and where
        the last span before it starts."""
        best, last = np.zeros(self._count - start + 1), [start]
        for end in range(start + 1, self._count + 1):
            sizes, costs = self._cost(start, end)
            sizes[-1] = 0
            first = end - len(sizes)
            totals = np.where(sizes <= self._budget, best[first - start : end - start] + costs, np.inf)
            at = int(totals.argmin())
            if totals[at] > most:
                break
            best[end - start] = totals[at]
            last.append(first + at)
        return best[: len(last)], last


CPU = Shapes(8, 32, 2**20, 8, 0, filled=0, pass_cost=64, chunk_bytes=2**25, flat_grid=(8, 32))
CUDA = Shapes(
    256, 1, 1, 64, 2, filled=4, pass_cost=512, chunk_bytes=0, chunk_most=4096,
    flat_grid=(2048, 2), least_pass=9000, slots=(2, 4, 8),
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
