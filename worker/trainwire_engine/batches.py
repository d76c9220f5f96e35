"""Which examples make an update, and how an update is cut into micro-batches of few shapes.

The order is arithmetic, not a generator: row i of epoch e gets the 64-bit key `mix(seed, e, i)`, and the rows are
taken in the order of their keys. `mix` is splitmix64 (Steele, Lea and Flood, OOPSLA 2014) folded over its
arguments, so the order is the same on every machine, and a resume needs no replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trainwire_engine.forms import Rows, Shape
from trainwire_engine.palette import Palette
from trainwire_engine.shapes import Shapes, policy

MEGABATCH_UPDATES = 50
"""Updates whose rows `group_by_length` sorts together: enough to find rows alike, few enough to stay random."""

_MASK = 2**64 - 1


def mix(*values: int) -> int:
    """Hash whole numbers to 64 bits, the same on every machine."""
    state = 0
    for value in values:
        state = (state ^ (value & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def permutation(count: int, *seed: int) -> np.ndarray:
    """A seeded order of 0 … count-1: the positions sorted by `mix(*seed, position)`."""
    state = np.uint64(mix(*seed)) ^ np.arange(count, dtype=np.uint64)
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(state ^ (state >> np.uint64(31)), kind="stable")


class Order:
    """The seeded order of a data set: position arithmetic alone says which rows make which update.

    With `group_by_length` the rows of every 50 updates are sorted by length before they are cut into updates,
    and the updates of the epoch are shuffled again. The last, smaller update of an epoch stays the last.
    """

    def __init__(
        self,
        examples: int,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        group_by_length: bool = False,
        lengths: np.ndarray | None = None,
    ) -> None:
        if group_by_length and (lengths is None or len(lengths) != examples):
            raise ValueError("group_by_length needs the length of every example")
        self.updates_per_epoch = -(-examples // batch_size)
        self._examples = examples
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._lengths = lengths if group_by_length else None
        self._epoch = -1
        self._order = np.zeros(0, np.int64)

    def rows(self, epoch: int, update: int) -> list[int]:
        """Dataset indices of the update `update` (from 0) of the epoch `epoch` (from 0)."""
        if not 0 <= update < self.updates_per_epoch:
            raise IndexError(f"update {update} is not one of the epoch's {self.updates_per_epoch}")
        if epoch != self._epoch:
            self._order, self._epoch = self._epoch_order(epoch), epoch
        first = update * self._batch_size
        return [int(row) for row in self._order[first : first + self._batch_size]]

    def _epoch_order(self, epoch: int) -> np.ndarray:
        count, size = self._examples, self._batch_size
        order = permutation(count, self._seed, epoch) if self._shuffle else np.arange(count)
        if self._lengths is None:
            return order
        whole, span = count // size * size, size * MEGABATCH_UPDATES
        for start in range(0, whole, span):
            part = order[start : min(start + span, whole)]
            order[start : start + len(part)] = part[np.argsort(-self._lengths[part], kind="stable")]
        if self._shuffle:
            updates = permutation(whole // size, self._seed, epoch, 1)
            order[:whole] = order[:whole].reshape(-1, size)[updates].reshape(-1)
        return order


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass over a few rows.

    `tokens` int32 [rows, length] are the inputs, padded right; `positions` int32 [P] index the flattened
    [rows * length] hidden states whose next token is trained, `targets` int32 [P] are those tokens, `weights`
    float32 [P] are 1, or 0 for padding. `rows` are dataset indices; `tokens` may have rows of padding after theirs.
    `real_tokens` are the inputs that are no padding. Packed rows are one flat row, `tokens` [1, T], with the indices
    `back` int32 [T] and `spread`, an int32 [rows, length] for each group of rows, of `segments.apart`.
    """

    tokens: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    rows: tuple[int, ...]
    real_tokens: int
    back: np.ndarray | None = None
    spread: tuple[np.ndarray, ...] = ()

    @property
    def sources(self) -> np.ndarray:
        """int32 [rows * length]: which trained position a hidden state is, -1 for one that is none."""
        trained = np.flatnonzero(self.weights)
        sources = np.full(self.tokens.size, -1, np.int32)
        sources[self.positions[trained]] = trained
        return sources

    @property
    def shape(self) -> tuple[int, ...]:
        """What a compiled step is traced for."""
        return self.tokens.shape + self.positions.shape + sum((rows.shape for rows in self.spread), ())


def plan(
    dataset: Any,
    rows: Sequence[int],
    micro_batch_tokens: int,
    shapes: Shapes | Palette | None = None,
    *,
    packing: bool = False,
) -> list[MicroBatch]:
    """Cut the rows of an update into micro-batches of at most `micro_batch_tokens` padded tokens.

    Rows are sorted by length and cut where the policy of shapes says that it costs least: the device's, or the shapes
    that were chosen for a run. A row longer than the budget goes alone. Inputs after the last trained position change
    nothing and are left out; a row without any is left out whole. With `packing` each micro-batch is one flat row of
    whole examples.
    """
    examples = _sorted_examples(dataset, rows)
    make = _pack if packing else _pad
    cuts = (shapes or policy()).cuts(_sizes(examples), micro_batch_tokens, packing=packing)
    return [make(dataset, examples[start:end], shape) for start, end, shape in cuts]


