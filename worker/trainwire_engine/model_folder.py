"""A model folder in mlx-lm's layout that appears whole or not at all, and is made once."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainwire_protocol.errors import DiskFull, IoError

MARKER = "made_by_trainwire.json"
"""Names what the folder was made from and the size of each file; a folder that has it is ours to replace."""


def make_once(folder: Path, key: str, write: Callable[[Path], None]) -> bool:
    """Make `folder` by calling `write` on an empty one beside it and renaming that; True if it was made now.

    A folder that was made under the same `key` and still has all its files is left alone. One that was made
    under another key, or lost a file, is replaced; one that trainwire did not make is refused (`IoError`).
    Makers that run at once wait for each other, and what a killed one left behind is removed by the next.
    """
    folder = folder.absolute()
    try:
        if is_whole(folder, key):
            return False
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f".{folder.name}.lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if is_whole(folder, key):
                return False
            _refuse_if_not_ours(folder)
            _make(folder, key, write)
            return True
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"No space is left to make the model folder {folder}.") from error
        reason = error.strerror or str(error)
        raise IoError(f"The model folder {folder} cannot be made: {reason}.", path=str(folder)) from error


def is_whole(folder: Path, key: str) -> bool:
    """Tell whether `folder` was made under `key` and each of its files has the size it was written with."""
    try:
        marker = json.loads((folder / MARKER).read_bytes())
        sizes: dict[str, int] = marker["files"]
        return marker["key"] == key and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON with a newline at the end."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _refuse_if_not_ours(folder: Path) -> None:
    if folder.is_dir() and not folder.is_symlink():
        if (folder / MARKER).is_file() or not any(folder.iterdir()):
            return
    elif not os.path.lexists(folder):
        return
    raise IoError(
        f"{folder} exists and was not made by trainwire, so it is left as it is.",
        hint="Name another folder, or move this one away.",
        path=str(folder),
    )


def _make(folder: Path, key: str, write: Callable[[Path], None]) -> None:
    aside, old = folder.with_name(f".{folder.name}.part"), folder.with_name(f".{folder.name}.old")
    try:
        for leftover in (aside, old):
            if leftover.exists():
                shutil.rmtree(leftover)
        aside.mkdir()
        write(aside)
        sizes = {path.name: path.stat().st_size for path in sorted(aside.iterdir())}
        write_json(aside / MARKER, {"key": key, "files": sizes})
        for path in aside.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if folder.exists():
            folder.rename(old)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
