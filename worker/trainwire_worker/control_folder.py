"""Where a control socket lies: a private folder whose lock says that its worker lives, so that dead ones can go."""

import contextlib
import errno
import fcntl
import os
from pathlib import Path

SOCKET_NAME = "control"
_PREFIX = "trainwire-control-"
_LONGEST_PATH = 100
"""Bytes of a socket's path; systems take 104 or 108."""
_ELSEWHERE = Path("/tmp")
_AS_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class ControlFolder:
    """A folder that only its owner can enter. Raises OSError if there can be none."""

    def __init__(self) -> None:
        self.path, self._fd = _make()

    def remove(self) -> None:
        """Take the folder and its socket away."""
        _remove(self.path, self._fd)


def clear_dead() -> None:
    """Remove the folders of workers that were killed."""
    for place in {_wanted(), _ELSEWHERE}:
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                if entry.name.startswith(_PREFIX) and entry.is_dir(follow_symlinks=False):
                    _remove_if_dead(Path(entry.path))


def _wanted() -> Path:
    return Path(os.environ.get("TMPDIR") or _ELSEWHERE).absolute()


def _make() -> tuple[Path, int]:
    while True:
        # As tempfile does it, which would load the random numbers and the decompressors first.
        name = f"{_PREFIX}{os.urandom(6).hex()}"
        path = _wanted() / name
        try:
            if len(os.fsencode(path / SOCKET_NAME)) > _LONGEST_PATH:
                raise OSError(errno.ENAMETOOLONG, "too long for a socket")
            path.mkdir(mode=0o700)
        except OSError:
            path = _ELSEWHERE / name
            path.mkdir(mode=0o700)
        # Until it is locked, another worker may take it for a dead one's.
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, _AS_FOLDER)
            with contextlib.suppress(OSError):
                # A file system that has no locks shows nobody that a worker is dead.
                fcntl.flock(fd, fcntl.LOCK_EX)
            if path.exists():
                return path, fd
            os.close(fd)


def _remove_if_dead(path: Path) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(path, _AS_FOLDER)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
        else:
            _remove(path, fd)


def _remove(path: Path, fd: int) -> None:
    with contextlib.suppress(OSError):
        (path / SOCKET_NAME).unlink(missing_ok=True)
        path.rmdir()
    os.close(fd)
