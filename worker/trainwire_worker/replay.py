"""Stored lines that a client wants again, marked, and the response behind them."""

from collections.abc import Callable, Iterator

import msgspec

from trainwire_protocol import commands as c
from trainwire_protocol.codec import decode_stored
from trainwire_protocol.errors import NotFound
from trainwire_protocol.events import EVENT_TYPES, Event, Response, Transport, type_name

from .eventlog import EventLog

_KNOWN = frozenset(type_name(kind) for kind in EVENT_TYPES)


def check_types(types: list[str] | None) -> None:
    """Raise NotFound if one is no event type."""
    unknown = [name for name in types or () if name not in _KNOWN]
    if unknown:
        raise NotFound(f"There is no event type {unknown[0]!r}.", types=sorted(_KNOWN))


def stored_lines(
    log: EventLog, command: c.Replay, id: int | str | None, encode: Callable[[Event | Transport], bytes]
) -> Iterator[bytes]:
    """Give the lines up to now, made as the reader takes them; the last one is the response."""
    to_seq = log.last_seq if command.to_seq is None else min(command.to_seq, log.last_seq)
    types = None if command.types is None else frozenset(command.types)
    return _lines(log, command.from_seq, to_seq, types, id, encode)


def _lines(
    log: EventLog,
    from_seq: int,
    to_seq: int,
    types: frozenset[str] | None,
    id: int | str | None,
    encode: Callable[[Event | Transport], bytes],
) -> Iterator[bytes]:
    count = 0
    for stored in log.replay(from_seq, to_seq, types):
        try:
            event = decode_stored(stored)
        except msgspec.ValidationError:
            # A later version's event: this one cannot mark it, so it leaves it out.
            continue
        count += 1
        event.replay = True
        event.cause = id
        yield encode(event)
    yield encode(Response(id=id, cmd="replay", ok=True, result={"count": count}))
