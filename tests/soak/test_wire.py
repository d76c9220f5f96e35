"""The wire under attack for longer: a million control lines, and processes killed at random moments.

TRAINWIRE_SOAK_LINES (1,000,000) and TRAINWIRE_SOAK_ROUNDS (50) are the numbers, TRAINWIRE_TEST_SEED repeats a soak.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attack import kill_the_engine, kill_the_parent, kill_the_worker, throw_lines
from worker_driver import Spawn, Worker

SEED = int(os.environ.get("TRAINWIRE_TEST_SEED") or time.time_ns() % 10**9)
LINES = int(os.environ.get("TRAINWIRE_SOAK_LINES", "1000000"))
ROUNDS = int(os.environ.get("TRAINWIRE_SOAK_ROUNDS", "50"))


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Spawn]:
    """Start workers, each in a folder of its own if `fresh` is called in between."""
    workers: list[Worker] = []

    def spawn(*words: str, **settings: Any) -> Worker:
        folder = tmp_path / str(spawn.folder)  # type: ignore[attr-defined]
        folder.mkdir(exist_ok=True)
        workers.append(Worker(folder, "serve", *words, **settings))
        return workers[-1]

    spawn.folder = 0  # type: ignore[attr-defined]
    yield spawn
    for worker in workers:
        worker.clean()


@pytest.mark.timeout(7200)
def test_a_million_lines(serve: Spawn) -> None:
    print(f"TRAINWIRE_TEST_SEED={SEED} repeats it")
    started = time.monotonic()
    throw_lines(serve, SEED, LINES, seconds=3600)
    print(f"{LINES} lines in {time.monotonic() - started:.0f} s")


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kill", [kill_the_worker, kill_the_engine, kill_the_parent])
def test_kills_at_random_moments(serve: Any, kill: Callable[[Spawn, random.Random], None]) -> None:
    for round_ in range(ROUNDS):
        print(f"{kill.__name__}: TRAINWIRE_TEST_SEED={SEED}, round {round_} of {ROUNDS}")
        serve.folder = round_
        kill(serve, random.Random(SEED + round_))
