"""The shapes of a run: few of them, chosen for the rows that it trains on, by what passes and new shapes cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainwire_engine.forms import Cut, Form, Rows, Shape
from trainwire_engine.shapes import Shapes

_NEVER = 2**45
"""A cost that no run has."""
_BUCKETS = 200
"""Shapes that are put together, two at a time: the work grows with the second power."""
_LOOKED_AT = 32
"""Shapes of which needless ones are left out: the work grows with the third power."""


@dataclass(frozen=True)
class Palette:
    """A policy of few shapes, `vectors` [shapes, numbers] of a form; what none of them holds goes to the `grid`."""

    form: Form
    vectors: np.ndarray
    grid: Shapes

    def cuts(self, rows: Rows, budget: int, *, packing: bool = False) -> list[Cut]:
        """Cut rows into micro-batches of least cost, each in the cheapest shape that holds it."""
        found = cut(self.form, self.vectors, rows)
        if found is None:
            return self.grid.cuts(rows, budget, packing=packing)
        return [Cut(start, end, self.form.shape(self.vectors[which])) for start, end, which in found]

    @property
    def largest(self) -> Shape:
        """The shape whose passes cost most."""
        return self.form.shape(self.vectors[int(self.form.cost(self.vectors).argmax())])


def cut(form: Form, shapes: np.ndarray, rows: Rows) -> list[tuple[int, int, int]] | None:
    """Cut rows into spans of least cost, each with the number of its shape; None if no shape holds a row.

    A span that begins later needs no more, so of the spans to an end that a shape holds the first is best.
    """
    starts = _starts(form, shapes, rows)
    costs, best, which = form.cost(shapes), np.full(len(rows) + 2, _NEVER), [0]
    best[0] = 0
    for end in range(1, len(rows) + 1):
        totals = best[starts[end]] + costs
        which.append(int(totals.argmin()))
        best[end] = totals[which[end]]
    if best[len(rows)] >= _NEVER:
        return None
    spans, end = [], len(rows)
    while end:
        start = int(starts[end, which[end]])
        spans.append((start, end, which[end]))
        end = start
    return spans[::-1]


def choose(form: Form, updates: Sequence[Rows], longest: Rows, times: float, grid: Shapes) -> Palette:
    """Choose the shapes of a run whose updates are the given ones, each so many `times`; all hold the row `longest`.

    The least shapes of the micro-batches that cost least without a bound on shapes are put together, two at a time,
    where that costs least, until there are `most`; then those are left out, one at a time, without which the run costs
    less. Full micro-batches cannot be put together: of more than 32 shapes those of the most are looked at. Costs are
    whole numbers, so that every machine chooses the same.
    """
    updates = [*(rows for rows in updates if len(rows)), longest]
    spans = [form.spans(rows) for rows in updates]
    numbers, counts = np.concatenate(spans), np.ones(sum(map(len, spans)), np.int64)
    counts[-1] = 0
    shapes, counts = _merged(form, *_buckets(form, numbers, counts))
    holds_longest = (spans[-1] <= shapes).all(axis=1)
    counts[np.where(holds_longest, form.cost(shapes), _NEVER).argmin()] = _NEVER
    shapes = shapes[np.argsort(-counts, kind="stable")[:_LOOKED_AT]]
    shapes = _without_the_needless(form, shapes, updates, round(form.costs.new / times))
    return Palette(form, _tightened(form, shapes, updates), grid)


def _starts(form: Form, shapes: np.ndarray, rows: Rows) -> Any:
    """The first start of each end's span for each shape, int [ends, shapes]; -1, behind the last, where it has none."""
    firsts = form.firsts(shapes, rows).T
    return np.where(firsts < np.arange(len(rows) + 1)[:, None], np.maximum(firsts, 0), -1)


