"""Which examples make an update, and how an update is cut into micro-batches of few shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward: `tokens` int32 [rows, length] padded right, and its trained positions."""

    tokens: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    rows: tuple[int, ...]
    real_tokens: int


class Order:
    """The seeded order of a data set: position arithmetic alone says which rows make which update."""

    def __init__(
        self,
        examples: int,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        group_by_length: bool = False,
        lengths: np.ndarray | None = None,
    ) -> None:
        self.updates_per_epoch = -(-examples // batch_size)

    def rows(self, epoch: int, update: int) -> list[int]:
        """Dataset indices of the update `update` (from 0) of the epoch `epoch` (from 0)."""
        raise NotImplementedError


def plan(dataset: Any, rows: Sequence[int], micro_batch_tokens: int) -> list[MicroBatch]:
    """Cut the rows of an update into micro-batches under a budget of padded tokens."""
    raise NotImplementedError
