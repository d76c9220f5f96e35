"""The scripted engine's end of the channel: orders in, reports out, in the way the script wants it."""

import socket
from collections import deque

from trainwire_protocol.channel import Alive, Answer, AnyOrder, EngineChannel, Order, Report
from trainwire_protocol.coalesce import merge_steps
from trainwire_protocol.errors import TrainwireError
from trainwire_protocol.events import Activity, Event, Step

HISTORY = 10_000


class Inbox:
    """Orders wait here until they are taken; updates are put together on their way out."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._channel = EngineChannel(connection)
        self._orders: deque[AnyOrder] = deque()
        self.ignore_orders = False
        self._pending_step: Step | None = None
        self._activity: Activity | None = None
        self.reported: deque[Step] = deque(maxlen=HISTORY)
        """The update reports since the last periodic checkpoint."""

    @property
    def closed(self) -> bool:
        """True once the worker is gone."""
        return self._channel.closed

    def _drain(self) -> None:
        while (order := self._channel.next(block=False)) is not None:
            if not self.ignore_orders:
                self._orders.append(order)

    def first(self) -> AnyOrder | None:
        """Wait for the first order, whatever the script says; None if the worker leaves before."""
        return self._channel.next(block=True)

    def take(self, *, block: bool) -> AnyOrder | None:
        """Take the oldest order; None if there is none, or, when blocking, once the worker is gone."""
        self._drain()
        while block and not self._orders and not self.closed:
            order = self._channel.next(block=True)
            if order is not None and not self.ignore_orders:
                self._orders.append(order)
        return self._orders.popleft() if self._orders else None

    def take_urgent(self, *kinds: type[Order]) -> AnyOrder | None:
        """Take the oldest order of these kinds, past the others."""
        self._drain()
        for order in self._orders:
            if isinstance(order, kinds):
                self._orders.remove(order)
                return order
        return None

    def await_order(self) -> None:
        """Block until an order waits or the worker is gone."""
        order = self.take(block=True)
        if order is not None:
            self._orders.appendleft(order)

    def step(self, event: Step, *, out: bool) -> None:
        """Report an update, now or together with later ones."""
        self._pending_step = event if self._pending_step is None else merge_steps(self._pending_step, event)
        if out:
            self.flush()
        else:
            self.sign_of_life(event.step)

    def flush(self) -> None:
        """Let a step event that waits for more updates go out as it is."""
        if self._pending_step is not None:
            event, self._pending_step = self._pending_step, None
            self.reported.append(event)
            self._channel.send(event)

    def emit(self, event: Event) -> None:
        """Report an event, behind the updates before it."""
        self.flush()
        self._channel.send(event)

    def report(self, report: Report) -> None:
        """Send a report that never reaches the wire."""
        self.flush()
        self._channel.send(report)

    def answer(self, order: int, **result: object) -> None:
        """Answer an order that took effect."""
        self.report(Answer(order=order, result=result))

    def refuse(self, order: int, error: TrainwireError) -> None:
        """Answer an order that failed."""
        details = error.details or None
        self.report(Answer(order=order, code=error.code, message=error.message, details=details, hint=error.hint))

    def alive(self, activity: Activity, step: int) -> None:
        """Give a sign of life when the activity changes."""
        if activity != self._activity:
            self._activity = activity
            self._channel.send(Alive(activity=activity, step=step))

    def sign_of_life(self, step: int) -> None:
        """Say that the work of the same activity goes on."""
        self._channel.send(Alive(activity=self._activity or "none", step=step))

    def raw(self, data: bytes) -> None:
        """Send bytes that no encoder made."""
        self._connection.sendall(data)

    def close(self) -> None:
        """Close the channel for good."""
        self._connection.shutdown(socket.SHUT_RDWR)
