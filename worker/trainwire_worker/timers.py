"""What wakes the loop besides descriptors: deadlines, and results of work done in a thread."""

import heapq
import itertools
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Timers:
    """Calls that are due at a time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call once, so many seconds from now."""
        heapq.heappush(self._heap, (time.monotonic() + seconds, next(self._order), call))

    def seconds_left(self) -> float | None:
        """Give the time until the next call is due; None if none is."""
        return max(0.0, self._heap[0][0] - time.monotonic()) if self._heap else None

    def run_due(self) -> None:
        """Make the calls whose time has come; those that they ask for wait for the next turn, however soon."""
        now = time.monotonic()
        while self._heap and self._heap[0][0] <= now:
            heapq.heappop(self._heap)[2]()


class Mailbox:
    """Work that may block (hashing a checkpoint, waiting for a lock) done in a thread, its result in the loop."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._done: deque[Callable[[], None]] = deque()

    def fileno(self) -> int:
        """The descriptor that becomes readable when a result waits."""
        return self._receiver.fileno()

    def post(self, call: Callable[[], None]) -> None:
        """Have the loop make a call; may be used from any thread."""
        self._done.append(call)
        self._sender.send(b"\0")

    def work(self, job: Callable[[], T], then: Callable[[T | BaseException], None]) -> None:
        """Do a job in a thread of its own, then hand its result or exception to the loop."""

        def target() -> None:
            try:
                result: T | BaseException = job()
            except BaseException as error:
                result = error
            self.post(lambda: then(result))

        threading.Thread(target=target, daemon=True).start()

    def run(self) -> None:
        """Make the calls that wait."""
        self._receiver.recv(4096)
        while self._done:
            self._done.popleft()()