def _buckets(form: Form, spans: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shapes for spans, those that are alike in one, and how many spans each holds; 200 at most."""
    below = 1 << np.maximum(np.frexp(np.maximum(spans - 1, 1))[1] - 1, 0).astype(np.int64)
    for parts in (16, 8, 4, 2, 1):
        alike = -(-spans // np.maximum(1, below // parts)), below
        which = np.unique(np.concatenate(alike, axis=1), axis=0, return_inverse=True)[1].reshape(-1)
        if which.max() < _BUCKETS:
            break
    else:
        # Those of like cost, and with as many numbers that are not 0.
        order = np.lexsort((form.cost(form.rounded(spans)), (spans > 0).sum(axis=1)))
        which[order] = np.arange(len(order)) * _BUCKETS // len(order)
    shapes = np.zeros((which.max() + 1, spans.shape[1]), np.int64)
    np.maximum.at(shapes, which, spans)
    return form.rounded(shapes), np.bincount(which, counts).astype(np.int64)


def _merged(form: Form, shapes: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Put two shapes together, again and again where that adds the least cost, until there are few enough."""
    shapes, counts = shapes.copy(), counts.copy()
    costs = form.cost(shapes)
    alive = np.ones(len(shapes), bool)

    def added(at: Any) -> Any:
        together = np.maximum(shapes[at, None], shapes)
        more = (counts[at, None] + counts) * form.cost(together) - (counts * costs)[at, None] - counts * costs
        more = np.where(form.fits(together) & alive & alive[at, None], more, _NEVER)
        more[np.arange(len(more)), at] = _NEVER
        return more

    more = added(np.arange(len(shapes)))
    while alive.sum() > form.costs.most:
        one, other = divmod(int(more.argmin()), len(shapes))
        if more[one, other] >= _NEVER:
            break
        shapes[one] = np.maximum(shapes[one], shapes[other])
        counts[one] += counts[other]
        costs[one] = form.cost(shapes[one])
        alive[other] = False
        more[other] = more[:, other] = _NEVER
        more[one] = more[:, one] = added(np.array([one]))[0]
    return shapes[alive], counts[alive]


def _without_the_needless(form: Form, shapes: np.ndarray, updates: Sequence[Rows], new: int) -> np.ndarray:
    """Leave out one shape after another while the updates, and `new` for each shape, cost less without it.

    The last of the updates is to be held and costs nothing.
    """
    ends = np.array([len(rows) for rows in updates])
    starts = np.full((ends.max() + 1, len(shapes), len(updates)), -1)
    for number, rows in enumerate(updates):
        starts[: len(rows) + 1, :, number] = _starts(form, shapes, rows)
    while len(shapes) > 1:
        totals = _without_each(starts, form.cost(shapes), ends)
        least = int(totals[1:].argmin())
        if totals[1 + least] >= _NEVER or (totals[1 + least] > totals[0] + new and len(shapes) <= form.costs.most):
            break
        shapes, starts = np.delete(shapes, least, axis=0), np.delete(starts, least, axis=1)
    return shapes


def _without_each(starts: np.ndarray, costs: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """What the updates cost with all shapes, and without each: int [1 + shapes]."""
    ways, (_, count, updates) = len(costs) + 1, starts.shape
    best = np.full((len(starts) + 1, ways, updates), _NEVER)
    best[0] = 0
    barred = np.where(np.eye(ways, count, -1, dtype=bool), _NEVER, costs)[:, :, None]
    across, along = np.arange(ways)[:, None, None], np.arange(updates)
    for end in range(1, len(starts)):
        best[end] = (best[starts[end], across, along] + barred).min(axis=1)
    last = best[ends, :, along]
    return np.where(last.max(axis=0) >= _NEVER, _NEVER, last[:-1].sum(axis=0))


def _tightened(form: Form, shapes: np.ndarray, updates: Sequence[Rows]) -> np.ndarray:
    """Leave out what no update uses, and make the others no larger than updates need them."""
    least = np.zeros_like(shapes)
    for rows in updates:
        for start, end, which in cut(form, shapes, rows) or []:
            needed = form.needs(rows, np.array([start]), end)[0]
            least[which] = np.maximum(least[which], needed)
    return form.rounded(least[least.any(axis=1)])
