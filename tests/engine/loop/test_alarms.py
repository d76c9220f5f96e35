"""Warnings about a loss far above those before it, and about memory that runs short."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
from scripted import play

from trainwire_engine import memory
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


def test_memory_rings_once_until_it_is_relieved(monkeypatch: pytest.MonkeyPatch) -> None:
    left, clock = iter([50, 4, 3, 7, 4, 11, 4]), itertools.count()
    monkeypatch.setattr(memory, "total_memory", lambda: 100)
    monkeypatch.setattr(memory, "available", lambda: next(left))
    alarm = MemoryAlarm(lambda: float(next(clock)))
    assert [alarm.hear() for _ in range(7)] == [None, 4, None, None, None, None, 4]


def test_memory_is_looked_at_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(memory, "available", lambda: looks.append(1) or 10**12)
    alarm = MemoryAlarm(lambda: 7.0)
    for _ in range(5):
        alarm.hear()
    assert len(looks) == 1


def test_a_spike_is_told_with_its_rows_after_its_update(
    config: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses: list[float] = []

    def hear(alarm: LossAlarm, loss: float) -> Spike | None:
        losses.append(loss)
        return Spike(loss, 1.0) if len(losses) == 5 else None

    monkeypatch.setattr(LossAlarm, "hear", hear)
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
    monkeypatch.setattr(memory, "available", lambda: 1000)
    result = play(config, base)
    (log,) = result.logged("memory_pressure")
    assert log.details == {"step": 1, "available_bytes": 1000}
    assert result.status == 0
