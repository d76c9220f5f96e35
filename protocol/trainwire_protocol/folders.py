"""Folders of the user's that several processes share."""

import os
import sys
from pathlib import Path


def user_cache() -> Path:
    """The folder for what can be made again: tokenized data of a config that names no folder, the demo's models."""
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "trainwire"
