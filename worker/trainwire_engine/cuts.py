"""Cutting an update's rows, sorted by falling length, into spans of least cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Cost = Callable[[int], tuple[Any, Any]]
"""Of the spans to `end`, from the first start that may be within the budget up to `end` - 1: their sizes, and what
their passes cost, in padded tokens."""


class Cuts:
    """Ways to cut 0 … count-1 into spans, each within a budget unless it is a single one."""

    def __init__(self, count: int, budget: int, cost: Cost) -> None:
        self._count = count
        self._budget = budget
        self._cost = cost
        self._known: dict[int, Any] = {}

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
            costs = self._costs(end)[start - end :]
            first = end - len(costs)
            totals = best[first - start : end - start] + costs
            at = int(totals.argmin())
            if totals[at] > most:
                break
            best[end - start] = totals[at]
            last.append(first + at)
        return best[: len(last)], last

    def _costs(self, end: int) -> Any:
        """What the spans to an end cost, the last starts' if not all are within the budget."""
        if end not in self._known:
            sizes, costs = self._cost(end)
            sizes[-1] = 0
            self._known[end] = np.where(sizes <= self._budget, costs, np.inf)
        return self._known[end]
