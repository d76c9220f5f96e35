"""The handle on a run: an iterator of its events, its handlers, and its commands."""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from trainwire_protocol.events import Gap, RunEvent

from .commands import Commands
from .core import Core
from .delivery import Item
from .errors import ClientError, CommandTimeout, NoWorker
from .facts import Facts
from .handlers import Handlers
from .requests import OpenCommand
from .results import Result, Started

AnyEvent = RunEvent | Gap
"""What iteration gives: a run's events, and a `gap` where some could be had from nowhere."""


class Handle(Commands, Facts, Handlers, ABC):
    """A run: iterate over it for its events, call its commands, wait for its result, leave it by `with`.

    One thread at a time consumes events, by iterating or by `wait`; handlers run in that thread.
    """

    def __init__(self, core: Core, on_unknown: Callable[[dict[str, Any]], Any] | None) -> None:
        super().__init__()
        self._core = core
        self._on_unknown = on_unknown
        self._batch: deque[Item] = deque()
        self._consuming = threading.RLock()
        self._consumer: int | None = None
        self._start: OpenCommand | None = None

    def started(self, timeout: float | None = None) -> Started:
        """Wait until the run is ready to train. Raises CommandFailed if the start was refused."""
        if self._start is None:
            raise ClientError("This run was not started here.")
        started: Started = self._start.result(timeout)
        return started

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> AnyEvent:
        with self._consuming:
            self._consumer = threading.get_ident()
            event = self._next(None)
            if event is None:
                self._consumer = None
                if self._core.failure is not None and not isinstance(self._core.failure, NoWorker):
                    raise self._core.failure.with_traceback(None)
                raise StopIteration
            return event

    def _next(self, deadline: float | None) -> AnyEvent | None:
        """Give the next event, its handlers called; None at the end or when the time is over."""
        while True:
            while self._batch:
                item = self._batch.popleft()
                if not isinstance(item, dict):
                    for handler in self._concerned(item):
                        handler(item)
                    return item
                if self._on_unknown is not None:
                    self._on_unknown(item)
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            batch = self._core.delivery.take(timeout)
            if not batch and (deadline is not None or self._core.delivery.finished):
                return None
            self._batch.extend(batch)

    def wait(self, timeout: float | None = None) -> Result:
        """Wait for the run's end and give its result; the events that remain go to the handlers.

        While another thread iterates, they are left to it. Raises WorkerDied if there is no `end` line, and
        CommandTimeout after `timeout` seconds. A failed run is a result too: `wait().check()` raises for it.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not (self._core.ended.is_set() and self._core.delivery.finished and not self._batch):
            left = 0.2 if deadline is None else min(0.2, deadline - time.monotonic())
            if left <= 0:
                raise CommandTimeout(
                    f"The run did not end within {timeout:g} s. {self._core.doing()}",
                    cmd="wait",
                    timeout=timeout or 0,
                )
            if self._consumed_elsewhere():
                if self._core.ended.wait(left):
                    break
            elif self._consuming.acquire(timeout=left):
                try:
                    self._next(time.monotonic() + left)
                finally:
                    self._consuming.release()
        return self._core.result()

    def _consumed_elsewhere(self) -> bool:
        consumer = self._consumer
        if consumer is None or consumer == threading.get_ident():
            return False
        return any(thread.ident == consumer for thread in threading.enumerate())

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """Process id of the worker; None if there is none."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the run; one of our own is brought down."""

    @abstractmethod
    def detach(self) -> None:
        """Let go of the run, which goes on."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
