"""Somebody who talks with the worker: the front end on stdin and stdout, or a controller on the control socket."""

import sys
import time
from collections.abc import Callable, Iterator

from trainwire_protocol.errors import BadLine, LineTooLong
from trainwire_protocol.events import Event, Response, Source, Transport

from .hello import MAX_BACKLOG, MAX_RESPONSE_BACKLOG
from .outbox import Outbox
from .wire import LineReader, Reader, Writer

Encode = Callable[[Event | Transport], bytes]
Translate = Callable[[Event | Transport], list[bytes]]


class Connection:
    """One reader of events and giver of commands."""

    def __init__(
        self,
        read_fd: int,
        write_fd: int,
        encode: Encode,
        *,
        source: Source,
        translate: Translate | None = None,
        lossless: bool = False,
    ) -> None:
        self._reader = Reader(read_fd)
        self.source: Source = source
        self._lines = LineReader()
        self._translate = translate
        self.input_open = read_fd >= 0
        self.outbox: Outbox | None = None
        if write_fd >= 0:
            # A translated reader is promised a line for each update.
            self.outbox = Outbox(
                Writer(write_fd),
                encode if translate is None else lambda message: b"".join(translate(message)),
                merge=translate is None and not lossless,
                max_backlog=sys.maxsize if lossless else MAX_BACKLOG,
            )

    def send(self, line: bytes, message: Event | Transport) -> None:
        """Queue a message; `line` is its native form."""
        if self.outbox is None:
            return
        if self._translate is None:
            self.outbox.put(line, message)
        else:
            for translated in self._translate(message):
                self.outbox.put(translated, message)

    def replay(self, lines: Iterator[bytes], answer: Response) -> None:
        """Send stored lines behind all that waits; a translated connection has none."""
        if self.outbox is not None and self._translate is None:
            self.outbox.put_replay(lines, answer)

    @property
    def read_fd(self) -> int:
        """The descriptor that becomes readable when a command arrives."""
        return self._reader.fd

    @property
    def wants_input(self) -> bool:
        """True while commands are read: not while too many responses are unread."""
        return self.input_open and (self.outbox is None or self.outbox.response_bytes < MAX_RESPONSE_BACKLOG)

    @property
    def output_gone(self) -> bool:
        """True once nobody reads the output any more."""
        return self.outbox is not None and self.outbox.writer.gone

    @property
    def waiting(self) -> bool:
        """True while lines wait to be read."""
        return self.outbox is not None and self.outbox.waiting

    @property
    def on_full_disk(self) -> bool:
        """True while a file that takes the output has no room, and it is too early to try again."""
        return self.waiting and self.outbox is not None and self.outbox.writer.full_until > time.monotonic()

    def close(self) -> None:
        """Let go of a controller's socket."""
        if self.outbox is not None:
            self.outbox.writer.close()
        self._reader.close()

    def receive(self) -> Iterator[bytes | BadLine | LineTooLong]:
        """Give the control lines that have arrived; at the end of input `input_open` becomes false."""
        data = self._reader.read(1 << 16)
        if data is None:
            return
        if data:
            yield from self._lines.feed(data)
            return
        self.input_open = False
        rest = self._lines.end()
        if rest is not None:
            yield rest
