"""Stored lines that a client wants again, marked, and the response behind them."""

from collections.abc import Callable, Iterator

import msgspec
import orjson

from trainwire_protocol.codec import ascii_json, decode_stored
from trainwire_protocol.errors import NotFound
from trainwire_protocol.events import EVENT_TYPES, Event, Transport, type_name

_KNOWN = frozenset(type_name(kind) for kind in EVENT_TYPES)


def check_types(types: list[str] | None) -> None:
    """Raise NotFound if one is no event type."""
    unknown = [name for name in types or () if name not in _KNOWN]
    if unknown:
        raise NotFound(f"There is no event type {unknown[0][:64]!r}.", types=sorted(_KNOWN))


def marked_lines(
    stored: Iterator[bytes],
    id: int | str | None,
    encode: Callable[[Event | Transport], bytes],
    max_line: int,
    done: Callable[[int], bytes],
) -> Iterator[bytes]:
    """Mark stored lines as sent again for the command `id`; the last line is what `done` makes of their number."""
    count = 0
    for line in stored:
        event = {"replay": True} if id is None else {"cause": id, "replay": True}
        event = {**orjson.loads(line), **event}
        again = orjson.dumps(event) + b"\n"
        if not again.isascii() or b"\x7f" in again or len(again) > max_line:
            try:
                again = encode(decode_stored(event))
            except msgspec.ValidationError:
                # A later version's event, whose type this one does not know.
                again = ascii_json(event) + b"\n"
        count += 1
        yield again
    yield done(count)
