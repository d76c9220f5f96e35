"""Stores tokenized rows on disk, and reads them back memory-mapped."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from trainwire_engine.data.encode import Encoded
from trainwire_engine.data.report import DataReport, histogram

ROW = np.dtype([("line", "<i8"), ("length", "<i4"), ("trained", "<i4"), ("source", "<i4")])

_TOKENS, _ROWS, _META = "tokens.bin", "rows.bin", "meta.json"


class StoreWriter:
    """Appends encoded chunks to a new folder; nothing is kept in memory. `close` makes it a store."""

    def __init__(self, folder: Path, sources: list[str]) -> None:
        self.folder = folder
        self.report = DataReport()
        self.notices: set[str] = set()
        self.train_on: set[str] = set()
        self._sources = sources
        # Apart, so that they do not depend on how the rows came in chunks.
        self._lengths_digest, self._tokens_digest = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
        self._lengths: dict[str, int] = {}
        self._max_token = (-1, 0, 0)
        self._tokens = (folder / _TOKENS).open("wb")
        self._rows = (folder / _ROWS).open("wb")

    def add(self, source: int, encoded: Encoded, limit: int = 0) -> None:
        """Append the used rows of a chunk, of which at most `limit` in all are kept if it is above 0."""
        report, path = self.report, self._sources[source]
        count = len(encoded.lengths)
        last = None
        if limit and report.rows_used + count > limit:
            count = limit - report.rows_used
            last = encoded.lines[count - 1]
        dropped = {r: [n for n in lines if last is None or n <= last] for r, lines in encoded.dropped.items()}
        report.rows_read += encoded.rows_read if last is None else count + sum(map(len, dropped.values()))
        report.rows_truncated += sum(last is None or line <= last for line in encoded.truncated)
        self.notices |= encoded.notices
        self.train_on |= encoded.train_on
        for reason, lines in dropped.items():
            if lines:
                report.drop(reason, (f"{path}:{line}" for line in lines))
        if not count:
            return
        tokens = np.concatenate(encoded.tokens)[: sum(encoded.lengths[:count])]
        rows = np.zeros(count, ROW)
        rows["line"], rows["length"], rows["source"] = encoded.lines[:count], encoded.lengths[:count], source
        rows["trained"] = np.add.reduceat(tokens < 0, np.cumsum(rows["length"]) - rows["length"], dtype=np.int32)
        ids = tokens & 0x7FFFFFFF
        at = int(ids.argmax())
        if ids[at] > self._max_token[0]:
            row = int(np.searchsorted(np.cumsum(rows["length"]), at, side="right"))
            self._max_token = (int(ids[at]), source, int(rows["line"][row]))
        report.rows_used += count
        report.tokens += len(tokens)
        report.trained_tokens += int(rows["trained"].sum())
        for key, number in histogram(rows["length"]).items():
            self._lengths[key] = self._lengths.get(key, 0) + number
        self._lengths_digest.update(rows["length"].tobytes())
        self._tokens_digest.update(tokens.tobytes())
        self._tokens.write(tokens.tobytes())
        self._rows.write(rows.tobytes())

    def close(self) -> None:
        """Write the rest, and make sure that all of it is on the disk."""
        self.report.length_histogram = dict(sorted(self._lengths.items(), key=lambda item: int(item[0])))
        meta = {
            "sources": self._sources,
            "report": self.report.as_dict(),
            "notices": sorted(self.notices),
            "train_on": sorted(self.train_on),
            "digest": self._lengths_digest.hexdigest() + self._tokens_digest.hexdigest(),
            "max_token": self._max_token,
        }
        with (self.folder / _META).open("w", encoding="utf-8") as file:
            json.dump(meta, file)
            _sync(file)
        for handle in (self._tokens, self._rows):
            _sync(handle)
            handle.close()

    def abandon(self) -> None:
        """Close the files of a store that is not wanted."""
        self._tokens.close()
        self._rows.close()


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


class Store:
    """The tokenized rows of a folder. Raises OSError or ValueError where the folder is no whole store.

    `sources` are today's names of what was read: the same content may have had other names when it was stored.
    """

    def __init__(self, folder: Path, sources: list[str]) -> None:
        meta = json.loads((folder / _META).read_text(encoding="utf-8"))
        self.sources = sources
        self.report = DataReport.from_dict(_renamed(meta["report"], meta["sources"], sources))
        self.notices: list[str] = meta["notices"]
        self.train_on: list[str] = meta["train_on"]
        self.digest: str = meta["digest"]
        self.max_token: tuple[int, int, int] = tuple(meta["max_token"])
        used, tokens = self.report.rows_used, self.report.tokens
        if (folder / _TOKENS).stat().st_size != 4 * tokens or (folder / _ROWS).stat().st_size != ROW.itemsize * used:
            raise ValueError(f"{folder} is damaged")
        empty = np.zeros(0, np.int32)
        self.tokens = np.memmap(folder / _TOKENS, np.int32, "r") if tokens else empty
        self.rows = np.memmap(folder / _ROWS, ROW, "r") if used else np.zeros(0, ROW)


def _renamed(report: dict[str, Any], before: list[str], now: list[str]) -> dict[str, Any]:
    """Put today's names into the places of a report."""
    names = dict(zip(before, now))
    for entry in report["rows_dropped"].values():
        for index, place in enumerate(entry["lines"]):
            name, _, line = place.rpartition(":")
            entry["lines"][index] = f"{names.get(name, name)}:{line}"
    return report
