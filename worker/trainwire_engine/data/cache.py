"""Keeps tokenized data between runs: one folder for each content, built once, by one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from trainwire_engine.data.options import Options
from trainwire_engine.data.store import Store

VERSION = 1
"""Raise it with every change that makes other tokens of the same rows, or stores them otherwise."""


def content_key(contents: Sequence[str], tokenizer_digest: str, options: Options) -> str:
    """Name the data that these contents, this tokenizer and these options make."""
    parts = [VERSION, list(contents), tokenizer_digest, options.as_dict()]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=20).hexdigest()


def file_digest(path: Path) -> str:
    """Hash a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=20)).hexdigest()


def open_or_build(folder: Path, key: str, build: Callable[[Path], None], waiting: Callable[[], None]) -> Store:
    """Open the data of a key, or have `build` write it into a new folder that then takes its place.

    Of two processes that want the same data one builds, and the other waits for it; `waiting` is called meanwhile.
    What a killed builder left behind is removed by the next one.
    """
    place = folder / key
    store = _opened(place)
    if store is not None:
        return store
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder / f"{key}.lock", waiting):
        store = _opened(place)
        if store is not None:
            return store
        for left in folder.glob(f"{key}.building-*"):
            shutil.rmtree(left, ignore_errors=True)
        building = Path(tempfile.mkdtemp(prefix=f"{key}.building-", dir=folder))
        try:
            build(building)
            if place.exists():
                shutil.rmtree(place)
            building.rename(place)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
    return Store(place)


def _opened(place: Path) -> Store | None:
    try:
        store = Store(place)
        os.utime(place)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return store


@contextlib.contextmanager
def _lock(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold a lock that the system gives back when its holder dies."""
    with path.open("wb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting()
                time.sleep(0.2)
        yield
        path.unlink(missing_ok=True)
