"""What the log of a run tells about the attempts before this one."""

import contextlib
import mmap
from pathlib import Path
from typing import Any

import msgspec
import orjson

from trainwire_protocol.errors import LogUnavailable

_WINDOW = 4 << 20
"""Bytes that are searched in one go, so that the worker's loop gets its turn in between."""


class Past(msgspec.Struct):
    """What a log tells about the attempts before this one."""

    run_id: str = ""
    attempts: int = 0
    last_seq: int = 0
    last_step: int = 0
    """Last update of the current timeline that the log has."""
    finished: str | None = None
    """Why the run came to its end by itself, if it has."""
    config: dict[str, Any] | None = None
    cut_bytes: int = 0
    """Bytes of a torn last line that were cut off."""


def _find_last(log: mmap.mmap, kind: str, start: int = 0, end: int | None = None) -> tuple[int, dict[str, Any]] | None:
    mark = f'{{"type":"{kind}"'.encode()
    position = len(log) if end is None else end
    while position > start:
        low = max(start, position - _WINDOW)
        found = log.rfind(mark, low, position)
        if found < 0:
            if low == start:
                return None
            position = low + len(mark) - 1
        elif found == 0 or log[found - 1 : found] == b"\n":
            line_end = log.find(b"\n", found)
            with contextlib.suppress(orjson.JSONDecodeError):
                return found, orjson.loads(log[found : line_end if line_end >= 0 else len(log)])
            position = found
        else:
            position = found + len(mark) - 1
    return None


def _last_step(log: mmap.mmap) -> int:
    """Find the last update of the current timeline that the log has.

    An attempt that reported none stands for those before it, as far as the step that it was resumed from.
    """
    limit: int | None = None
    end = len(log)
    while True:
        attempt = _find_last(log, "attempt", 0, end)
        start = attempt[0] if attempt else 0
        if step := _find_last(log, "step", start, end):
            last = int(step[1]["step"])
            return last if limit is None else min(limit, last)
        resumed = attempt[1].get("resumed_from_step") if attempt else None
        if not resumed:
            return 0
        limit = int(resumed) if limit is None else min(limit, int(resumed))
        end = start


def _last_seq(log: mmap.mmap) -> int:
    tail = len(log)
    while tail > 0:
        begin = log.rfind(b"\n", 0, tail - 1) + 1
        with contextlib.suppress(orjson.JSONDecodeError, TypeError, KeyError, ValueError):
            return int(orjson.loads(log[begin:tail])["seq"])
        tail = begin
    return 0


def read_past(path: Path) -> Past:
    """Read what a later attempt needs to know, from the end of the log, without reading all of it.

    Raises LogUnavailable.
    """
    try:
        return _read(path)
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = error.strerror if isinstance(error, OSError) else repr(error)
        raise LogUnavailable(f"The log {path} cannot be read: {reason}.") from None


def _read(path: Path) -> Past:
    past = Past()
    if not path.exists() or path.stat().st_size == 0:
        return past
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as log:
        if attempt := _find_last(log, "attempt"):
            past.run_id, past.attempts = str(attempt[1].get("run_id", "")), int(attempt[1].get("attempt", 0))
        past.last_step = _last_step(log)
        init = _find_last(log, "init")
        past.config = init[1].get("config") if init else None
        if complete := _find_last(log, "complete", init[0] if init else 0):
            past.finished = str(complete[1].get("reason", "finished"))
        past.last_seq = _last_seq(log)
    return past
