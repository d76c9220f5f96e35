"""From the thread that reads to the one that consumes: a bounded queue that puts step events together."""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from trainwire_protocol.coalesce import merge_steps
from trainwire_protocol.events import Gap, Progress, RunEvent, Step

Item = RunEvent | Gap | dict[str, Any]
"""What is delivered: an event, a gap that could not be filled, or an event of an unknown type as a dict."""
MAX_QUEUE_BYTES = 8 << 20
_BATCH = 256


def seq_of(item: Item) -> int | None:
    """Give an item's place in the log, if it has one."""
    if isinstance(item, dict):
        seq = item.get("seq")
        return seq if isinstance(seq, int) and not isinstance(seq, bool) else None
    return None if isinstance(item, Gap) else item.seq


class _Hole:
    """Events that are read from the log when the consumer gets there; without a log, `gap` is delivered."""

    __slots__ = ("first", "gap", "last")

    def __init__(self, first: int, last: int, gap: Gap | None) -> None:
        self.first, self.last, self.gap = first, last, gap


Refill = Callable[[int, int], Iterator[Item] | None]
"""Reads the log's events from one `seq` to another; None if there is no log to read."""


class Delivery:
    """Holds what was read until the consumer takes it.

    Beyond `max_events` waiting items neighbouring `step` events are merged and a `progress` replaces the one
    before it, as the worker does. Beyond 8 MiB the backlog is dropped and read from the log again when the
    consumer gets there, so the memory is bounded and, with a log, nothing is lost.
    """

    def __init__(self, max_events: int, refill: Refill) -> None:
        self._max_events = max_events
        self._refill = refill
        self._items: deque[tuple[Item | _Hole, int]] = deque()
        self._bytes = 0
        self._taken_seq = 0
        self._from_log: Iterator[Item] | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._listener: Callable[[], None] | None = None

    def put(self, items: list[tuple[Item, int]]) -> None:
        """Add items with their sizes in bytes, in the order of their `seq`."""
        with self._changed:
            queue = self._items
            for item, size in items:
                if len(queue) >= self._max_events and self._merge(item):
                    continue
                queue.append((item, size))
                self._bytes += size
            if self._bytes > MAX_QUEUE_BYTES:
                self._drop_backlog()
            self._changed.notify_all()
        if self._listener:
            self._listener()

    def put_hole(self, first: int, last: int, gap: Gap | None) -> None:
        """Mark events that are in the log but did not come."""
        with self._changed:
            self._items.append((_Hole(first, last, gap), 0))
            self._changed.notify_all()
        if self._listener:
            self._listener()

    def _merge(self, item: Item) -> bool:
        last, size = self._items[-1]
        merged: Item
        if isinstance(item, Step) and isinstance(last, Step):
            merged = merge_steps(last, item)
        elif isinstance(item, Progress) and isinstance(last, Progress) and item.id == last.id:
            merged = item
        else:
            return False
        self._items[-1] = (merged, size)
        return True

    def _drop_backlog(self) -> None:
        counts: Counter[str] = Counter()
        last = self._taken_seq
        for item, _ in self._items:
            if isinstance(item, _Hole):
                last = max(last, item.last)
                counts.update(item.gap.counts if item.gap else {})
            else:
                last = max(last, seq_of(item) or 0)
                kind = item["type"] if isinstance(item, dict) else item.type
                counts[str(kind)] += 1
        gap = Gap(from_seq=self._taken_seq + 1, to_seq=last, counts=dict(counts), reason="slow_reader")
        self._items.clear()
        self._bytes = 0
        self._items.append((_Hole(gap.from_seq, gap.to_seq, gap), 0))

    def close(self) -> None:
        """Say that nothing more will come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._listener:
            self._listener()

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Call `listener`, in the thread that adds, whenever something was added or the end has come."""
        self._listener = listener

    @property
    def finished(self) -> bool:
        """True once the end has come and everything before it was taken."""
        with self._changed:
            return self._closed and not self._items and self._from_log is None

    def __len__(self) -> int:
        return len(self._items)

    def take(self, timeout: float | None) -> list[Item]:
        """Give the next items, waiting for one up to `timeout` seconds (None: as long as it takes).

        An empty list says that the time is over or that nothing more will come (`finished`).
        """
        while True:
            if self._from_log is not None:
                batch = list(islice(self._from_log, _BATCH))
                if batch:
                    return batch
                self._from_log = None
            with self._changed:
                if not self._items and not self._closed:
                    self._changed.wait(timeout)
                if not self._items:
                    return []
                batch = self._take_batch()
                if batch:
                    self._changed.notify_all()
                    return batch
                hole, _ = self._items.popleft()
                assert isinstance(hole, _Hole)
                first = max(hole.first, self._taken_seq + 1)
                self._taken_seq = max(self._taken_seq, hole.last)
            self._from_log = self._refill(first, hole.last)
            found = list(islice(self._from_log or (), _BATCH))
            if found:
                return found
            self._from_log = None
            if hole.gap is not None:
                return [hole.gap]

    def _take_batch(self) -> list[Item]:
        batch: list[Item] = []
        queue = self._items
        while queue and len(batch) < _BATCH:
            item, size = queue[0]
            if isinstance(item, _Hole):
                break
            queue.popleft()
            self._bytes -= size
            batch.append(item)
        for item in reversed(batch):
            seq = seq_of(item)
            if seq is not None:
                self._taken_seq = max(self._taken_seq, seq)
                break
        return batch

    def wait_for_room(self, timeout: float) -> bool:
        """Wait until the consumer has taken enough for more to be added without merging."""
        with self._changed:
            if len(self._items) < self._max_events:
                return True
            self._changed.wait(timeout)
            return len(self._items) < self._max_events
