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

_HALF = ".building-"
_NOTES = "files"
_SETTLED_NS = 2 * 10**9
_UNUSED_SECONDS = 60 * 24 * 3600

VERSION = 4
"""Raise it with every change that makes other tokens of the same rows, or stores them otherwise."""


def content_key(contents: Sequence[str], tokenizer_digest: str, options: Options) -> str:
    """Name the data that these contents, this tokenizer and these options make."""
    parts = [VERSION, list(contents), tokenizer_digest, options.as_dict()]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=20).hexdigest()


def file_digest(path: Path, folder: Path) -> str:
    """Hash a file's content; a file that has not changed since is not read again.

    `folder` keeps the hashes, each with the marks by which a change is seen: size, both times, and place on disk.
    """
    now = time.time_ns()
    stat = path.stat()
    marks = [str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]
    note = folder / _NOTES / hashlib.blake2b(str(path).encode(), digest_size=16).hexdigest()
    with contextlib.suppress(OSError, ValueError):
        kept = json.loads(note.read_text(encoding="utf-8"))
        if kept["marks"] == marks:
            return str(kept["digest"])
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=20)).hexdigest()
    # A file that was written a moment ago may change again without a mark of it.
    if now - max(stat.st_mtime_ns, stat.st_ctime_ns) > _SETTLED_NS:
        with contextlib.suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            aside = note.with_suffix(f".{os.getpid()}")
            aside.write_text(json.dumps({"marks": marks, "digest": digest}), encoding="utf-8")
            aside.replace(note)
    return digest


def open_or_build(
    folder: Path, key: str, names: list[str], build: Callable[[Path], None], waiting: Callable[[], None]
) -> Store:
    """Open the data of a key, or have `build` write it into a new folder that then takes its place.

    Of two processes that want the same data one builds, and the other waits for it; `waiting` is called meanwhile.
    What a killed builder left behind is removed by the next one, and so is what nobody has used for a long time.
    Raises OSError where the folder cannot be written.
    """
    place = folder / key
    store = _opened(place, names)
    if store is not None:
        return store
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder / f"{key}.lock", waiting):
        store = _opened(place, names)
        if store is not None:
            return store
        _clean(folder, key)
        building = Path(tempfile.mkdtemp(prefix=key + _HALF, dir=folder))
        try:
            build(building)
            if place.exists():
                shutil.rmtree(place)
            building.rename(place)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
    return Store(place, names)


def _opened(place: Path, names: list[str]) -> Store | None:
    try:
        store = Store(place, names)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    with contextlib.suppress(OSError):  # a cache that cannot be written serves all the same
        os.utime(place)
    return store


def _clean(folder: Path, key: str) -> None:
    """Remove what killed builders left half-made, and all data that was not used for long. `key` is locked."""
    now = time.time()
    for path in sorted(folder.iterdir()):
        with contextlib.suppress(OSError):
            owner, half, _ = path.name.partition(_HALF)
            if half:
                gone = owner == key or _is_free(folder / f"{owner}.lock")
            else:
                gone = path.is_dir() and path.name != _NOTES and now - path.stat().st_mtime > _UNUSED_SECONDS
            if gone:
                shutil.rmtree(path, ignore_errors=True)


def _is_free(lock: Path) -> bool:
    """Whether nobody holds a lock."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    return True


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
