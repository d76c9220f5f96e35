"""The other ranks' side of a run: the same loop, with rank 0 in the place of the worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from trainwire_engine.boundary import Boundary
from trainwire_engine.peers import Message
from trainwire_engine.team import Team
from trainwire_protocol.channel import AnyOrder, Report
from trainwire_protocol.events import Event


class Mute:
    """In place of the channel on a rank that has none: nobody listens, and no order comes."""

    closed = False

    def send(self, report: Report | Event) -> None:
        """Say nothing."""

    def pending(self) -> bool:
        """No order waits."""
        return False

    def peek(self) -> tuple[AnyOrder, ...]:
        """No order has arrived."""
        return ()

    def next(self, *, block: bool) -> AnyOrder | None:
        """No order comes."""
        return None


class Follower:
    """Says whether the run goes on, as orders.Control does on rank 0: it always does, until rank 0 ends it."""

    gone = False

    def __init__(self, team: Team, boundary: Boundary) -> None:
        self._team = team
        self._boundary = boundary
        team.handle = self._handle

    def serve(self) -> bool:
        """Where the control word calls for it, do what rank 0 does until it says that the run goes on."""
        if self._team.agreed:
            self._team.follow("go")
        return True

    def interrupted(self) -> bool:
        """True if the evaluation that runs was given up."""
        self._team.tick()
        return self._team.given_up()

    def _handle(self, message: Message) -> None:
        actions: dict[str, Callable[[Any], None]] = {
            "set": self._set,
            "evaluate": self._evaluate,
            "settle": self._settle,
        }
        actions[message[0]](message[1] if len(message) > 1 else None)

    def _set(self, values: dict[str, Any]) -> None:
        course = self._boundary.course
        course.config = msgspec.structs.replace(course.config, **values)

    def _evaluate(self, batches: int) -> None:
        self._boundary.take_part(batches, self.interrupted)

    def _settle(self, _: Any) -> None:
        self._boundary.settle()
