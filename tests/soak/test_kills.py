"""kill -9 of the engine, of the worker and of both, most often while a checkpoint is written.

TRAINWIRE_SOAK_KILLS is their number (200), in pieces of 25 that can run beside each other; TRAINWIRE_TEST_SEED
repeats a soak.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from scripted import write_rows
from tiny import tiny_model

from trainwire_protocol.rundir import LOCK_NAME, lock_holder, newest_whole_checkpoint

KILLS = int(os.environ.get("TRAINWIRE_SOAK_KILLS", "200"))
PIECE = 25
VICTIMS = ("engine", "worker", "both")
UPDATES = 240
PATIENCE = 120.0
_TAIL = 1 << 16


def wait_until(true: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, f"waited {PATIENCE} s for {what}"
        time.sleep(0.001)


def write_config(folder: Path, models: Path, run_dir: Path, seed: int) -> Path:
    values = {
        "model": str(models / "model"),
        "data": str(models / "train.jsonl"),
        "valid_data": str(models / "valid.jsonl"),
        "cache_dir": str(models / "cache"),
        "run_dir": str(run_dir),
        "seed": seed,
        "batch_size": 4,
        "max_steps": UPDATES,
        "lora_rank": 4,
        "lora_dropout": 0.1,
        "learning_rate": 1e-3,
        "save_every": 3,
        "eval_every": 9,
        "max_checkpoints": 2,
    }
    path = folder / f"{run_dir.name}.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    return path


@dataclass
class Attempt:
    """One worker process with its engine."""

    config: Path
    run_dir: Path
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        command = [sys.executable, "-m", "trainwire_worker", "run", str(self.config)]
        environment = {**os.environ, "PYTHONSAFEPATH": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
        )

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    def engine_pid(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            return int(json.loads((self.run_dir / LOCK_NAME).read_bytes()).get("engine_pid") or 0)
        return 0

    def is_saving(self) -> bool:
        with contextlib.suppress(OSError):
            return any(name.startswith(".writing-") for name in os.listdir(self.run_dir))
        return False

    def wait_for_engine(self) -> None:
        wait_until(lambda: self.over or self.engine_pid(), "an engine")

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: self.over or last_step(self.run_dir) >= step, f"step {step}")

    def wait_for_save(self) -> None:
        wait_until(lambda: self.over or self.is_saving(), "a save")

    def kill(self, victim: str) -> None:
        engine = self.engine_pid()
        if victim != "worker" and engine:
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine, signal.SIGKILL)
        if victim != "engine":
            self.process.kill()
        self.process.wait(PATIENCE)
        # An engine without its worker saves and leaves; it holds the lock as long as it lives.
        wait_until(lambda: lock_holder(self.run_dir) is None, "the lock")


def logged(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_bytes().splitlines()]


def last_step(run_dir: Path) -> int:
    """The last update that the log has; a torn last line does not count."""
    with contextlib.suppress(OSError), (run_dir / "events.jsonl").open("rb") as log:
        # Asked every millisecond: the end of the log holds it.
        log.seek(max(log.seek(0, os.SEEK_END) - _TAIL, 0))
        for line in reversed(log.read().split(b"\n")):
            if line.startswith(b'{"type":"step"') and line.endswith(b"}"):
                return int(json.loads(line)["step"])
    return 0


def effective_losses(lines: list[dict[str, Any]]) -> dict[int, list[float]]:
    """Every update's loss, without those that a later attempt made void."""
    losses: dict[int, list[float]] = {}
    for line in lines:
        if line["type"] == "attempt":
            start = line.get("resumed_from_step") or 0
            losses = {step: found for step, found in losses.items() if step <= start}
        elif line["type"] == "step":
            losses.setdefault(line["step"], []).append(line["loss"])
    return losses


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("soak")
    tiny_model(folder / "model")
    write_rows(folder / "train.jsonl", 30)
    write_rows(folder / "valid.jsonl", 5)
    return folder


def assert_equals_an_uninterrupted_run(folder: Path, models: Path, run_dir: Path, seed: int) -> None:
    whole = folder / f"whole-{seed}"
    attempt = Attempt(write_config(folder, models, whole, seed), whole)
    assert attempt.process.wait(PATIENCE) == 0
    for name in ("adapters.safetensors", "optimizer.safetensors"):
        assert (run_dir / "final" / name).read_bytes() == (whole / "final" / name).read_bytes(), name
    lines = logged(run_dir)
    assert [line["seq"] for line in lines] == list(range(1, len(lines) + 1))
    assert effective_losses(lines) == effective_losses(logged(whole))
    assert [name for name in os.listdir(run_dir) if name.startswith(".writing-")] == []


@pytest.mark.timeout(0)
@pytest.mark.parametrize("done", range(0, KILLS, PIECE))
def test_nothing_is_lost_or_broken_by_kills(models: Path, tmp_path: Path, done: int) -> None:
    seed = os.environ.get("TRAINWIRE_TEST_SEED") or random.randrange(2**32)
    print(f"TRAINWIRE_TEST_SEED={seed}")
    chance = random.Random(f"{seed} {done}")
    wanted = min(PIECE, KILLS - done)
    kills: Counter[str] = Counter()
    in_saves = runs = 0
    while kills.total() < wanted:
        runs += 1
        run_dir = tmp_path / f"run-{runs}"
        config = write_config(tmp_path, models, run_dir, runs)
        while True:
            attempt = Attempt(config, run_dir)
            attempt.wait_for_engine()
            if kills.total() >= wanted:
                assert attempt.process.wait(PATIENCE) == 0
                break
            started = last_step(run_dir)
            attempt.wait_for_step(started + chance.choice([1, 2, 4, 8, 16]))
            if chance.random() < 0.8:
                attempt.wait_for_save()
                time.sleep(chance.uniform(0, 0.02))
            if attempt.over:
                assert attempt.process.returncode == 0
                break
            in_saves += attempt.is_saving()
            victim = chance.choice(VICTIMS)
            attempt.kill(victim)
            kills[victim] += 1
            found, broken = newest_whole_checkpoint(run_dir)
            assert broken == []
            last = last_step(run_dir)
            if victim == "worker":
                assert found is not None
                assert found.step >= last, f"the orphan saved {found.step}, the log has {last}"
            elif found is not None:
                assert found.step > last - 2 * 3 - 1
            print(f"{kills.total()}: {victim} at {last} (from {started}), newest {found.step if found else None}")
        assert_equals_an_uninterrupted_run(tmp_path, models, run_dir, runs)
    print(
        f"{kills.total()} kills {dict(kills)}, {in_saves} of them while saving, {runs} runs equal to uninterrupted ones"
    )
