"""Warnings about a loss far above those before it, and about memory that runs short."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
from scripted import play

from trainwire_engine import alarms, loop
from trainwire_engine.alarms import ENOUGH, LossAlarm, MemoryAlarm, Spike


def spikes(losses: list[float]) -> list[int]:
    """Where the alarm rings."""
    alarm = LossAlarm()
    return [place for place, loss in enumerate(losses) if alarm.hear(loss) is not None]


def noise(mean: float, deviation: float, count: int = 100) -> list[float]:
    draw = random.Random(0)
    return [abs(draw.gauss(mean, deviation)) for _ in range(count)]


def test_a_loss_far_above_those_before_rings_once_until_it_is_back() -> None:
    calm = noise(2.0, 0.1)
    assert spikes([*calm, 4.0, 4.1, 4.2, *calm, 5.0, *calm]) == [100, 203]


def test_a_level_that_stays_high_is_no_second_spike() -> None:
    assert spikes([*noise(1.0, 0.05), *noise(3.0, 0.05)]) == [100]


@pytest.mark.parametrize("losses", [noise(2.0, 0.3, 1000), noise(0.01, 0.02, 1000), [5 * 0.98**n for n in range(300)]])
def test_noise_a_loss_near_zero_and_a_falling_loss_do_not_ring(losses: list[float]) -> None:
    assert spikes(losses) == []


def test_the_first_updates_have_nothing_to_be_compared_with() -> None:
    assert spikes([1.0] * (ENOUGH - 1) + [9.0]) == []
    assert spikes([1.0] * ENOUGH + [9.0]) == [ENOUGH]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_another_matter(value: float) -> None:
    assert spikes([*[1.0] * ENOUGH, value, 1.0, 9.0]) == [ENOUGH + 2]


def test_memory_rings_once_until_it_is_relieved() -> None:
    left = iter([50, 4, 3, 7, 4, 11, 4])
    alarm = MemoryAlarm(lambda: next(left), lambda: 100)
    assert [alarm.hear() for _ in range(7)] == [None, 4, None, None, None, None, 4]


def test_a_spike_is_told_with_its_rows_after_its_update(
    config: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        LossAlarm, "hear", lambda self, loss, seen=[]: seen.append(loss) or (Spike(loss, 1.0) if len(seen) == 5 else None)
    )
    result = play({**config, "log_every": 2}, base)
    (log,) = result.logged("loss_spike")
    assert log.level == "warn"
    assert log.details is not None
    assert log.details["step"] == 5
    assert len(log.details["rows"]) == 4
    assert all("train.jsonl:" in row for row in log.details["rows"])
    assert result.reports[result.reports.index(log) - 1].step == 5


def test_memory_that_runs_short_is_told_and_the_run_goes_on(
    config: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "MemoryAlarm", lambda: MemoryAlarm(lambda: 1000, lambda: 10**6))
    monkeypatch.setattr(alarms.memory, "available", lambda: 10**12)
    result = play(config, base)
    (log,) = result.logged("memory_pressure")
    assert log.details == {"step": 1, "available_bytes": 1000}
    assert result.status == 0
