"""Model folders and data that no test changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from whole import write_base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model`, `chat.jsonl` (40 rows) and `valid.jsonl` (7 rows)."""
    return write_base(tmp_path_factory.mktemp("base"))
