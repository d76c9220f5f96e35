"""Who talks with the worker: the front end on stdin and stdout, and one controller on the control socket."""

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from trainwire_protocol.errors import BadLine, LineTooLong
from trainwire_protocol.events import Event, Progress, Source, Step, Transport, type_name

from .outbox import MAX_RESPONSE_BACKLOG, Outbox
from .wire import LineReader, Writer

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
        max_backlog: int | None = None,
    ) -> None:
        self.read_fd = read_fd
        self.source: Source = source
        self._lines = LineReader()
        self._translate = translate
        self.input_open = read_fd >= 0
        self.outbox: Outbox | None = None
        if write_fd >= 0:
            limit = {} if max_backlog is None else {"max_backlog": max_backlog}
            self.outbox = Outbox(Writer(write_fd), encode if translate is None else self._encode_translated, **limit)

    def send(self, line: bytes, message: Event | Transport) -> None:
        """Queue a message; `line` is its native form."""
        if self.outbox is None:
            return
        if self._translate is not None:
            for translated in self._translate(message):
                self.outbox.put(translated, "translated")
        elif isinstance(message, Step | Progress):
            self.outbox.put(line, type_name(type(message)), message.seq, message)
        else:
            seq = message.seq if isinstance(message, Event) else None
            self.outbox.put(line, type_name(type(message)), seq)

    def replay(self, lines: Iterator[bytes]) -> None:
        """Send stored lines before all that waits; a translated connection has none."""
        if self.outbox is not None and self._translate is None:
            self.outbox.put_first(lines)

    def _encode_translated(self, message: Event | Transport) -> bytes:
        assert self._translate is not None
        return b"".join(self._translate(message))

    @property
    def wants_input(self) -> bool:
        """True while commands are read: not while too many responses are unread."""
        return self.input_open and (self.outbox is None or self.outbox.response_bytes < MAX_RESPONSE_BACKLOG)

    @property
    def output_gone(self) -> bool:
        """True once nobody reads the output any more."""
        return self.outbox is not None and self.outbox.writer.gone

    def close(self) -> None:
        """Let go of a controller's socket."""
        if self.outbox is not None:
            self.outbox.writer.close()
        os.close(self.read_fd)

    def receive(self) -> Iterator[bytes | BadLine | LineTooLong]:
        """Give the control lines that have arrived; at the end of input `input_open` becomes false."""
        try:
            data = os.read(self.read_fd, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            # EIO: a background job that reads from its terminal.
            data = b""
        if data:
            yield from self._lines.feed(data)
            return
        self.input_open = False
        rest = self._lines.end()
        if rest is not None:
            yield rest


class ControlSocket:
    """A Unix socket, for the owner only, by which another process steers the run."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="trainwire-"))
        self.path = self._folder / "control"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        old = os.umask(0o177)
        try:
            self._listener.bind(str(self.path))
        finally:
            os.umask(old)
        self._listener.listen(4)

    def fileno(self) -> int:
        """The descriptor that becomes readable when a controller knocks."""
        return self._listener.fileno()

    def accept(self) -> socket.socket | None:
        """Take the controller that knocked."""
        with contextlib.suppress(OSError):
            return self._listener.accept()[0]
        return None

    def close(self) -> None:
        """Remove the socket."""
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)
