"""One writer of checkpoints at a time where several ranks reach the run folder: rank 0, or the one that outlives it."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SAVE_LOCK_NAME = ".save.lock"


class SaveLock:
    """A lock of a run folder that the system frees when its holder dies; a thread may take it again while it has it.

    The run's own lock does not tell ranks apart: all of one machine have inherited it.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / SAVE_LOCK_NAME
        self._mutex = threading.RLock()
        self._depth = 0
        self._fd = -1

    @contextmanager
    def held(self, *, wait: bool = True) -> Iterator[bool]:
        """Hold the lock while inside; without `wait` it says whether it could be had at once. Raises OSError."""
        with self._mutex:
            if self._depth == 0 and not self._take(wait):
                yield False
                return
            self._depth += 1
            try:
                yield True
            finally:
                self._depth -= 1
                if self._depth == 0:
                    os.close(self._fd)

    def _take(self, wait: bool) -> bool:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            os.close(self._fd)
            if isinstance(error, BlockingIOError):
                return False
            raise
        return True
