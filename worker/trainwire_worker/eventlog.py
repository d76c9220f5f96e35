"""The record of a run on disk: `events.jsonl`, which is complete."""

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import msgspec
import orjson

from trainwire_protocol.errors import LogUnavailable
from trainwire_protocol.rundir import LOG_NAME

from .past import read_past

MAX_UNWRITTEN = 8 << 20
"""Bytes of lines that are kept for a log that cannot be written; beyond, the oldest are lost."""
RETRY_SECONDS = 0.5
"""Time between two tries to write a log that could not be written."""
_PIECE = 128 << 10


def _seq(line: bytes) -> int:
    """Give the number of a stored line; 0 for one that is none of ours."""
    try:
        return int(orjson.loads(line)["seq"])
    except (ValueError, TypeError, KeyError):
        return 0


class Lost(msgspec.Struct):
    """Lines that neither the disk nor the memory could hold."""

    lines: int = 0
    last_seq: int = 0


class EventLog:
    """Appends the run's lines, numbered without a hole over all attempts."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / LOG_NAME
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._retry_at = 0.0
        self.lost = Lost()
        """What was lost since the log could be written last."""
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            cut = self._repair()
            self.past = read_past(self.path)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise LogUnavailable(f"The log {self.path} cannot be opened: {reason}.") from None
        self.past.cut_bytes = cut
        self.last_seq = self.past.last_seq

    def _repair(self) -> int:
        """Cut a torn last line off; the number of bytes cut."""
        size = os.fstat(self._fd).st_size
        end = size
        while end > 0:
            begin = max(0, end - (1 << 16))
            found = os.pread(self._fd, end - begin, begin).rfind(b"\n")
            if found >= 0:
                end = begin + found + 1
                break
            end = begin
        if end < size:
            os.ftruncate(self._fd, end)
        return size - end

    def next_seq(self) -> int:
        """Give the number of the line that is made next."""
        self.last_seq += 1
        return self.last_seq

    @property
    def degraded(self) -> bool:
        """True while lines wait in memory because the disk does not take them."""
        return bool(self._waiting)

    def append(self, lines: list[bytes], *, now: bool = False) -> bool:
        """Append whole lines; False, and the lines kept in memory, if the disk does not take them.

        A disk that took nothing is tried again after a while, or `now`.
        """
        if self._waiting:
            self._keep(lines)
            if not now and time.monotonic() < self._retry_at:
                return False
            lines, self._waiting = list(self._waiting), deque()
            self._waiting_bytes = 0
        data = b"".join(lines)
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, memoryview(data)[written:])
        except OSError:
            self._take_back(data, written)
            return False
        return True

    def _take_back(self, data: bytes, written: int) -> None:
        """Leave no half line on the disk, and keep the rest for the next try."""
        whole = data.rfind(b"\n", 0, written) + 1
        if written > whole:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - (written - whole))
        self._retry_at = time.monotonic() + RETRY_SECONDS
        self._keep(data[whole:].splitlines(keepends=True))

    def _keep(self, lines: list[bytes]) -> None:
        self._waiting.extend(lines)
        self._waiting_bytes += sum(map(len, lines))
        while self._waiting_bytes > MAX_UNWRITTEN:
            line = self._waiting.popleft()
            self._waiting_bytes -= len(line)
            self.lost.lines += 1
            self.lost.last_seq = _seq(line)

    def replay(self, from_seq: int, to_seq: int, types: frozenset[str] | None) -> Iterator[bytes]:
        """Give the stored lines in order, those that wait for the disk included."""
        starts = None if types is None else tuple(f'{{"type":"{name}"'.encode() for name in types)
        waiting = [line for line in self._waiting if from_seq <= _seq(line) <= to_seq]
        begin, end = self._offset(from_seq), self._offset(to_seq + 1)
        for line in chain(self._lines_between(begin, end), waiting):
            if starts is None or line.startswith(starts):
                yield line

    def _lines_between(self, begin: int, end: int) -> Iterator[bytes]:
        rest = b""
        while begin < end and (data := os.pread(self._fd, min(_PIECE, end - begin), begin)):
            begin += len(data)
            lines = (rest + data).splitlines(keepends=True)
            rest = b"" if lines[-1].endswith(b"\n") else lines.pop()
            yield from lines

    def _offset(self, seq: int) -> int:
        """Find where the lines from `seq` on begin, without reading all of those before."""
        size = os.fstat(self._fd).st_size
        low, high = 0, size
        while low < high:
            middle = (low + high) // 2
            begin, found = self._first_line(middle, size)
            if found >= seq:
                high = middle
            else:
                low = begin + 1
        return self._first_line(low, size)[0]

    def _first_line(self, offset: int, size: int) -> tuple[int, int]:
        """Give where the first line that begins at `offset` or later begins, and its number, a huge one at the end."""
        behind = max(0, offset - 1)
        for line in self._lines_between(behind, size):
            if behind >= offset and (seq := _seq(line)):
                return behind, seq
            behind += len(line)
        return size, sys.maxsize

    def close(self) -> None:
        """Make the log durable and close it."""
        with contextlib.suppress(OSError):
            self.append([], now=True)
            os.fsync(self._fd)
        os.close(self._fd)
