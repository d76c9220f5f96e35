"""What passes between the desk that takes commands and the run that they steer."""

from typing import Any, Protocol

import msgspec

from trainwire_protocol import commands as c
from trainwire_protocol.channel import Order
from trainwire_protocol.events import Phase

from .connection import Connection


class Pending(msgspec.Struct):
    """A command that is not answered yet."""

    id: int | str | None
    cmd: str
    connection: Connection | None
    seq: int | None = None
    until: int | None = None
    """The step at which a `resume` that counts its updates pauses again, once it is answered."""
    steps: int | None = None
    """The updates that a `resume` counts."""


class Host(Protocol):
    """What the desk asks of the worker."""

    def start_run(self, command: c.Start, order: int) -> None:
        """Begin the run; the order is answered when it trains."""

    def check_config(self, command: c.Validate, order: int) -> None:
        """Check a config and its data."""

    def stop_run(self, pending: Pending, *, save: bool) -> None:
        """End the run because a client asks."""

    def give_order(self, order: Order) -> None:
        """Hand an order to the engine."""

    def enter(self, phase: Phase, message: str) -> None:
        """Change the phase, and say so."""

    def let_go(self) -> bool:
        """Let the run outlive its front end; false if it would have done so already."""

    def status_result(self) -> dict[str, Any]:
        """Give the snapshot for `status`."""

    def now_ms(self) -> int:
        """Give the time."""
