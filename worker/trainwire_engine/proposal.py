"""Which `micro_batch_tokens` to propose: the largest that is of use and fits into the memory that is left.

Memory is no straight line over the budget: attention keeps its probabilities where the matrices are small, so long
rows apart may take more than together, and lanes are dealt other micro-batches. So what one plan takes, in proportion,
is a first guess. The run is planned with it again, and its passes are tried with few blocks, as those of the estimate
are: first of the guess, then of one power of two below it after another, then of those above. From one that fits it
goes up as long as the next one fits, too. Where there is no time for a trial, or it could exhaust the machine, the
proportion decides.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trainwire_engine import trials
from trainwire_engine.batches import MicroBatch

Lanes = Sequence[Sequence[MicroBatch]]

_MOST = 4
"""Trials that a proposal may make."""


@dataclass(frozen=True)
class Needs:
    """What a plan's largest micro-batches take, the first of which has `length` and `tokens`.

    Bytes above what is held between updates: of the `passes`, `kept` of them by the backward pass; at an update's
    `end`; and `again` more where lanes that make one pass make several.
    """

    length: int
    tokens: int
    passes: int
    kept: int
    end: int
    again: int

    @property
    def bytes(self) -> int:
        """What the plan itself takes."""
        return max(self.end, self.passes)

    def at(self, tokens: int) -> float:
        """What micro-batches take with so many tokens; what is not kept grows, but does not shrink. A row goes alone
        if it must."""
        share = max(self.length, tokens) / self.tokens
        again = self.again if share < 1 else 0
        return again + max(self.end, self.kept * share + (self.passes - self.kept) * max(1.0, share))


@dataclass
class Proposal:
    """Finds the largest of the powers of two up to `useful` that takes no more than `room` bytes.

    `plan` gives the largest micro-batches of each lane for a budget. `attempt` tries their passes, or gives None if
    that takes more than the seconds given or might take too much memory. `latest` is what the newest trial found, at
    first that of the `planned` ones. No lane has more than `most` tokens in an update.
    """

    room: float
    useful: int
    most: int
    plan: Callable[[int], Lanes]
    attempt: Callable[[Lanes, float], Needs | None]
    planned: Lanes
    latest: Needs
    _found: dict[object, Needs] = field(init=False, default_factory=dict)
    _until: float = field(init=False)

    def find(self) -> int | None:
        """Give the budget, None if none fits; trials begin within `trials.PATIENCE_S` from now."""
        self._until = time.perf_counter() + trials.PATIENCE_S
        self._found[_shapes(self.planned)] = self.latest
        budgets = [1 << power for power in range(5, 18) if 1 << power <= self.useful]
        longest = bisect_left(budgets, self.latest.length, hi=len(budgets) - 1)
        guess = max((number for number, budget in enumerate(budgets) if self._scaled(budget)), default=longest)
        order = [*range(guess, -1, -1), *range(guess + 1, len(budgets))]
        at = next((number for number in order if self._fits(budgets[number])), None)
        if at is None:
            return None
        for budget in budgets[at + 1 :]:
            needs = self._tried(budget)
            if needs is None or needs.bytes > self.room:
                break
            at += 1
        return budgets[at]

    def _fits(self, budget: int) -> bool:
        needs = self._tried(budget)
        return self._scaled(budget) if needs is None else needs.bytes <= self.room

    def _scaled(self, budget: int) -> bool:
        return self.latest.at(min(budget, max(self.most, self.latest.tokens))) <= self.room

    def _tried(self, budget: int) -> Needs | None:
        """What the plan for a budget takes; plans whose largest micro-batches are alike are tried once."""
        left = self._until - time.perf_counter()
        if left <= 0:
            return None
        lanes = self.plan(budget)
        if _shapes(lanes) not in self._found:
            needs = self.attempt(lanes, left) if len(self._found) <= _MOST else None
            if needs is None:
                return None
            self._found[_shapes(lanes)] = self.latest = needs
        return self._found[_shapes(lanes)]


def _shapes(lanes: Lanes) -> object:
    return tuple(tuple(batch.shape for batch in lane) for lane in lanes)
