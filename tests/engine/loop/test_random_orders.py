"""Orders, hang-ups and deaths at random reports: the run ends with the same model, and every order has one answer."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedChannel, play, write_rows
from tiny import tiny_model

from trainwire_engine import prepare
from trainwire_engine.step import UpdateStep
from trainwire_protocol import channel as ch
from trainwire_protocol import events as ev
from trainwire_protocol.rundir import newest_whole_checkpoint

RUNS = 6
UPDATES = 16


class Death(BaseException):
    """The process is gone in the middle of what it says."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random")
    tiny_model(folder / "model", num_hidden_layers=1)
    write_rows(folder / "train.jsonl", 14)
    write_rows(folder / "valid.jsonl", 3)
    return folder


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first, the last and two other updates have a loss that is not a number."""

    class Poisoned(UpdateStep):
        def __call__(self, micro_batches: Any, *, step: int, **more: Any) -> Any:
            clean = self._sums

            def spoilt(*arguments: Any) -> Any:
                (loss, correct), grads = clean(*arguments)
                return (loss * float("nan"), correct), grads

            self._sums = spoilt if step in (1, 7, 8, UPDATES) else clean
            try:
                return super().__call__(micro_batches, step=step, **more)
            finally:
                self._sums = clean

    monkeypatch.setattr(prepare, "UpdateStep", Poisoned)


def settings(models: Path, run_dir: Path) -> dict[str, Any]:
    return {
        "model": str(models / "model"),
        "data": str(models / "train.jsonl"),
        "valid_data": str(models / "valid.jsonl"),
        "run_dir": str(run_dir),
        "cache_dir": str(models / "cache"),
        "batch_size": 4,
        "micro_batch_tokens": 96,
        "max_steps": UPDATES,
        "lora_rank": 2,
        "lora_dropout": 0.2,
        "learning_rate": 3e-3,
        "save_every": 3,
        "eval_every": 2,
        "generate_every": 5,
        "prompts": ["what is"],
        "generate_max_tokens": 3,
        "max_checkpoints": 2,
    }


class Tormentor:
    """Gives random orders that change no number; hangs up and kills too."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._number = 1
        self._over = False
        self.given: list[int] = []
        self.channel: ScriptedChannel | None = None

    def _order(self, kind: type[ch.Order], **fields: Any) -> Any:
        self._number += 1
        self.given.append(self._number)
        return kind(order=self._number, **fields)

    def _any(self) -> Any:
        name = f"mine-{self._chance.randrange(10**9)}"
        return self._chance.choice(
            [
                lambda: self._order(ch.PauseOrder),
                lambda: self._order(ch.ResumeOrder, steps=self._chance.choice([None, 1, 3])),
                lambda: self._order(ch.CheckpointOrder, name=self._chance.choice([None, name, "final"])),
                lambda: self._order(ch.EvalOrder, max_batches=1),
                lambda: self._order(ch.GenerateOrder, prompt="the run", max_tokens=2, temperature=1.0, seed=3),
                lambda: self._order(ch.SetOrder, values={"save_every": self._chance.randint(0, 4)}),
                lambda: self._order(ch.SetOrder, values={"log_every": self._chance.randint(1, 3)}),
                lambda: self._order(ch.SetOrder, values={"generate_every": self._chance.randint(0, 3)}),
            ]
        )()

    def __call__(self, report: Any) -> list[Any]:
        if isinstance(report, ch.Finished) or (
            isinstance(report, ch.Answer) and ("outcome" in (report.result or {}) or report.code == "shutting_down")
        ):
            self._over = True
        if self._over:
            # What comes now finds nobody: the worker answers it.
            return []
        roll = self._chance.random()
        if roll < 0.006:
            raise Death
        if roll < 0.012 and self.channel is not None:
            self.channel.hang_up()
            return []
        if isinstance(report, ev.Paused):
            last = self._order(ch.StopOrder) if roll < 0.2 else self._order(ch.ResumeOrder)
            return [*(self._any() for _ in range(self._chance.randrange(3))), last]
        if roll > 0.98:
            return [self._order(ch.StopOrder)]
        return [self._any() for _ in range(self._chance.randint(1, 2))] if roll > 0.85 else []


def attempts(config: dict[str, Any], base: Path, chance: random.Random) -> Iterator[tuple[Tormentor, Any]]:
    """Start the run and go on with it from its newest checkpoint until it is complete."""
    for attempt in range(1, 200):
        found, broken = newest_whole_checkpoint(Path(config["run_dir"]))
        assert broken == []
        tormentor = Tormentor(chance)
        resume = {"resume_from": str(found.path)} if found else {}

        def take(channel: ScriptedChannel, tormentor: Tormentor = tormentor) -> None:
            tormentor.channel = channel

        try:
            result = play(config, base, tormentor, prepared=take, attempt=attempt, **resume)
        except Death:
            # A real death takes the writer with it, wherever it is: test_kill.py does that.
            for thread in threading.enumerate():
                if thread.name == "checkpoint":
                    thread.join()
            continue
        yield tormentor, result
        if any(finished.outcome == "completed" for finished in result.of(ch.Finished)):
            return
    raise AssertionError("it never ended")


@pytest.fixture(scope="module")
def seed() -> int:
    return int(os.environ.get("TRAINWIRE_TEST_SEED", random.randrange(2**32)))


@pytest.mark.parametrize("number", range(RUNS))
def test_no_order_at_no_moment_changes_the_model(models: Path, tmp_path: Path, seed: int, number: int) -> None:
    print(f"TRAINWIRE_TEST_SEED={seed}")
    run_dir = tmp_path / "run"
    for tormentor, result in attempts(settings(models, run_dir), models, random.Random(f"{seed} {number}")):
        assert result.status == 0, result.of(ch.Failed)
        if tormentor.channel is not None and not tormentor.channel.closed:
            answered = Counter(answer.order for answer in result.of(ch.Answer) if answer.order != 1)
            assert answered == Counter(tormentor.given)
        codes = {answer.code for answer in result.of(ch.Answer)}
        assert codes <= {None, "bad_params", "shutting_down", "wrong_state"}
        told = [step.step for step in result.of(ev.Step)]
        assert told == sorted(set(told))
    assert play(settings(models, tmp_path / "whole"), models).status == 0
    for name in ("adapters.safetensors", "optimizer.safetensors"):
        assert (run_dir / "final" / name).read_bytes() == (tmp_path / "whole" / "final" / name).read_bytes(), name
    assert [path.name for path in run_dir.iterdir() if path.name.startswith(".")] == []
