"""The command line that the measurements of one model share."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def parser(words: str | None, *, model: str, updates: int, rounds: int) -> argparse.ArgumentParser:
    """Make a parser for a model's name, its updates, the rounds and a folder; `words` are the command's docstring."""
    made = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default=model)
    made.add_argument("--updates", type=int, default=updates)
    made.add_argument("--rounds", type=int, default=rounds)
    add_folder(made)
    return made


def add_folder(made: argparse.ArgumentParser) -> None:
    """Add the option that every comparison has."""
    made.add_argument("--folder", type=Path, help="where models and rows are made, and found again")


@contextmanager
def folder_of(chosen: argparse.Namespace) -> Iterator[Path]:
    """Give the folder that was chosen, or one that is gone afterwards."""
    if chosen.folder is not None:
        yield chosen.folder
        return
    with tempfile.TemporaryDirectory(prefix="trainwire-bench-") as temporary:
        yield Path(temporary)
