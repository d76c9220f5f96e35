"""The lock on a run folder: the proof that a worker, or the engine it left behind, is alive."""

import contextlib
import fcntl
import os
import time
from pathlib import Path

import msgspec

from trainwire_protocol.rundir import LOCK_NAME, LockInfo, this_host

from .ending import disk_error

LOCK_BYTES = 1024
"""Length of what the holder writes about itself, filled up with blanks."""

LOOK_SECONDS = 5.0
"""How long those are waited for who only look whether the lock is held: each shares it for a moment."""


class RunLock:
    """The exclusive lock on a run folder, held by the worker and, through an inherited descriptor, by its engine."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / LOCK_NAME
        self.fd = -1

    def acquire(self) -> LockInfo | None:
        """Take the lock; None on success, else what its holder wrote about itself."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise disk_error(f"The lock {self.path} cannot be opened: {error.strerror}.", error) from None
        deadline = time.monotonic() + LOOK_SECONDS
        while not _lock(fd, fcntl.LOCK_EX):
            if not _lock(fd, fcntl.LOCK_SH) or time.monotonic() >= deadline:
                try:
                    return msgspec.json.decode(os.pread(fd, LOCK_BYTES, 0), type=LockInfo)
                except msgspec.DecodeError:
                    return LockInfo(pid=0, since_ms=0)
                finally:
                    os.close(fd)
            # No holder, only somebody who looks.
            fcntl.flock(fd, fcntl.LOCK_UN)
            time.sleep(0.002)
        self.fd = fd
        return None

    def describe(self, info: LockInfo) -> None:
        """Write who holds the lock, with the host, for `busy` messages and those who look for the control socket."""
        if self.fd >= 0:
            here = msgspec.structs.replace(info, host=this_host())
            # One write of one length, so that a reader never sees half of the old text behind the new.
            with contextlib.suppress(OSError):
                os.pwrite(self.fd, msgspec.json.encode(here).ljust(LOCK_BYTES - 1) + b"\n", 0)

    def release(self) -> None:
        """Give the lock up; an engine that still saves goes on holding it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
