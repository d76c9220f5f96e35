"""Counts what became of the rows of a split: the facts of the `data` event."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

FIRST_LINES = 10
"""How many places are kept for each reason."""


@dataclass
class Dropped:
    """Rows left out for one reason: how many, and where the first of them stand ("file:line")."""

    count: int = 0
    lines: list[str] = field(default_factory=list)

    def add(self, places: Iterable[str]) -> None:
        """Count more rows."""
        for place in places:
            self.count += 1
            if len(self.lines) < FIRST_LINES:
                self.lines.append(place)


@dataclass
class DataReport:
    """What was read, used and left out; tokens of used rows after truncation.

    `length_histogram` counts rows by length in tokens: a key is the upper bound of its bin, a power of two.
    """

    rows_read: int = 0
    rows_used: int = 0
    rows_truncated: int = 0
    rows_dropped: dict[str, Dropped] = field(default_factory=dict)
    tokens: int = 0
    trained_tokens: int = 0
    length_histogram: dict[str, int] = field(default_factory=dict)

    def drop(self, reason: str, places: Iterable[str]) -> None:
        """Count rows left out for a reason."""
        self.rows_dropped.setdefault(reason, Dropped()).add(places)

    def dropped(self) -> int:
        """Rows left out for any reason."""
        return sum(entry.count for entry in self.rows_dropped.values())

    def as_dict(self) -> dict[str, Any]:
        """JSON values, in the shape of the `data` event."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DataReport:
        """Read what `as_dict` gave."""
        dropped = {reason: Dropped(**entry) for reason, entry in values["rows_dropped"].items()}
        return cls(**{**values, "rows_dropped": dropped})


def histogram(lengths: np.ndarray) -> dict[str, int]:
    """Count lengths in bins whose upper bounds are powers of two."""
    if not len(lengths):
        return {}
    bins = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    counts = np.bincount(bins)
    return {str(2**power): int(count) for power, count in enumerate(counts) if count}
