"""kill -9 at random moments, most of them during saves: nothing is lost but the updates since the last checkpoint."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from drive import Engine
from scripted import play

from trainwire_protocol import channel as ch
from trainwire_protocol import events as ev
from trainwire_protocol.rundir import newest_whole_checkpoint

KILLS = 12


def saves_or_ends(report: Any) -> bool:
    """A save begins, or the run is over."""
    return isinstance(report, ch.Finished) or (isinstance(report, ch.Alive) and report.activity == "checkpoint")


def kill_somewhere(engine: Engine, chance: random.Random) -> int:
    """Let it make a few saves and kill it, mostly within the milliseconds of one; the last step it reported."""
    for _ in range(chance.randint(1, 3)):
        if engine.reported(ch.Finished):
            break
        engine.wait_for(saves_or_ends)
    engine.listen(chance.uniform(0, 0.03) if chance.random() < 0.8 else chance.uniform(0, 0.3))
    engine.kill()
    return max((step.step for step in engine.of(ev.Step)), default=0)


@pytest.mark.slow
def test_a_dozen_kills_lose_no_update_and_break_nothing(config: dict[str, Any], base: Path, tmp_path: Path) -> None:
    seed = int(os.environ.get("TRAINWIRE_TEST_SEED", random.randrange(2**32)))
    print(f"TRAINWIRE_TEST_SEED={seed}")
    chance = random.Random(seed)
    settings = {
        **config,
        "valid_data": str(base / "valid.jsonl"),
        "num_epochs": 20,
        "save_every": 2,
        "eval_every": 6,
        "max_checkpoints": 2,
        "lora_dropout": 0.1,
        "learning_rate": 1e-3,
    }
    run_dir = Path(config["run_dir"])
    for attempt in range(1, KILLS + 1):
        found, broken = newest_whole_checkpoint(run_dir)
        assert broken == []
        if found is not None and found.path.name == "final":
            break
        with Engine(tmp_path / "stderr") as engine:
            resume = str(found.path) if found else None
            engine.begin(settings, base, attempt=attempt, resume_from=resume)
            last = kill_somewhere(engine, chance)
            assert not engine.of(ch.Failed)
        newest, broken = newest_whole_checkpoint(run_dir)
        assert broken == []
        announced = [c.step for c in engine.of(ev.Checkpoint)]
        assert newest is not None or not announced
        if newest is not None:
            # What was announced is there, and at most the save under way and its interval are lost.
            assert newest.step >= max(announced, default=0)
            assert newest.step >= last - 2 * 2
    found, _ = newest_whole_checkpoint(run_dir)
    assert found is not None
    if found.path.name != "final":
        with Engine(tmp_path / "stderr") as engine:
            engine.begin(settings, base, attempt=KILLS + 1, resume_from=str(found.path))
            assert engine.finish() == 0, engine.printed()
    whole = {**settings, "run_dir": str(tmp_path / "whole")}
    assert play(whole, base).status == 0
    for name in ("adapters.safetensors", "optimizer.safetensors"):
        assert (run_dir / "final" / name).read_bytes() == (tmp_path / "whole" / "final" / name).read_bytes()
    assert [path.name for path in run_dir.iterdir() if path.name.startswith(".")] == []
