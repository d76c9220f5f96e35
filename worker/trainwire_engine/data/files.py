"""Reads data files row by row as bytes, never a whole file at once."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from trainwire_engine.data.arrays import array_elements
from trainwire_engine.data.problems import file_invalid, unreadable
from trainwire_protocol.errors import DatasetInvalid

MAX_ROW_BYTES = 64 << 20
"""A longer row is never read whole: it is too long for any model."""

_BOM = b"\xef\xbb\xbf"
_WIDE_BOMS = (b"\xff\xfe", b"\xfe\xff")
_BLOCK = 1 << 20


class RawRow(NamedTuple):
    """One row as it stands in its file; `data` is None where it is longer than MAX_ROW_BYTES."""

    line: int
    data: bytes | None


class Source(Protocol):
    """Something that rows are read from. `size` and `position` show the progress, in any unit."""

    name: str
    size: int

    @property
    def position(self) -> int:
        """How far it has been read."""

    def rows(self) -> Iterator[RawRow]:
        """Give every row. Raises DatasetInvalid where the source itself is broken."""


class RowFile:
    """A file of JSON rows: one a line (.jsonl), or all in one array (.json), maybe compressed (.gz)."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.size = path.stat().st_size
        self._path = path
        self._raw: BinaryIO | None = None

    @property
    def position(self) -> int:
        """How many bytes have been read, as they are stored."""
        return self.size if self._raw is None or self._raw.closed else min(self._raw.tell(), self.size)

    def rows(self) -> Iterator[RawRow]:
        """Give every row. Raises DatasetInvalid where the file itself is broken."""
        try:
            with self._path.open("rb") as raw:
                self._raw = raw
                stream: Any = gzip.GzipFile(fileobj=raw) if self._path.suffix == ".gz" else raw
                start = stream.read(3)
                if start[:2] in _WIDE_BOMS:
                    raise file_invalid(self.name, 1, "the file is UTF-16", "Store it as UTF-8.")
                stream.seek(3 if start == _BOM else 0)
                if ".jsonl" in self._path.suffixes:
                    yield from _lines(stream)
                else:
                    for line, data in array_elements(self.name, stream, MAX_ROW_BYTES):
                        yield RawRow(line, data)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            hint = "Copy or compress it again."
            raise DatasetInvalid(f"{self.name} is no whole gzip file: {error}.", hint=hint, path=self.name) from None
        except OSError as error:
            raise unreadable(self.name, error) from None


def _lines(stream: BinaryIO) -> Iterator[RawRow]:
    """Rows of a file with one JSON value a line; blank lines are none."""
    number = 0
    while line := stream.readline(MAX_ROW_BYTES + 1):
        number += 1
        if len(line) > MAX_ROW_BYTES and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = stream.readline(_BLOCK)
            yield RawRow(number, None)
        elif not line.isspace():
            yield RawRow(number, line)
