"""Tokenizes the rows of a split into a new store."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence

from trainwire_engine.data.encode import Encoded
from trainwire_engine.data.files import RawRow, RowFile, Source
from trainwire_engine.data.options import Options
from trainwire_engine.data.parse import parse_row
from trainwire_engine.data.problems import RowError, row_invalid
from trainwire_engine.data.process import Chunk, encode_apart, encode_here
from trainwire_engine.data.rows import SHAPES, Shape, shape_of
from trainwire_engine.data.store import StoreWriter
from trainwire_engine.tokenizer import Tokenizer

Report = Callable[[str, int, int, str], None]
"""Called with title, done, total and unit while a longer work goes on; at its end with done = total."""

_CHUNK_ROWS = 1000
_CHUNK_BYTES = 2 << 20
_REPORT_SECONDS = 0.2
_WORTH_PROCESSES = 16 << 20
"""Bytes of rows from which on more processes save more time than they take to start."""
_MOST_PROCESSES = 8


def build(
    writer: StoreWriter,
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    options: Options,
    title: str,
    report: Report,
    processes: int | None = None,
) -> None:
    """Encode all rows of the sources in order; `processes` is chosen by the size of the first chunks if not given.

    Raises DatasetInvalid at the first row that cannot be used.
    """
    total = sum(source.size for source in sources)
    unit = "bytes" if all(isinstance(source, RowFile) for source in sources) else "rows"
    report(title, 0, total, unit)
    last = 0.0
    chunks = _chunks(sources)
    with contextlib.closing(_encoded(chunks, tokenizer, options, processes)) as results:
        for number, encoded in results:
            writer.add(number, encoded, options.limit)
            if options.limit and writer.report.rows_used >= options.limit:
                break
            now = time.monotonic()
            if now - last > _REPORT_SECONDS:
                last = now
                read = sum(source.size for source in sources[:number]) + sources[number].position
                report(title, max(0, min(read, total - 1)), total, unit)
    report(title, total, total, unit)


def _encoded(
    chunks: Iterator[Chunk], tokenizer: Tokenizer, options: Options, processes: int | None
) -> Generator[tuple[int, Encoded]]:
    """Encode in this process, or in several where the rows are so many that starting them pays."""
    if processes is None:
        processes = min(_cores(), _MOST_PROCESSES) if tokenizer.recipe and not options.limit else 1
        first: list[Chunk] = []
        size = 0
        while processes > 1 and size < _WORTH_PROCESSES:
            chunk = next(chunks, None)
            if chunk is None:
                processes = 1
            else:
                first.append(chunk)
                size += sum(len(row.data or b"") for row in chunk.rows)
        chunks = itertools.chain(first, chunks)
    if processes == 1:
        return encode_here(chunks, tokenizer, options)
    return encode_apart(chunks, tokenizer, options, processes)


def _cores() -> int:
    # What the scheduler allows, which in a container is less than what the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _chunks(sources: Sequence[Source]) -> Iterator[Chunk]:
    """Cut the rows into chunks of bounded size; the first row of a source says which shape all have."""
    for number, source in enumerate(sources):
        shape: Shape | None = None
        rows: list[RawRow] = []
        size = 0
        for row in source.rows():
            if shape is None and row.data is not None:
                shape = _shape(source, row)
            rows.append(row)
            size += len(row.data or b"")
            if shape is not None and (len(rows) >= _CHUNK_ROWS or size >= _CHUNK_BYTES):
                yield Chunk(number, source.name, shape, rows)
                rows, size = [], 0
        if rows:
            yield Chunk(number, source.name, shape or SHAPES[0], rows)


def _shape(source: Source, row: RawRow) -> Shape:
    try:
        return shape_of(parse_row(row.data or b""))
    except RowError as error:
        raise row_invalid(source.name, row.line, error) from None
