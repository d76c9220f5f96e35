"""While a run is prepared: progress goes out, and a stop, a worker that left or a lost rank ends it."""

from __future__ import annotations

from trainwire_engine.follow import Mute
from trainwire_engine.ranks import Alone
from trainwire_engine.reports import Reports
from trainwire_engine.resume import Past
from trainwire_protocol.channel import EngineChannel, StopOrder
from trainwire_protocol.errors import ShuttingDown


class Stopped(Exception):
    """A stop came, or the worker left, before there was anything to save."""

    def __init__(self, step: int, checkpoint: str | None) -> None:
        super().__init__("stopped")
        self.step = step
        self.checkpoint = checkpoint


class Watch:
    """Reports the progress of the preparation, and ends it when a stop arrives or the worker leaves."""

    def __init__(self, channel: EngineChannel | Mute, reports: Reports, past: Past | None, ranks: Alone) -> None:
        self._ranks = ranks
        self._channel = channel
        self._reports = reports
        self._step = reports.step = past.saved.state.step if past else 0
        self._checkpoint = str(past.folder) if past else None

    def check(self) -> None:
        """Raise Stopped if the run is not to go on, and the error of a rank that was lost."""
        self._ranks.tick()
        self._ranks.check()
        stop = any(isinstance(order, StopOrder) for order in self._channel.peek())
        if not stop and not self._channel.closed:
            return
        for order in self._channel.peek():
            if isinstance(order, StopOrder):
                result = {"outcome": "stopped", "step": self._step, "checkpoint": self._checkpoint}
                self._reports.answer(order.order, result)
            else:
                self._reports.refuse(order.order, ShuttingDown("The run is ending."))
        raise Stopped(self._step, self._checkpoint)

    def __call__(self, title: str, done: int, total: int, unit: str) -> None:
        """Report how far the tokenizing is."""
        self._reports.progress(title, done, total, unit)
        self.check()
