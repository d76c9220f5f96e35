"""Model folders and data that no test changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import tiny_model
from whole import write_chat


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model`, `chat.jsonl` (40 rows) and `valid.jsonl` (7 rows)."""
    folder = tmp_path_factory.mktemp("base")
    tiny_model(folder / "model")
    write_chat(folder / "chat.jsonl", 40)
    write_chat(folder / "valid.jsonl", 7)
    return folder
