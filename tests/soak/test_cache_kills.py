"""kill -9 of a worker with all its processes, at any moment while two of them want the same tokenized data.

TRAINWIRE_SOAK_CACHE_KILLS is their number (20); TRAINWIRE_TEST_SEED repeats a soak.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from scripted import write_rows
from tiny import tiny_model

KILLS = int(os.environ.get("TRAINWIRE_SOAK_CACHE_KILLS", "20"))
ROWS = 40_000
LONGEST = 3.0
"""Seconds after which one is killed at the latest: building takes about as long."""


def start(folder: Path, name: str) -> subprocess.Popen[bytes]:
    values = {
        "model": str(folder / "model"),
        "data": str(folder / "train.jsonl"),
        "cache_dir": str(folder / "cache"),
        "run_dir": str(folder / name),
        "max_steps": 1,
        "lora_rank": 2,
    }
    config = folder / f"{name}.toml"
    config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    command = [sys.executable, "-m", "trainwire_cli", "run", str(config)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONSAFEPATH": "1"})


def with_children(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [below for child in task.read_text().split() for below in with_children(int(child))]
    return found


def test_whoever_is_killed_the_other_one_gets_the_same_whole_data(tmp_path: Path) -> None:
    seed = int(os.environ.get("TRAINWIRE_TEST_SEED") or time.time_ns() % 2**32)
    print(f"\nTRAINWIRE_TEST_SEED={seed}")
    chance = random.Random(seed)
    tiny_model(tmp_path / "model")
    write_rows(tmp_path / "train.jsonl", ROWS)
    digests, building = set(), 0
    for number in range(KILLS):
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        with start(tmp_path, f"killed-{number}") as killed, start(tmp_path, f"other-{number}") as other:
            time.sleep(chance.uniform(0.3, LONGEST))
            building += bool([*tmp_path.glob("cache/tokens/*.building-*")])
            for pid in with_children(killed.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed.communicate(timeout=60)
            lines = [json.loads(line) for line in other.communicate(timeout=240)[0].splitlines()]
        assert other.returncode == 0
        assert next(line for line in lines if line["type"] == "data")["rows_used"] == ROWS
        (store,) = (path for path in (tmp_path / "cache" / "tokens").iterdir() if (path / "meta.json").exists())
        assert ".building-" not in store.name
        digests.add(json.loads((store / "meta.json").read_text())["digest"])
    assert len(digests) == 1
    print(f"{KILLS} kills, {building} of them while data was built")
