"""The record of a run on disk: `events.jsonl`, which is complete, and the lock, which proves life."""

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import orjson

from trainwire_protocol.errors import IoError, LogUnavailable
from trainwire_protocol.rundir import LOCK_NAME, LOG_NAME, LockInfo

MAX_UNWRITTEN = 8 << 20
"""Bytes of lines that are kept for a log that cannot be written."""


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
            raise IoError(f"The lock {self.path} cannot be opened: {error.strerror}.") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            try:
                return msgspec.json.decode(os.pread(fd, 4096, 0), type=LockInfo)
            except msgspec.DecodeError:
                return LockInfo(pid=0, since_ms=0)
            finally:
                os.close(fd)
        self.fd = fd
        return None

    def describe(self, info: LockInfo) -> None:
        """Write who holds the lock, for `busy` messages and for those who look for the control socket."""
        if self.fd >= 0:
            text = msgspec.json.encode(info)
            with contextlib.suppress(OSError):
                os.pwrite(self.fd, text, 0)
                os.ftruncate(self.fd, len(text))

    def release(self) -> None:
        """Give the lock up; an engine that still saves goes on holding it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Past(msgspec.Struct):
    """What a log tells about the attempts before this one."""

    run_id: str = ""
    attempts: int = 0
    last_seq: int = 0
    last_step: int = 0
    """Last update of the current timeline that the log has."""
    finished: bool = False
    config: dict[str, Any] | None = None
    cut_bytes: int = 0
    """Bytes of a torn last line that were cut off."""


def _find_last(log: mmap.mmap, kind: str, start: int = 0) -> tuple[int, dict[str, Any]] | None:
    mark = f'{{"type":"{kind}"'.encode()
    position = len(log)
    while (position := log.rfind(mark, start, position)) >= 0:
        if position == 0 or log[position - 1 : position] == b"\n":
            end = log.find(b"\n", position)
            with contextlib.suppress(orjson.JSONDecodeError):
                return position, orjson.loads(log[position : end if end >= 0 else len(log)])
    return None


def read_past(path: Path) -> Past:
    """Read what a later attempt needs to know, from the end of the log, without reading all of it."""
    past = Past()
    if not path.exists() or path.stat().st_size == 0:
        return past
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as log:
        attempt = _find_last(log, "attempt")
        start = 0
        if attempt:
            start, record = attempt
            past.run_id, past.attempts = str(record.get("run_id", "")), int(record.get("attempt", 0))
            past.last_step = int(record.get("resumed_from_step") or 0)
        if step := _find_last(log, "step", start):
            past.last_step = int(step[1]["step"])
        init = _find_last(log, "init")
        past.config = init[1].get("config") if init else None
        complete = _find_last(log, "complete")
        past.finished = bool(complete and complete[0] >= (init[0] if init else 0))
        tail = len(log)
        while tail > 0:
            begin = log.rfind(b"\n", 0, tail - 1) + 1
            with contextlib.suppress(orjson.JSONDecodeError, TypeError, KeyError, ValueError):
                past.last_seq = int(orjson.loads(log[begin:tail])["seq"])
                break
            tail = begin
    return past


class EventLog:
    """Appends the run's lines, numbered without a hole over all attempts."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / LOG_NAME
        self._unwritten = b""
        self.degraded = False
        """True while lines wait in memory because the disk does not take them."""
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            cut = self._repair()
            self.past = read_past(self.path)
        except OSError as error:
            raise LogUnavailable(f"The log {self.path} cannot be opened: {error.strerror}.") from None
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

    def append(self, lines: bytes) -> bool:
        """Append whole lines; False, and the lines kept in memory, if the disk does not take them."""
        data = self._unwritten + lines
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError:
            self._unwritten = data[written:][-MAX_UNWRITTEN:]
            self.degraded = True
            return False
        self._unwritten = b""
        self.degraded = False
        return True

    def replay(self, from_seq: int, to_seq: int, types: frozenset[str] | None) -> Iterator[dict[str, Any]]:
        """Give the stored events in order, as JSON objects."""
        with self.path.open("rb") as file:
            for line in file:
                try:
                    event = orjson.loads(line)
                except orjson.JSONDecodeError:
                    continue
                seq = event.get("seq", 0)
                if seq > to_seq:
                    return
                if seq >= from_seq and (types is None or event.get("type") in types):
                    yield event

    def close(self) -> None:
        """Make the log durable and close it."""
        with contextlib.suppress(OSError):
            self.append(b"")
            os.fsync(self._fd)
        os.close(self._fd)
