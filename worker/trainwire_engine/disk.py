"""Files that are on the disk for good: written and flushed, found under their name only once they are whole."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from trainwire_protocol.rundir import FileEntry

_PIECE = 4 << 20
_AT_FDCWD, _SWAP = -100, 2


def _find_exchange() -> Callable[[bytes, bytes], int] | None:
    """The system's call that swaps two names: renameat2 on Linux, renamex_np on macOS."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "darwin":
            renamex = libc.renamex_np
            return lambda one, other: int(renamex(one, other, ctypes.c_uint(_SWAP)))
        renameat2 = libc.renameat2
        return lambda one, other: int(renameat2(_AT_FDCWD, one, _AT_FDCWD, other, ctypes.c_uint(_SWAP)))
    except (OSError, AttributeError):
        return None


_exchange = _find_exchange()


class Disk:
    """Every step that a save takes on the file system, each one a method that can fail with OSError."""

    def make_folder(self, path: Path) -> None:
        """Make a new folder; what is there under the name already is an error."""
        path.mkdir()

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileEntry:
        """Write a new file and flush it to the disk; gives its size and SHA-256."""
        digest, size = hashlib.sha256(), 0
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            for chunk in chunks:
                view = memoryview(chunk)
                for start in range(0, len(view), _PIECE):
                    piece = view[start : start + _PIECE]
                    digest.update(piece)
                    self.put(descriptor, piece)
                    size += len(piece)
            self.flush(descriptor)
        finally:
            os.close(descriptor)
        return FileEntry(size, digest.hexdigest())

    def put(self, descriptor: int, piece: memoryview) -> None:
        """Write all of a piece."""
        while len(piece):
            piece = piece[os.write(descriptor, piece) :]

    def flush(self, descriptor: int) -> None:
        """Wait until the disk itself holds the file; on macOS fsync alone stops at the drive's cache."""
        if sys.platform == "darwin":
            import fcntl

            try:
                fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):
                    raise
        os.fsync(descriptor)

    def flush_folder(self, path: Path) -> None:
        """Wait until the disk holds the names in a folder."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.flush(descriptor)
        finally:
            os.close(descriptor)

    def copy(self, source: Path, target: Path) -> None:
        """Give a finished file a second name, by a hard link where the file system has them."""
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EXDEV, errno.EACCES):
                raise
            with source.open("rb") as file:
                self.write(target, iter(lambda: file.read(_PIECE), b""))

    def rename(self, source: Path, target: Path) -> None:
        """Give a folder its other name, at once."""
        source.rename(target)

    def exchange(self, one: Path, other: Path) -> bool:
        """Let two folders change names at once; false where the system cannot."""
        if _exchange is None:
            return False
        if _exchange(os.fsencode(one), os.fsencode(other)) == 0:
            return True
        number = ctypes.get_errno()
        if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
            return False
        raise OSError(number, os.strerror(number), str(one))

    def remove(self, path: Path) -> None:
        """Remove a folder with all that is in it."""
        shutil.rmtree(path)

    def free(self, path: Path) -> int:
        """Bytes that can still be written below a folder."""
        return shutil.disk_usage(path).free
