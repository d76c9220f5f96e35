"""Workers with the real engine, driven line by line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from whole import write_chat
from worker_driver import Spawn, Worker


@pytest.fixture
def serve(base: Path, tmp_path: Path) -> Iterator[Spawn]:
    """Start workers that wait for a `start` command: `serve(*words, config=…)`."""
    yield from _spawner(base, tmp_path, "serve")


@pytest.fixture
def run(base: Path, tmp_path: Path) -> Iterator[Spawn]:
    """Start workers with a config file: `run(*words, config=…)`."""
    yield from _spawner(base, tmp_path, "run")


def _spawner(base: Path, folder: Path, mode: str) -> Iterator[Spawn]:
    workers: list[Worker] = []

    def spawn(*words: str, config: dict[str, Any] | None = None, **settings: Any) -> Worker:
        usual = {
            "model": str(base / "model"),
            "data": str(base / "chat.jsonl"),
            "valid_data": str(base / "valid.jsonl"),
            "cache_dir": str(base / "cache"),
            "learning_rate": 1e-2,
            "max_steps": 10**6,
            "warmup_steps": 1,
            "save_every": 0,
            "eval_every": 0,
        }
        workers.append(Worker(folder, mode, *words, engine="mlx", config={**usual, **(config or {})}, **settings))
        return workers[-1]

    yield spawn
    for worker in workers:
        worker.clean()


@pytest.fixture
def long_update(tmp_path: Path) -> dict[str, Any]:
    """Config of a run whose updates take about a second: many long rows in each."""
    data = write_chat(tmp_path / "long.jsonl", 60, words="model loss is step " * 25)
    return {"data": str(data), "batch_size": 60, "micro_batch_tokens": 2048}
