"""The micro-batches of one update after another, each made while the device works on those before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainwire_engine.batches import MicroBatch, Order, plan
from trainwire_engine.ranks import Alone


@dataclass(frozen=True)
class Portion:
    """What an update is made of: its rows on all ranks, and this rank's micro-batches."""

    rows: list[int]
    micro_batches: list[MicroBatch]


class Feed:
    """Makes the portions of a run; which rows an update has follows from its place alone."""

    def __init__(self, dataset: Any, order: Order, config: Any, ranks: Alone) -> None:
        self._dataset = dataset
        self._order = order
        self._config = config
        self._ranks = ranks
        self._at = (0, 0)
        self._ahead: tuple[tuple[int, int], Portion] | None = None

    def take(self, epoch: int, update: int) -> Portion:
        """Give the portion of an update; both count from 0. Raises IndexError outside the epoch."""
        self._at, ahead, self._ahead = (epoch, update), self._ahead, None
        return ahead[1] if ahead is not None and ahead[0] == self._at else self._make(*self._at)

    def look_ahead(self) -> None:
        """Make the portion after the one that was taken last, unless that is done."""
        epoch, update = self._at
        following = (epoch, update + 1) if update + 1 < self._order.updates_per_epoch else (epoch + 1, 0)
        if self._ahead is None:
            self._ahead = (following, self._make(*following))

    def _make(self, epoch: int, update: int) -> Portion:
        rows, config = self._order.rows(epoch, update), self._config
        mine = self._ranks.share(self._dataset, rows, config)
        return Portion(rows, plan(self._dataset, mine, config.micro_batch_tokens or 0, packing=config.packing))
