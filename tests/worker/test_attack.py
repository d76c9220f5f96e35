"""Random attack: mutated control lines, and processes killed at random moments. Seeds are printed."""

from __future__ import annotations

import os
import random
import time

import pytest
from attack import kill_the_engine, kill_the_parent, kill_the_worker, throw_lines
from worker_driver import Spawn

SEED = int(os.environ.get("TRAINWIRE_TEST_SEED") or time.time_ns() % 10**9)
ROUNDS = range(3)


def rng_of(round_: int) -> random.Random:
    """Make the source of a round, and say how to repeat it."""
    print(f"TRAINWIRE_TEST_SEED={SEED} repeats round {round_}")
    return random.Random(SEED + round_)


def test_random_lines_are_each_answered_once_and_change_neither_life_nor_memory(serve: Spawn) -> None:
    print(f"TRAINWIRE_TEST_SEED={SEED} repeats it")
    throw_lines(serve, SEED, 20_000, seconds=120)


@pytest.mark.parametrize("round_", ROUNDS)
def test_a_worker_killed_at_any_moment_leaves_a_run_to_go_on_with(serve: Spawn, round_: int) -> None:
    kill_the_worker(serve, rng_of(round_))


@pytest.mark.parametrize("round_", ROUNDS)
def test_an_engine_killed_at_any_moment_is_told_with_the_last_checkpoint(serve: Spawn, round_: int) -> None:
    kill_the_engine(serve, rng_of(round_))


@pytest.mark.parametrize("round_", ROUNDS)
def test_a_parent_killed_at_any_moment_is_missed(serve: Spawn, round_: int) -> None:
    kill_the_parent(serve, rng_of(round_))
