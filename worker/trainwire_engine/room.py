"""Room for what is done between two updates: where memory runs out, that of recorded passes is given back for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from trainwire_engine.failures import with_room
from trainwire_engine.model import Model
from trainwire_engine.reports import Reports
from trainwire_engine.step import UpdateStep

T = TypeVar("T")


class Room:
    """Gives memory that is kept between updates to other work, and says so."""

    def __init__(self, model: Model, step: UpdateStep, reports: Reports) -> None:
        self._model = model
        self._step = step
        self._reports = reports

    def make(self) -> bool:
        """Give back what is kept between updates, at the price of some time in the next ones; tells if that was any."""
        return self._step.give_back()

    def have(self, what: str, work: Callable[[], T]) -> T:
        """Do work whose results come from the weights alone; where memory runs out beside what is kept, once more."""

        def make() -> bool:
            made = self.make()
            if made:
                # The module's copies of the weights may be of what did not finish.
                self._model.release()
                self._reports.memory_given_back(what, self._reports.step)
            return made

        return with_room(work, make)
