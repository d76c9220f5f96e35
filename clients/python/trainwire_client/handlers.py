"""Who is called for which event of a run."""

from collections.abc import Callable
from typing import Any, TypeVar

from trainwire_protocol.events import EVENT_TYPES, Event, Gap, type_name

from .errors import ClientError

Handler = TypeVar("Handler", bound=Callable[[Any], Any])
EVENT_NAMES: tuple[str, ...] = (*(type_name(kind) for kind in EVENT_TYPES), "gap", "*")


class Handlers:
    """What is called for a run's events, where they are consumed: in a thread, or in a task of an event loop."""

    def __init__(self) -> None:
        self._handlers: dict[str, list[Callable[[Any], Any]]] = {}

    def on(self, name: str, handler: Handler | None = None) -> Any:
        """Call `handler(event)` for each event of this type ("*": of any), in the thread or task that consumes.

        Without a handler it is a decorator. What a handler raises reaches the consumer; over asyncio, what it gives
        is awaited if it can be. Raises ClientError if there is no such event.
        """
        _check(name)
        if handler is None:
            return lambda function: self.on(name, function)
        self._handlers.setdefault(name, []).append(handler)
        return handler

    def off(self, name: str, handler: Callable[[Any], Any]) -> None:
        """Call `handler` no more."""
        _check(name)
        if handler in self._handlers.get(name, []):
            self._handlers[name].remove(handler)

    def _concerned(self, event: Event | Gap) -> list[Callable[[Any], Any]]:
        if not self._handlers:
            return []
        return [*self._handlers.get(event.type, ()), *self._handlers.get("*", ())]


def _check(name: str) -> None:
    if name not in EVENT_NAMES:
        raise ClientError(f"There is no event {name!r}. These are: {', '.join(EVENT_NAMES)}.")