def share(
    dataset: Any,
    rows: Sequence[int],
    count: int,
    micro_batch_tokens: int,
    shapes: Shapes | None = None,
    *,
    packing: bool = False,
) -> list[list[int]]:
    """Divide the rows of an update among so many ranks, so that their passes cost about the same.

    Each gets rows of like length, the first the longest; with few rows a rank may get none.
    """
    examples = _sorted_examples(dataset, rows)
    spans = (shapes or policy()).shares(_sizes(examples), micro_batch_tokens, count, packing=packing)
    return [[row for _, row, _ in examples[start:end]] for start, end in spans]


def single(dataset: Any, rows: Sequence[int], shapes: Shapes | None = None) -> MicroBatch:
    """Put rows into one micro-batch, whatever its size; each must have a trained token."""
    examples = _sorted_examples(dataset, rows)
    return _pad(dataset, examples, (shapes or policy()).shape(_sizes(examples), 0))


def blank(shape: Shape) -> MicroBatch:
    """Make a micro-batch of a shape that has no row at all."""
    none = np.zeros(0, np.int32)
    batch = _micro_batch(np.zeros((shape.rows, shape.length), np.int32), none, none, (), 0, shape.positions)
    if not shape.groups:
        return batch
    back, spread = np.full(shape.length, -1, np.int32), tuple(np.full(group, -1, np.int32) for group in shape.groups)
    return replace(batch, back=back, spread=spread)


def sizes(dataset: Any, rows: Sequence[int]) -> Rows:
    """The inputs and trained positions of the rows that have any, the longest first."""
    return _sizes(_sorted_examples(dataset, rows))


def split(batch: MicroBatch, at: int) -> list[MicroBatch]:
    """Cut a micro-batch without rows of padding in two before row `at`, each no longer than its longest row needs."""
    shapes = policy()
    rows, length = batch.tokens.shape
    trained = batch.weights > 0
    positions, targets = batch.positions[trained], batch.targets[trained]
    owner = positions // length
    last = np.zeros(rows, np.int64)
    np.maximum.at(last, owner, positions % length + 1)
    pieces = []
    for part in (np.arange(at), np.arange(at, rows)):
        width = min(length, shapes.length(int(last[part].max())))
        mine = (owner >= part[0]) & (owner <= part[-1])
        places = (owner[mine] - part[0]) * width + positions[mine] % length
        real = int(last[part].sum())
        own = [batch.rows[i] for i in part]
        wanted = shapes.positions(int(mine.sum()), len(part) * width)
        pieces.append(_micro_batch(batch.tokens[part, :width], places, targets[mine], own, real, wanted))
    return pieces


def _sorted_examples(dataset: Any, rows: Sequence[int]) -> list[tuple[int, int, np.ndarray]]:
    """Inputs, row number and trained positions of the rows that have any, the longest first."""
    examples = []
    for row in rows:
        trained = np.flatnonzero(dataset.mask(row))
        if len(trained):
            examples.append((int(trained[-1]), row, trained))
    return sorted(examples, key=lambda example: (-example[0], example[1]))


def _sizes(examples: Sequence[tuple[int, int, np.ndarray]]) -> Rows:
    trained = [len(trained) for _, _, trained in examples]
    return Rows(np.array([size for size, _, _ in examples], np.int64), np.array(trained, np.int64))


def _pad(dataset: Any, examples: Sequence[tuple[int, int, np.ndarray]], shape: Shape) -> MicroBatch:
    tokens = np.zeros((shape.rows, shape.length), np.int32)
    positions, targets = [], []
    for index, (size, row, trained) in enumerate(examples):
        ids = dataset.tokens(row)
        tokens[index, :size] = ids[:size]
        positions.append(index * shape.length + trained - 1)
        targets.append(ids[trained])
    rows = [row for _, row, _ in examples]
    real = sum(size for size, _, _ in examples)
    return _micro_batch(tokens, np.concatenate(positions), np.concatenate(targets), rows, real, shape.positions)


def _pack(dataset: Any, examples: Sequence[tuple[int, int, np.ndarray]], shape: Shape) -> MicroBatch:
    """Put examples behind each other into one flat row; the longest go to the rows of the first group."""
    spread = tuple(np.full(group, -1, np.int32) for group in shape.groups)
    slots = [row for group in spread for row in group]
    offsets = np.cumsum([0, *(len(row) for row in slots)])
    tokens, back = np.zeros((1, shape.length), np.int32), np.full(shape.length, -1, np.int32)
    positions, targets = [], []
    start = 0
    for (size, row, trained), own, offset in zip(examples, slots, offsets):
        ids = dataset.tokens(row)
        tokens[0, start : start + size] = ids[:size]
        own[:size] = np.arange(start, start + size)
        back[start : start + size] = offset + np.arange(size)
        positions.append(start + trained - 1)
        targets.append(ids[trained])
        start += size
    rows = [row for _, row, _ in examples]
    batch = _micro_batch(tokens, np.concatenate(positions), np.concatenate(targets), rows, start, shape.positions)
    return replace(batch, back=back, spread=spread)


def _micro_batch(
    tokens: np.ndarray,
    positions: np.ndarray,
    targets: np.ndarray,
    rows: Sequence[int],
    real_tokens: int,
    padded_positions: int,
) -> MicroBatch:
    padded = (0, padded_positions - len(positions))
    weights = np.pad(np.ones(len(positions), np.float32), padded)
    at, wanted = np.pad(positions, padded).astype(np.int32), np.pad(targets, padded).astype(np.int32)
    return MicroBatch(tokens, at, wanted, weights, tuple(rows), real_tokens)
