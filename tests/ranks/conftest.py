"""Runs on several ranks: a tiny model, some data, and a driver of `trainwire run`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks_driver import Run, Start
from whole import write_base, write_config


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model`, `chat.jsonl` (40 rows) and `valid.jsonl` (7 rows)."""
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def start(base: Path, tmp_path: Path) -> Iterator[Start]:
    """Start a run in the test's folder; `ranks`, `words`, `env` and `prefix` are not keys of the config."""
    runs: list[Run] = []

    def make(
        name: str = "run",
        ranks: int = 2,
        words: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
        **keys: Any,
    ) -> Run:
        values = {
            "model": str(base / "model"),
            "data": str(base / "chat.jsonl"),
            "cache_dir": str(base / "cache"),
            "run_dir": str(tmp_path / name),
            "learning_rate": 1e-2,
            "warmup_steps": 1,
            "batch_size": 3,
            "max_steps": 100_000,
            "save_every": 0,
            "eval_every": 0,
            **keys,
        }
        run = Run(write_config(tmp_path / f"{name}.toml", **values), ranks, words, env, prefix)
        runs.append(run)
        return run

    yield make
    for run in runs:
        run.close()
