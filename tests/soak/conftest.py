"""Long runs under attack: collected only if they are asked for (`make soak`)."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if any("soak" in argument for argument in config.args) else True
