"""What decides how rows become tokens: part of the key of the token cache."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Options:
    """The config's keys that the data path reads; `limit` is the number of rows to use, 0 for all."""

    train_on: str | None
    max_seq_length: int
    on_overlong: str
    limit: int

    def as_dict(self) -> dict[str, Any]:
        """JSON values, for the cache's key and for another process."""
        return asdict(self)
