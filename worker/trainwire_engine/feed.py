"""The micro-batches of one update after another, each made while the device works on those before, and their shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from trainwire_engine.batches import MicroBatch, Order, plan, share, sizes
from trainwire_engine.forms import Rows
from trainwire_engine.palette import Palette, choose
from trainwire_engine.ranks import Alone
from trainwire_engine.shapes import Shapes, policy

_SAMPLE_UPDATES, _SAMPLE_ROWS = 300, 4096
"""Updates, and rows of them, whose micro-batches decide about a run's shapes: a third of a second's work."""
_SAMPLE_PIECE = 256
"""Rows of like length that are cut together in the sample; there are several micro-batches in them."""
_SAMPLE_KEYS = 2**21
"""Rows that may be put in order for the sample."""


@dataclass(frozen=True)
class Portion:
    """What an update is made of: its rows on all ranks, and this rank's micro-batches."""

    rows: list[int]
    micro_batches: list[MicroBatch]


class Feed:
    """Makes the portions of a run; which rows an update has follows from its place alone."""

    def __init__(
        self, dataset: Any, order: Order, config: Any, ranks: Alone, shapes: Shapes | Palette | None = None
    ) -> None:
        self._shapes = shapes
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

    def look_ahead(self) -> list[MicroBatch]:
        """Make the portion after the one that was taken last, unless that is done; gives its micro-batches."""
        epoch, update = self._at
        following = (epoch, update + 1) if update + 1 < self._order.updates_per_epoch else (epoch + 1, 0)
        if self._ahead is None:
            self._ahead = (following, self._make(*following))
        return self._ahead[1].micro_batches

    def _make(self, epoch: int, update: int) -> Portion:
        rows, config = self._order.rows(epoch, update), self._config
        mine = self._ranks.share(self._dataset, rows, config)
        tokens = config.micro_batch_tokens or 0
        return Portion(rows, plan(self._dataset, mine, tokens, self._shapes, packing=config.packing))


def shapes_of_run(
    dataset: Any,
    order: Order,
    config: Any,
    updates: int,
    ranks: int = 1,
    groups: int | None = None,
    device: Shapes | None = None,
) -> Shapes | Palette:
    """Decide about the shapes of a run of so many updates in all: chosen for its rows where passes are recorded.

    `groups` bounds those that the attention of packed rows works in, if the device's costs are not to.

    They follow from the whole run, so they are the same on every rank and after a resume.
    """
    device, tokens = device or policy(), config.micro_batch_tokens or 0
    if device.costs is None:
        return device
    count = max(1, min(updates, _SAMPLE_UPDATES, _SAMPLE_ROWS // config.batch_size))
    epochs = -(-updates // order.updates_per_epoch)
    every = -(-epochs * len(dataset) // _SAMPLE_KEYS)
    sample: list[Rows] = []
    looked_at = np.unique(np.linspace(0, max(0, updates - 1), count).astype(int)).tolist()
    for number in looked_at:
        epoch, update = divmod(number, order.updates_per_epoch)
        rows = order.rows(epoch // every * every, update)
        parts = [rows] if ranks == 1 else share(dataset, rows, ranks, tokens, device, packing=config.packing)
        sample += [piece for part in parts for piece in sizes(dataset, part).pieces(_SAMPLE_PIECE)]
    left_out = -(-sum(map(len, sample)) // (2 * _SAMPLE_ROWS))
    times = updates / len(looked_at) / ranks * len(sample) / len(sample[::left_out])
    inputs = np.maximum(1, np.asarray(dataset.lengths, np.int64) - 1)
    longest = Rows(inputs.max(keepdims=True), np.max(dataset.trained, keepdims=True).astype(np.int64))
    form = device.form(tokens, inputs, groups, packing=config.packing)
    return choose(form, sample[::left_out], longest, times, device)
