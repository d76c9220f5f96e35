"""The examples of a split, as the batches read them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from trainwire_engine.data.report import DataReport
from trainwire_engine.data.store import Store


class Dataset:
    """Tokenized examples with their masks.

    `lengths` and `trained` are int32, one entry an example: its tokens and its trained tokens. `digest` changes
    with any token, mask or the order of the examples. `train_on` is what was trained of all rows; None if they differ,
    or say it themselves. Its memory is that of the operating system's page cache.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.lengths: np.ndarray = np.ascontiguousarray(store.rows["length"])
        self.trained: np.ndarray = np.ascontiguousarray(store.rows["trained"])
        self._ends = np.cumsum(self.lengths, dtype=np.int64)
        self.digest: str = store.digest
        used = store.train_on
        self.train_on: str | None = used[0] if len(used) == 1 and used != ["labels"] else None
        self.report: DataReport = store.report

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, index: int) -> np.ndarray:
        """Token ids of an example, int32 [length]."""
        return self._stored(index) & np.int32(0x7FFFFFFF)

    def mask(self, index: int) -> np.ndarray:
        """Which tokens of an example are trained targets, bool [length]; the first one never is."""
        return self._stored(index) < 0

    def pieces(self, index: int, decode: Callable[[list[int]], str]) -> list[tuple[str, bool]]:
        """The text of an example in pieces, each with whether it is trained: for showing to people."""
        tokens, mask = self.tokens(index), self.mask(index)
        borders = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(tokens)]
        return [(decode(tokens[a:b].tolist()), bool(mask[a])) for a, b in itertools.pairwise(borders) if a < b]

    def location(self, index: int) -> str:
        """Where an example comes from: "file:line"."""
        row = self._store.rows[index]
        return f"{self._store.sources[row['source']]}:{row['line']}"

    def _stored(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(index)
        end = int(self._ends[index])
        return np.asarray(self._store.tokens[end - int(self.lengths[index]) : end])
