"""The same client for asyncio: every blocking call is awaited, events come by `async for`.

>>> async with aio.launch("config.toml") as run:
...     async for event in run:
...         ...
...     result = await run.wait()

The reading is done by the client's own thread, so that a busy event loop never blocks the worker.
"""

import asyncio
import functools
import inspect
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Mapping
from types import TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar

from . import attaching, launching
from .async_commands import AsyncCommands
from .attaching import AttachedRun
from .delivery import Item
from .errors import ClientError, CommandTimeout, NoWorker
from .facts import Facts
from .handle import AnyEvent, Handle
from .handlers import Handlers
from .requests import OpenCommand
from .results import Result, Started
from .run import Run

P = ParamSpec("P")
AnyHandle = TypeVar("AnyHandle", bound=Handle)
AnyAsync = TypeVar("AnyAsync", bound="AsyncHandle[Any]")


class AsyncHandle(AsyncCommands, Facts, Handlers, Generic[AnyHandle]):
    """A run as seen from an event loop. `on` handlers may be functions or coroutine functions.

    One task at a time consumes events, by iterating or by `wait`. A call that is cancelled does not take its
    command back.
    """

    def __init__(self, handle: AnyHandle) -> None:
        super().__init__()
        self._handle = handle
        self._core = handle._core
        self._loop = asyncio.get_running_loop()
        self._more = asyncio.Event()
        self._batch: deque[Item] = deque()
        self._consuming = asyncio.Lock()
        self._consumer: asyncio.Task[Any] | None = None
        self._over = asyncio.Event()
        self._woken = False
        self._core.delivery.listen(self._wake)
        if self._core.ended.is_set():
            self._over.set()

    def _wake(self) -> None:
        # Called by the reading thread for every batch: the loop is bothered only if it has seen the one before.
        try:
            if not self._woken:
                self._woken = True
                self._loop.call_soon_threadsafe(self._more.set)
            if self._core.ended.is_set():
                self._loop.call_soon_threadsafe(self._over.set)
        except RuntimeError:
            # The loop is closed: nobody consumes any more.
            self._core.delivery.listen(None)

    def _begin(self, cmd: str, parameters: Mapping[str, Any]) -> OpenCommand:
        return self._handle._begin(cmd, parameters)

    async def started(self, timeout: float | None = None) -> Started:
        """Wait until the run is ready to train. Raises CommandFailed if the start was refused."""
        return await asyncio.to_thread(self._handle.started, timeout)

    async def _call_handlers(self, event: AnyEvent) -> None:
        for handler in self._concerned(event):
            outcome = handler(event)
            if inspect.isawaitable(outcome):
                await outcome

    async def _next(self) -> AnyEvent | None:
        """Give the next event, its handlers called; None at the end."""
        delivery = self._core.delivery
        while True:
            while self._batch:
                item = self._batch.popleft()
                if not isinstance(item, dict):
                    await self._call_handlers(item)
                    return item
                if self._handle._on_unknown is not None:
                    outcome = self._handle._on_unknown(item)
                    if inspect.isawaitable(outcome):
                        await outcome
            self._woken = False
            self._more.clear()
            batch = delivery.take(0)
            if batch:
                self._batch.extend(batch)
                # A loop that gets events without a pause would starve the other tasks.
                await asyncio.sleep(0)
            elif delivery.finished:
                return None
            else:
                await self._more.wait()

    def __aiter__(self) -> AsyncIterator[AnyEvent]:
        return self

    async def __anext__(self) -> AnyEvent:
        self._consumer = asyncio.current_task()
        async with self._consuming:
            event = await self._next()
        if event is None:
            self._consumer = None
            failure = self._core.failure
            if failure is not None and not isinstance(failure, NoWorker):
                raise failure.with_traceback(None)
            raise StopAsyncIteration
        return event

    async def wait(self, timeout: float | None = None) -> Result:
        """Wait for the run's end and give its result; the events that remain go to the handlers.

        While another task iterates, they are left to it. Raises WorkerDied if there is no `end` line, and
        CommandTimeout after `timeout` seconds.
        """
        began = time.monotonic()
        try:
            async with asyncio.timeout(timeout):
                while not (self._core.ended.is_set() and self._core.delivery.finished and not self._batch):
                    if self._consumed_elsewhere():
                        await self._over.wait()
                        break
                    async with self._consuming:
                        await self._next()
        except TimeoutError as error:
            if isinstance(error, ClientError):
                raise
            message = f"The run did not end within {time.monotonic() - began:.3g} s. {self._core.doing()}"
            raise CommandTimeout(message, cmd="wait", timeout=timeout or 0.0) from None
        return self._core.result()

    def _consumed_elsewhere(self) -> bool:
        consumer = self._consumer
        return consumer is not None and consumer is not asyncio.current_task() and not consumer.done()

    @property
    def pid(self) -> int | None:
        """Process id of the worker."""
        return self._handle.pid

    async def close(self) -> None:
        """Let go of the run, as the handle of the same name does: a run of our own is brought down."""
        await asyncio.shield(asyncio.to_thread(self._handle.close))

    async def detach(self) -> None:
        """Leave the run running without this process."""
        await asyncio.to_thread(self._handle.detach)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class AsyncRun(AsyncHandle[Run]):
    """A run of our own, for asyncio. Leaving its `async with` block stops it gracefully."""

    @property
    def stderr(self) -> str:
        """The last lines that the worker wrote to stderr, at most 64 KiB."""
        return self._handle.stderr

    @property
    def junk(self) -> int:
        """How many lines on the worker's stdout were no protocol lines."""
        return self._handle.junk

    async def kill(self) -> None:
        """Send SIGKILL to the worker and its engine: nothing is saved."""
        await asyncio.to_thread(self._handle.kill)


class AsyncAttachedRun(AsyncHandle[AttachedRun]):
    """A run of somebody else, or one that is over, for asyncio. Closing it only ends the following."""


class Opening(Generic[AnyAsync]):
    """A handle that is on its way: to be awaited, or entered by `async with`."""

    def __init__(self, opener: Callable[[], Coroutine[Any, Any, AnyAsync]]) -> None:
        self._opener = opener
        self._opened: AnyAsync | None = None

    def __await__(self) -> Generator[Any, Any, AnyAsync]:
        return self._opener().__await__()

    async def __aenter__(self) -> AnyAsync:
        self._opened = await self._opener()
        return self._opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._opened is not None:
            await self._opened.close()


async def _open(call: Callable[[], AnyHandle], wrap: Callable[[AnyHandle], AnyAsync]) -> AnyAsync:
    opening: Awaitable[AnyHandle] = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return wrap(await asyncio.shield(opening))
    except asyncio.CancelledError:
        # The thread cannot be stopped: what it opens in the end is closed again.
        handle = await opening
        await asyncio.to_thread(handle.close)
        raise


def _twin(call: Callable[P, AnyHandle], wrap: Callable[[AnyHandle], AnyAsync]) -> Callable[P, Opening[AnyAsync]]:
    @functools.wraps(call)
    def opening(*arguments: P.args, **options: P.kwargs) -> Opening[AnyAsync]:
        return Opening(lambda: _open(lambda: call(*arguments, **options), wrap))

    return opening


launch = _twin(launching.launch, AsyncRun)
attach = _twin(attaching.attach, AsyncAttachedRun)
