"""Reads a run's folder without its worker: the log as it stands or grows, which events count, the newest checkpoint."""

import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from trainwire_protocol.codec import decode_message
from trainwire_protocol.events import Attempt, EvalEnd, Generation, Message, Step, Transport
from trainwire_protocol.rundir import LOG_NAME, CheckpointInfo, list_checkpoints, newest_whole_checkpoint

from .delivery import Item, seq_of
from .errors import ClientError

_TRANSPORT = ("hello", "response", "heartbeat", "gap")
_ATTEMPT_MARK = b'"type":"attempt"'


class _Place(msgspec.Struct):
    seq: int = 0


_place_decoder = msgspec.json.Decoder(_Place)


def log_path(run_dir: str | os.PathLike[str]) -> Path:
    """Name a run's log. Raises ClientError if the folder has none."""
    path = Path(run_dir).absolute() / LOG_NAME
    if not path.is_file():
        raise ClientError(f"{path.parent} is no run: there is no {LOG_NAME} in it.")
    return path


def decode_log_line(line: bytes) -> Item | None:
    """Read one line of a log; None for what is no event."""
    try:
        message: Message | dict[str, Any] = decode_message(line)
    except (ValueError, RecursionError, msgspec.MsgspecError):
        return None
    if isinstance(message, dict):
        return None if message["type"] in _TRANSPORT else message
    return None if isinstance(message, Transport) else message


def _seq_behind(file: BinaryIO, offset: int) -> int | None:
    """Give the `seq` of the first whole line that begins behind `offset`."""
    file.seek(offset)
    if offset:
        file.readline()
    line = file.readline()
    if not line.endswith(b"\n"):
        return None
    try:
        return _place_decoder.decode(line).seq
    except msgspec.MsgspecError:
        return None


def read_range(path: Path, first: int, last: int) -> Iterator[Item] | None:
    """Read the events whose `seq` lies within `first` and `last`; None if the log cannot be read.

    The first one is found by bisection, since `seq` rises along the file.
    """
    try:
        file = path.open("rb")
    except OSError:
        return None
    return _read_range(file, first, last)


def _read_range(file: BinaryIO, first: int, last: int) -> Iterator[Item]:
    with file:
        low, high = 0, file.seek(0, os.SEEK_END)
        while high - low > 1 << 16:
            middle = (low + high) // 2
            seq = _seq_behind(file, middle)
            if seq is None or seq >= first:
                high = middle
            else:
                low = middle
        file.seek(low)
        if low:
            file.readline()
        for line in file:
            if not line.endswith(b"\n"):
                return
            item = decode_log_line(line)
            seq = None if item is None else seq_of(item)
            if item is None or seq is None or seq < first:
                continue
            if seq > last:
                return
            yield item


class Tail:
    """Reads a growing log piece by piece; half a last line is left until the rest is there.

    It begins each piece behind the last whole line, for a worker that repairs the log cuts half a line away.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        self._offset = 0

    def read(self) -> list[bytes]:
        """Give the whole lines that were written since the last call, about a MiB at most."""
        self._file.seek(self._offset)
        data = self._file.read(1 << 20)
        end = data.rfind(b"\n") + 1
        self._offset += end
        return data[: end - 1].split(b"\n") if end else []

    @property
    def replaced(self) -> bool:
        """Whether the path holds another file by now, or none."""
        try:
            return not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except OSError:
            return True

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Timeline:
    """Tells which events belong to an abandoned timeline.

    A resumed attempt makes the `step`, `eval_end` and `generation` events of earlier attempts void whose step lies
    above the one it went on from.
    """

    def __init__(self, attempts: Sequence[tuple[int, int]]) -> None:
        steps = [step for _, step in attempts]
        floors = list(itertools.accumulate(reversed(steps), min))[::-1]
        self._cuts = [(seq, floor) for (seq, _), floor in zip(attempts, floors, strict=True)]

    @classmethod
    def of(cls, path: Path) -> "Timeline":
        """Find the attempts of a log as it is now."""
        attempts: list[tuple[int, int]] = []
        with path.open("rb") as file:
            for line in file:
                if _ATTEMPT_MARK in line:
                    event = decode_log_line(line)
                    if isinstance(event, Attempt) and event.seq is not None:
                        attempts.append((event.seq, event.resumed_from_step or 0))
        return cls(attempts[1:])

    def holds(self, seq: int, step: int) -> bool:
        """Say whether what happened at `step` still counts."""
        return next((step <= floor for cut, floor in self._cuts if seq < cut), True)

    def is_valid(self, item: Item) -> bool:
        """Say whether an event still counts."""
        if isinstance(item, Step | EvalEnd | Generation) and item.seq is not None:
            return self.holds(item.seq, item.step)
        return True


def latest_checkpoint(run_dir: str | os.PathLike[str], *, verify: bool = True) -> CheckpointInfo | None:
    """Find a run's newest checkpoint: `path`, `step`, `bytes`, `manifest`; None if there is none.

    With `verify` only one whose files have the sizes and hashes of its manifest counts.
    """
    folder = Path(run_dir).absolute()
    if not verify:
        return next(iter(list_checkpoints(folder)), None)
    return newest_whole_checkpoint(folder)[0]
