"""Bytes in and out: control lines from a descriptor, printed lines to one that may be slow, full or gone."""

import contextlib
import errno
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator

from trainwire_protocol.errors import BadLine, LineTooLong
from trainwire_protocol.limits import MAX_LINE_IN

from .ready import wait_ready

FULL_DISK_PAUSE = 1.0
"""Seconds before a file on a full disk is tried again."""
_BOM = b"\xef\xbb\xbf"


class LineReader:
    """Cuts control lines out of a byte stream; a line that is too long, or cut off by the end, is an error."""

    def __init__(self, max_line: int = MAX_LINE_IN) -> None:
        self._max = max_line
        self._buffer = bytearray()
        self._skipping = False
        self._first = True

    def feed(self, data: bytes) -> Iterator[bytes | BadLine | LineTooLong]:
        """Give each line that ended in `data`, without its LF, or the error that stands for it."""
        for piece in _split(data):
            ended = piece.endswith(b"\n")
            if not self._skipping:
                self._buffer += piece
                if len(self._buffer) > self._max + (2 if piece.endswith(b"\r\n") else ended):
                    self._skipping = True
                    self._buffer.clear()
                    yield LineTooLong(f"The line is longer than {self._max} bytes.", limit=self._max)
            if ended:
                if not self._skipping:
                    yield self._take()
                self._skipping = False

    def end(self) -> BadLine | None:
        """Answer a last line without LF: it may be half a command of a dying parent, so it is not executed."""
        if self._skipping or not self._buffer.strip():
            return None
        return BadLine("The last line has no line feed at its end, so it was not executed.")

    def _take(self) -> bytes:
        line = bytes(self._buffer[:-1])
        self._buffer.clear()
        if self._first:
            line = line.removeprefix(_BOM)
            self._first = False
        return line


def _split(data: bytes) -> list[bytes]:
    # bytes.splitlines would also split at a lone CR, which is no line end here.
    parts = data.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def _open_again(fd: int, how: int) -> int | None:
    """Open what a descriptor stands for once more, not blocking; None if that cannot be done.

    A second open file description has flags of its own, so those that other processes share stay as they are.
    """
    flags = how | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    with contextlib.suppress(OSError):
        return os.open(f"/proc/self/fd/{fd}", flags)
    with contextlib.suppress(OSError):
        return os.open(os.ttyname(fd), flags)
    return None


class Reader:
    """Reads from a descriptor without ever waiting, also where others read from it and may have been quicker.

    A pager at the other end of the pipe, for one, reads the terminal's keys.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        """The descriptor that tells when there is something to read."""
        self._given = fd
        self._socket: socket.socket | None = None
        if fd < 0:
            return
        mode = os.fstat(fd).st_mode
        if stat.S_ISSOCK(mode):
            self._socket = socket.socket(fileno=os.dup(fd))
        elif not stat.S_ISREG(mode) and (again := _open_again(fd, os.O_RDONLY)) is not None:
            self.fd = again

    def read(self, size: int) -> bytes | None:
        """Give what has arrived, b"" at the end, None if there is nothing now."""
        try:
            if self._socket is not None:
                return self._socket.recv(size, socket.MSG_DONTWAIT)
            return os.read(self.fd, size)
        except BlockingIOError:
            return None
        except OSError:
            # EIO: a background job that reads from its terminal.
            return b""

    def close(self) -> None:
        """Let go of the descriptor."""
        if self._socket is not None:
            self._socket.close()
        for fd in {self.fd, self._given}:
            os.close(fd)


class Writer:
    """Writes to a descriptor without ever waiting for its reader.

    The descriptor's own flags are left alone where they are shared with other processes.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.gone = False
        """True once nobody can read any more."""
        self.full_until = 0.0
        """Where a full disk takes nothing: the time of the next try."""
        self._socket: socket.socket | None = None
        self._opened = False
        self._chunk: int | None = None
        mode = os.fstat(fd).st_mode
        if stat.S_ISSOCK(mode):
            self._socket = socket.socket(fileno=os.dup(fd))
        elif not stat.S_ISREG(mode):
            again = _open_again(fd, os.O_WRONLY)
            if again is not None:
                self.fd, self._opened = again, True
            else:
                # Once it is ready, a pipe or a terminal takes that many bytes without blocking.
                self._chunk = 512

    def write(self, data: bytes) -> int:
        """Write what fits now, and give its number of bytes; 0 if the reader lags or is gone."""
        try:
            if self._socket is not None:
                return self._socket.send(data, socket.MSG_DONTWAIT)
            if self._chunk is None:
                return os.write(self.fd, data)
            if not wait_ready([], [self.fd], 0)[1]:
                return 0
            return os.write(self.fd, data[: self._chunk])
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self.full_until = time.monotonic() + FULL_DISK_PAUSE
            else:
                self.gone = True
            return 0

    def close(self) -> None:
        """Let go of what was opened for writing."""
        if self._socket is not None:
            self._socket.close()
        if self._opened:
            os.close(self.fd)


class TextWriter:
    """A stderr that cannot hold anybody up: what its reader does not take in time is dropped."""

    def __init__(self, fd: int, limit: int = 64 << 10) -> None:
        self._writer = Writer(fd)
        self._limit = limit
        self._rest = b""
        self._fd = fd
        self.encoding = getattr(sys.stderr, "encoding", None) or "ascii"
        """By which a progress bar knows whether it may draw more than ASCII."""

    def write(self, text: str) -> int:
        """Write text, as a file does."""
        self.write_bytes(text.encode("utf-8", "replace"))
        return len(text)

    def write_bytes(self, data: bytes) -> None:
        """Write bytes as they are."""
        if len(self._rest) + len(data) <= self._limit:
            self._rest += data
        self.flush()

    def flush(self) -> None:
        """Write what the reader takes now."""
        while self._rest and not self._writer.gone:
            written = self._writer.write(self._rest)
            if not written:
                return
            self._rest = self._rest[written:]

    def fileno(self) -> int:
        """Give the descriptor, by which a progress bar finds the terminal's width."""
        return self._fd

    def isatty(self) -> bool:
        """Say whether a person reads it on a terminal."""
        return os.isatty(self._fd)
