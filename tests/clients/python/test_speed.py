"""The client's own cost, counted in processor time, so that a busy machine does not matter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "client_python.py"


@pytest.fixture(scope="module")
def figures() -> dict[str, dict[str, object]]:
    words = [sys.executable, str(BENCHMARK), "--launches", "0", "--events", "100000"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=True)
    figures: dict[str, dict[str, object]] = json.loads(done.stdout)
    return figures


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_fifty_thousand_events_a_second_are_delivered(figures: dict[str, dict[str, int]], kind: str) -> None:
    assert figures[kind]["events_per_second_of_client_time"] > 50_000


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_the_memory_does_not_grow_with_the_events(figures: dict[str, dict[str, list[float]]], kind: str) -> None:
    memory = figures[kind]["resident_mib"]
    assert max(memory) - memory[0] < 8
