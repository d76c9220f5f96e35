"""The protocol without a process: bytes in, messages out, and commands as bytes."""

from collections.abc import Mapping
from typing import Any

import msgspec
import orjson

from trainwire_protocol.codec import decode_message
from trainwire_protocol.events import Hello, Message
from trainwire_protocol.limits import PROTOCOL

from .errors import ProtocolMismatch

MAX_LINE = 4 << 20
"""Bytes of a line that is still read; a longer one is thrown away as junk."""
_JUNK_KEPT = 4096


class Received(msgspec.Struct, frozen=True, gc=False):
    """One line that was read: a typed message, or a dict where its type is unknown; `size` in bytes."""

    message: Message | dict[str, Any]
    size: int


class Channel:
    """Cuts what a worker prints into messages, and numbers the commands that go to it.

    It splits on byte 0x0A only, holds half a line until the rest comes, and passes over what is no protocol line
    (`junk` counts it, `junk_tail` keeps the end of it). It raises ProtocolMismatch at a `hello` of another major.
    """

    def __init__(self) -> None:
        self.hello: Hello | None = None
        """The worker's first line, once it has come."""
        self.junk = 0
        self.junk_tail = b""
        self._parts: list[bytes] = []
        self._held = 0
        self._overlong = False
        self._next_id = 1

    def feed(self, data: bytes) -> list[Received]:
        """Add what was read, and give every message that is whole by now."""
        lines = data.split(b"\n")
        if len(lines) == 1:
            self._hold(data)
            return []
        if self._overlong:
            lines[0] = b""
            self._overlong = False
            self._count_junk(b"(a line of more than 4 MiB)")
        elif self._held:
            self._parts.append(lines[0])
            lines[0] = b"".join(self._parts)
        self._parts.clear()
        self._held = 0
        rest = lines.pop()
        if rest:
            self._hold(rest)
        received: list[Received] = []
        for line in lines:
            try:
                message = decode_message(line)
            except (ValueError, RecursionError, msgspec.MsgspecError):
                if line.strip():
                    self._count_junk(line)
                continue
            if self.hello is None:
                self._greet(message)
            received.append(Received(message, len(line)))
        return received

    def _hold(self, part: bytes) -> None:
        if self._overlong:
            return
        self._parts.append(part)
        self._held += len(part)
        if self._held > MAX_LINE:
            self._parts.clear()
            self._held = 0
            self._overlong = True

    def _count_junk(self, line: bytes) -> None:
        self.junk += 1
        self.junk_tail = (self.junk_tail + line[:_JUNK_KEPT] + b"\n")[-_JUNK_KEPT:]

    def _greet(self, message: Message | dict[str, Any]) -> None:
        if isinstance(message, Hello):
            theirs: Any = message.protocol
            self.hello = message
        elif isinstance(message, dict) and message["type"] == "hello":
            theirs = message.get("protocol")
        else:
            return
        if theirs != PROTOCOL or self.hello is None:
            raise ProtocolMismatch(
                f"The worker speaks protocol {theirs}, this client speaks protocol {PROTOCOL}:"
                " install versions of both that fit each other.",
                theirs=theirs,
                ours=PROTOCOL,
            )

    def command(self, cmd: str, parameters: Mapping[str, Any]) -> tuple[int, bytes]:
        """Give the id and the line of a command; parameters that are None are left out."""
        id_ = self._next_id
        self._next_id += 1
        fields = {key: value for key, value in parameters.items() if value is not None}
        return id_, orjson.dumps({"id": id_, "cmd": cmd, **fields}) + b"\n"
