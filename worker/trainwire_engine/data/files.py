"""Reads data files row by row as bytes, never a whole file at once."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from trainwire_protocol.errors import DatasetInvalid

MAX_ROW_BYTES = 64 << 20
"""A longer row is never read whole: it is too long for any model."""

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")

_BOM = b"\xef\xbb\xbf"
_WIDE_BOMS = (b"\xff\xfe", b"\xfe\xff")
_BLOCK = 1 << 20


@dataclass(frozen=True)
class RawRow:
    """One row as it stands in its file; `data` is None where it is longer than MAX_ROW_BYTES."""

    line: int
    data: bytes | None


class RowFile:
    """A data file. `size` and `position` are in bytes as stored, for showing progress."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        self._raw: BinaryIO | None = None

    @property
    def position(self) -> int:
        """How far the file has been read."""
        return self.size if self._raw is None or self._raw.closed else min(self._raw.tell(), self.size)

    def rows(self) -> Iterator[RawRow]:
        """Give every row. Raises DatasetInvalid where the file itself is broken."""
        try:
            with self.path.open("rb") as raw:
                self._raw = raw
                stream: BinaryIO = _unpacked(raw) if self.path.suffix == ".gz" else raw
                start = stream.read(3)
                if start[:2] in _WIDE_BOMS:
                    raise _invalid(self.path, 1, "the file is UTF-16", "Store it as UTF-8.")
                rest = b"" if start == _BOM else start
                lines = ".jsonl" in self.path.suffixes
                yield from _lines(self.path, stream, rest) if lines else _elements(self.path, stream, rest)
        except (EOFError, gzip.BadGzipFile, OSError) as error:
            if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
                reason = error.strerror or str(error)
                raise DatasetInvalid(f"{self.path} cannot be read: {reason}.", path=str(self.path)) from None
            raise DatasetInvalid(
                f"{self.path} is no complete gzip file: {error}.",
                hint="Copy or compress it again.",
                path=str(self.path),
            ) from None


def _unpacked(raw: BinaryIO) -> BinaryIO:
    return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]


def _invalid(path: Path, line: int, reason: str, hint: str | None) -> DatasetInvalid:
    return DatasetInvalid(f"{path}:{line}: {reason}.", hint=hint, path=str(path), line=line, reason=reason)


def _lines(path: Path, stream: BinaryIO, rest: bytes) -> Iterator[RawRow]:
    """Rows of a file with one JSON value a line."""
    number = 0
    while True:
        line = rest + stream.readline(MAX_ROW_BYTES + 1 - len(rest))
        rest = b""
        if not line:
            return
        number += 1
        if len(line) > MAX_ROW_BYTES and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = stream.readline(_BLOCK)
            yield RawRow(number, None)
        elif not line.isspace():
            yield RawRow(number, line)


def _elements(path: Path, stream: BinaryIO, rest: bytes) -> Iterator[RawRow]:
    """Rows of a file that is one JSON array, found one after the other."""
    text = io.TextIOWrapper(io.BufferedReader(_Joined(rest, stream)), encoding="utf-8", newline="")
    decoder = json.JSONDecoder()
    buffer, at, line, ended = "", 0, 1, False

    def more() -> bool:
        nonlocal buffer, at, ended
        try:
            block = text.read(max(_BLOCK, len(buffer) - at))
        except UnicodeDecodeError as error:
            raise _invalid(path, line, f"the text is not UTF-8 ({error.reason})", "Store it as UTF-8.") from None
        buffer, at, ended = buffer[at:] + block, 0, not block
        return not ended

    def next_sign() -> str:
        nonlocal at, line
        while True:
            while at < len(buffer) and buffer[at] in " \t\r\n":
                line += buffer[at] == "\n"
                at += 1
            if at < len(buffer):
                return buffer[at]
            if not more():
                return ""

    if next_sign() != "[":
        reason = "a .json file is one array of rows, and this one begins otherwise"
        raise _invalid(path, line, reason, "Name a file with one row a line .jsonl, or write the rows as [row, row].")
    at += 1
    first = True
    while (sign := next_sign()) != "]":
        if not first:
            if sign != ",":
                raise _invalid(path, line, "the array is not closed, or a comma is missing between two rows", None)
            at += 1
            if next_sign() == "]":
                raise _invalid(path, line, "there is a comma after the last row", "Take the comma away.")
        first = False
        while True:
            try:
                _, end = decoder.raw_decode(buffer, at)
                # A number at the buffer's end may go on in the next block.
                if end < len(buffer) or ended:
                    break
            except json.JSONDecodeError as error:
                if ended:
                    where = line + buffer.count("\n", at, error.pos)
                    raise _invalid(path, where, f"this is not JSON: {error.msg}", None) from None
            if len(buffer) - at > MAX_ROW_BYTES:
                raise _invalid(path, line, "a row above 64 MB, or broken JSON", "Write one row a line as .jsonl.")
            more()
        yield RawRow(line, buffer[at:end].encode("utf-8", "surrogatepass"))
        line += buffer.count("\n", at, end)
        at = end
    at += 1
    if next_sign():
        raise _invalid(path, line, "there is more after the end of the array", None)


class _Joined(io.RawIOBase):
    """Bytes already read, and the rest of their stream."""

    def __init__(self, head: bytes, stream: BinaryIO) -> None:
        self._head = head
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, target: memoryview) -> int:  # type: ignore[override]
        data, self._head = self._head[: len(target)], self._head[len(target) :]
        data = data or self._stream.read(len(target))
        target[: len(data)] = data
        return len(data)
