"""The form of packed micro-batches: one flat row of tokens, for whose attention each example gets a row of a group."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np

from trainwire_engine.forms import Costs, Form, Rows, Shape, first_within, up, whole

_LEVELS = 8
"""Lengths that the groups of a run may have: of 8 there are 162 choices of up to 4."""
_NEVER = 2.0**40


class Packed(Form):
    """Examples behind each other. The numbers of a shape: tokens, trained positions, and for each of the `levels` the
    examples that are longer than the one before.

    The examples up to a level may go to the group of that level or of a later one. Of the levels each shape takes those
    for its groups by which attention costs least.
    """

    def __init__(self, costs: Costs, budget: int, sizes: np.ndarray, groups: int) -> None:
        super().__init__(costs, budget)
        self.levels = _levels(costs, sizes)
        self._choices, self._for_each, self._for_all = _choices(costs, self.levels, groups)

    def needs(self, rows: Rows, starts: np.ndarray, end: int) -> np.ndarray:
        tokens, trained = rows.tokens_before, rows.trained_before
        longer = np.minimum(self._longer(rows)[:-1], end) - starts[:, None]
        sums = np.stack([tokens[end] - tokens[starts], trained[end] - trained[starts]], axis=1)
        return np.concatenate([sums, np.maximum(longer, 0)], axis=1)

    def rounded(self, needs: np.ndarray) -> np.ndarray:
        shapes = needs.copy()
        shapes[:, 0] = np.maximum(needs[:, 0], np.minimum(up(needs[:, 0], 128), self.budget))
        shapes[:, 1] = up(needs[:, 1], 64)
        return shapes

    def cost(self, shapes: Any) -> Any:
        share = self.costs.position
        tokens = self.costs.once + shapes[..., 0] * (1 - share) + shapes[..., 1] * share
        return whole(tokens + self._attention(shapes).min(axis=-1))

    def fits(self, shapes: np.ndarray) -> np.ndarray:
        return (shapes[..., 0] <= self.budget) | (shapes[..., 2] == 1)

    def firsts(self, shapes: np.ndarray, rows: Rows) -> np.ndarray:
        tokens, positions = shapes.T[:2, :, None]
        firsts = np.maximum(first_within(rows.tokens_before, tokens), first_within(rows.trained_before, positions))
        longer = np.minimum(self._longer(rows), np.arange(len(rows) + 1)[:, None])
        held = np.pad(shapes[:, 2:], ((0, 0), (0, 1)))
        return np.maximum(firsts, (longer - held[:, None]).max(axis=-1))

    def shape(self, numbers: np.ndarray) -> Shape:
        choice = self._choices[int(self._attention(numbers).argmin())]
        ends = [int(numbers[2 + level]) for level in (0, *(level + 1 for level in choice[:-1]))]
        rows = [here - later for here, later in zip(ends, [*ends[1:], 0])]
        groups = [(count, int(self.levels[level])) for count, level in zip(rows, choice) if count]
        return Shape(1, int(numbers[0]), int(numbers[1]), tuple(groups[::-1]))

    def _longer(self, rows: Rows) -> np.ndarray:
        """How many rows are longer than each level, 0 before them."""
        return np.searchsorted(-rows.sizes, [0, *-self.levels])

    def _attention(self, shapes: np.ndarray) -> Any:
        """What attention costs by each choice of levels [..., choices]: whole numbers, so their sums are exact."""
        longer = shapes[..., 2:]
        counts = longer - np.concatenate([longer[..., 1:], np.zeros_like(longer[..., :1])], axis=-1)
        return counts.astype(np.float64) @ self._for_each + self._for_all


def _levels(costs: Costs, sizes: np.ndarray) -> np.ndarray:
    """Choose lengths, the last one that of the longest row, by which the attention of rows costs least."""
    tiles = up(sizes, costs.tile) // costs.tile
    count = int(tiles.max())
    before = np.concatenate([[0], np.cumsum(np.bincount(tiles, minlength=count + 1)[1:])])
    lengths = np.arange(1, count + 1) * costs.tile
    each, ends = costs.attention(1, lengths), np.arange(count + 1)
    best, last = np.where(ends == 0, 0.0, np.inf), []
    for _ in range(min(_LEVELS, count)):
        # Of each length as the next level, the level before that costs least.
        totals = (
            best[:-1] + np.where(ends[:-1] < ends[1:, None], before[1:, None] - before[:-1], np.inf) * each[:, None]
        )
        last.append(np.concatenate([[0], totals.argmin(axis=1)]))
        best = np.concatenate([[0.0], totals.min(axis=1)])
    levels, end = [], count
    for previous in reversed(last):
        if end:
            levels.append(end * costs.tile)
            end = int(previous[end])
    return np.array(levels[::-1])


def _choices(costs: Costs, levels: np.ndarray, groups: int) -> tuple[list[tuple[int, ...]], np.ndarray, np.ndarray]:
    """The choices of levels for so many groups at most; what a row of each level costs by them; what each costs."""
    choices = [choice for count in range(groups) for choice in combinations(range(len(levels)), count + 1)]
    for_each = np.full((len(levels), len(choices)), _NEVER)
    for number, choice in enumerate(choices):
        for level in reversed(choice):
            for_each[: level + 1, number] = whole(costs.attention(1, levels[level]))
    return choices, for_each, np.array([costs.group * (len(choice) - 1) for choice in choices], np.float64)
