"""A tiny model and rows for whole runs; a run folder for each test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scripted import write_rows
from tiny import tiny_model


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models and data that no test changes."""
    folder = tmp_path_factory.mktemp("engine")
    tiny_model(folder / "model")
    write_rows(folder / "train.jsonl", 22)
    write_rows(folder / "valid.jsonl", 7)
    return folder


@pytest.fixture
def config(base: Path, tmp_path: Path) -> dict[str, Any]:
    """A config as people write it: six updates an epoch, no evaluation, no periodic checkpoints."""
    return {
        "model": str(base / "model"),
        "data": str(base / "train.jsonl"),
        "run_dir": str(tmp_path / "run"),
        "cache_dir": str(base / "cache"),
        "batch_size": 4,
        "learning_rate": 1e-2,
        "lora_rank": 4,
        "save_every": 0,
    }
