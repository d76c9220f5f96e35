"""What the two forms of a micro-batch need of a shape and cost in it: rows apart, or packed into one flat row.

A shape is a vector of whole numbers. It holds a span of rows if none of its numbers is less than the span needs, so
the least shape that holds several spans is the maximum of their needs, number by number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from trainwire_engine.cuts import Cuts


class Shape(NamedTuple):
    """What a step is traced for: tokens [rows, length] and how many of them are trained.

    Of a packed micro-batch `rows` is 1, and `groups` are the rows × length that its examples are spread to for
    attention, the longest first.
    """

    rows: int
    length: int
    positions: int
    groups: tuple[tuple[int, int], ...] = ()


class Cut(NamedTuple):
    """A micro-batch to be: the rows `start` to `end` of the sorted ones, and its shape."""

    start: int
    end: int
    shape: Shape


@dataclass(frozen=True)
class Costs:
    """What a pass takes beside its padded tokens, in the time of a token whose position is trained.

    A trained position's head is `position` of it. A slot of attention takes `slot` and `growth` for each token of the
    length; a pass `once`, whatever its size; a shape `new` when it is met first. `most` shapes are kept at most.
    Lengths that attention is padded to are multiples of `tile`. It may work in up to `groups` groups of rows of one
    length; each after the first takes `group`.
    """

    once: int
    position: float
    slot: float
    growth: float
    new: int
    most: int
    tile: int
    group: int
    groups: int

    def attention(self, rows: Any, lengths: Any) -> Any:
        """The cost of attention over so many rows."""
        return rows * lengths * (self.slot + self.growth * lengths)


@dataclass(frozen=True)
class Rows:
    """The rows of an update: their sizes, which fall, and the trained positions of each."""

    sizes: np.ndarray
    trained: np.ndarray

    def __len__(self) -> int:
        return len(self.sizes)

    def pieces(self, count: int) -> list[Rows]:
        """So many rows at a time, the longest first."""
        return [Rows(self.sizes[i : i + count], self.trained[i : i + count]) for i in range(0, len(self), count)]

    @cached_property
    def tokens_before(self) -> np.ndarray:
        """The tokens of the rows before each, and of all."""
        return np.concatenate([[0], np.cumsum(self.sizes)])

    @cached_property
    def trained_before(self) -> np.ndarray:
        """The trained positions of the rows before each, and of all."""
        return np.concatenate([[0], np.cumsum(self.trained)])


class Form(ABC):
    """A form of micro-batches within a budget of tokens."""

    def __init__(self, costs: Costs, budget: int) -> None:
        self.costs = costs
        self.budget = budget

    @abstractmethod
    def needs(self, rows: Rows, starts: np.ndarray, end: int) -> np.ndarray:
        """What the spans from `starts` to `end` need: int [starts, numbers of a shape]."""

    @abstractmethod
    def rounded(self, needs: np.ndarray) -> np.ndarray:
        """Round needs up to numbers that kernels like; within the budget what was within it."""

    @abstractmethod
    def cost(self, shapes: Any) -> Any:
        """The cost of a pass of shapes [..., numbers], whole numbers."""

    @abstractmethod
    def fits(self, shapes: np.ndarray) -> np.ndarray:
        """Tell which shapes are within the budget, or hold a single row."""

    @abstractmethod
    def firsts(self, shapes: np.ndarray, rows: Rows) -> np.ndarray:
        """For each shape and each end from 0 on, the first start of a span that the shape holds: int [shapes, ends]."""

    @abstractmethod
    def shape(self, numbers: np.ndarray) -> Shape:
        """A vector as a shape."""

    def cuts(self, rows: Rows) -> Cuts:
        """The ways to cut rows, each span in the least shape that holds it."""
        before = rows.tokens_before

        def cost(end: int) -> tuple[Any, Any]:
            first = min(end - 1, int(before.searchsorted(before[end] - self.budget)))
            shapes = self.rounded(self.needs(rows, np.arange(first, end), end))
            return np.where(self.fits(shapes), 0, self.budget + 1), self.cost(shapes)

        return Cuts(len(rows), self.budget, cost)

    def spans(self, rows: Rows) -> np.ndarray:
        """What the spans need that rows are cut into at least cost: int [spans, numbers of a shape]."""
        needs = [self.needs(rows, np.array([start]), end) for start, end in self.cuts(rows).spans()]
        return np.concatenate(needs)


class Apart(Form):
    """Rows padded to one length. The numbers of a shape: rows, length, trained positions."""

    def needs(self, rows: Rows, starts: np.ndarray, end: int) -> np.ndarray:
        trained = rows.trained_before
        return np.stack([end - starts, rows.sizes[starts], trained[end] - trained[starts]], axis=1)

    def rounded(self, needs: np.ndarray) -> np.ndarray:
        count, lengths, positions = needs.T
        return np.stack([count, up(lengths, self.costs.tile), up(positions, 64)], axis=1)

    def cost(self, shapes: Any) -> Any:
        count, lengths, positions = np.moveaxis(shapes, -1, 0)
        costs = self.costs
        tokens = count * lengths * (1 - costs.position) + positions * costs.position
        return whole(costs.once + tokens + costs.attention(count, lengths))

    def fits(self, shapes: np.ndarray) -> np.ndarray:
        return (shapes[..., 0] * shapes[..., 1] <= self.budget) | (shapes[..., 0] == 1)

    def firsts(self, shapes: np.ndarray, rows: Rows) -> np.ndarray:
        count, lengths, positions = shapes.T[:, :, None]
        by_count = np.arange(len(rows) + 1) - count
        by_length = np.searchsorted(-rows.sizes, -lengths)
        return np.maximum(np.maximum(by_count, by_length), first_within(rows.trained_before, positions))

    def shape(self, numbers: np.ndarray) -> Shape:
        count, length, positions = map(int, numbers)
        return Shape(count, length, positions)


def up(values: Any, step: int) -> Any:
    """Round up to a multiple."""
    return -(-values // step) * step


def first_within(before: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Give for each end the first start from which a sum is at most so much."""
    return np.searchsorted(before, before - most)


def whole(costs: Any) -> Any:
    """Round costs: whole numbers have the same sums on every machine."""
    return np.rint(costs).astype(np.int64)
