"""The proposal is what trials of plans say, and what a plan takes in proportion only where there are none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from tiny import RandomRows

from trainwire_engine import trials
from trainwire_engine.batches import single
from trainwire_engine.proposal import Needs, Proposal

PRESENT, ROOM = 256, 1000


def needs(tokens: int, taken: int) -> Needs:
    return Needs(length=128, tokens=tokens, passes=taken, kept=taken, end=0, again=0)


def proposed(takes: Mapping[int, int | None], present: int = 100) -> tuple[int | None, list[int]]:
    """Propose where the plan for 256 tokens takes `present`, and others what `takes` says, None for no trial; below
    256 and above 4,096 plans are those for 256 and 4,096. Gives the proposal and the budgets tried."""
    tried: list[int] = []
    plans = {
        1 << power: [[single(RandomRows(1, shortest=16 * power, longest=16 * power), [0])]] for power in range(5, 14)
    }

    def plan(budget: int) -> Any:
        return plans[min(4096, max(PRESENT, budget))]

    def attempt(lanes: Any, _patience: float) -> Needs | None:
        budget = next(budget for budget, batches in plans.items() if batches is lanes)
        tried.append(budget)
        taken = takes[budget]
        return needs(budget, taken) if taken is not None else None

    found = Proposal(ROOM, 8192, 8192, plan, attempt, plan(PRESENT), needs(PRESENT, present)).find()
    return found, tried


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "PATIENCE_S", 1e9)


def test_a_guess_that_fits_is_proposed_if_the_next_one_does_not() -> None:
    assert proposed({2048: 900, 4096: 1100}) == (2048, [2048, 4096])


def test_from_a_guess_that_fits_it_goes_up() -> None:
    assert proposed({2048: 500, 4096: 900}) == (8192, [2048, 4096])


def test_a_guess_that_does_not_fit_is_stepped_down_from() -> None:
    assert proposed({2048: 2000, 1024: 1001, 512: 1000}) == (512, [2048, 1024, 512])


def test_where_smaller_ones_take_more_larger_ones_are_tried() -> None:
    assert proposed({512: 1100, 1024: 900, 2048: 1300}, present=1200) == (1024, [512, 1024, 2048])


def test_none_is_proposed_if_none_fits_and_trials_are_few() -> None:
    assert proposed({512: 1100, 1024: 1100, 2048: 1100, 4096: 1100}, present=1200) == (None, [512, 1024, 2048, 4096])
    assert len(proposed({2048: 1100, 1024: 1100, 512: 1100, 4096: 1100})[1]) == 3


def test_without_a_trial_the_proportion_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert proposed({2048: None, 4096: None}) == (2048, [2048, 4096])
    monkeypatch.setattr(trials, "PATIENCE_S", 0.0)
    assert proposed({}) == (2048, [])
    assert proposed({}, present=3000) == (None, [])
