"""What a person should hear about while a run goes on: a loss far above those before it, memory that runs short."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from trainwire_engine import memory

WINDOW, ENOUGH = 50, 20
"""Updates that a loss is compared with: the last so many, and no alarm before there are enough of them."""
DEVIATIONS, LEAST_NATS = 6.0, 0.5
"""How far above the mean a loss rings: by both, so that neither noise nor a loss near zero does."""
SHORT, RELIEVED = 0.05, 0.10
"""Shares of the device's memory: below the first it is short, above the second it is not any more."""

_INTERVAL = 1.0


@dataclass(frozen=True)
class Spike:
    """A loss in nats that is far above `mean`, that of the updates before."""

    loss: float
    mean: float


class LossAlarm:
    """Rings once for each rise of the loss; what was high joins the losses that the next ones are compared with."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._high = False

    def hear(self, loss: float) -> Spike | None:
        """Take note of an update's loss; gives the spike if one begins with it."""
        if not math.isfinite(loss):
            return None
        spike, was_high = self._judge(loss), self._high
        self._high = spike is not None
        self._losses.append(loss)
        return None if was_high else spike

    def _judge(self, loss: float) -> Spike | None:
        if len(self._losses) < ENOUGH:
            return None
        # Not by `statistics`, whose exact fractions take as long as all else between two updates of a small model.
        mean = sum(self._losses) / len(self._losses)
        deviation = math.sqrt(sum((loss - mean) ** 2 for loss in self._losses) / len(self._losses))
        above = max(DEVIATIONS * deviation, LEAST_NATS)
        return Spike(loss, mean) if loss > mean + above else None


class MemoryAlarm:
    """Rings when the memory that can still be had falls below a share of all, once until it is relieved."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._next = 0.0
        self._total = memory.total_memory()
        self._short = False

    def hear(self) -> int | None:
        """Give the bytes that are left if they have become few; looks at most once a second."""
        if self._now() < self._next:
            return None
        self._next = self._now() + _INTERVAL
        left = memory.available()
        if left >= RELIEVED * self._total:
            self._short = False
        if left >= SHORT * self._total or self._short:
            return None
        self._short = True
        return left
