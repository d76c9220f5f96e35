"""Bytes in and out: control lines from a descriptor, printed lines to one that may be slow, full or gone."""

import errno
import os
import socket
import stat
from collections import Counter, deque
from collections.abc import Callable, Iterator

from trainwire_protocol.coalesce import merge_steps
from trainwire_protocol.codec import MAX_LINE_IN
from trainwire_protocol.errors import BadLine, LineTooLong
from trainwire_protocol.events import Gap, Progress, Step

MAX_BACKLOG = 8 << 20
"""Bytes of unread lines after which the backlog becomes one `gap`."""
MAX_RESPONSE_BACKLOG = 8 << 20
"""Bytes of unread responses after which no more commands are read."""
COALESCE_AFTER = 64
"""Unread lines after which `step` and `progress` lines are put together."""
_BOM = b"\xef\xbb\xbf"


class LineReader:
    """Cuts control lines out of a byte stream; a line that is too long, or cut off by the end, is an error."""

    def __init__(self, max_line: int = MAX_LINE_IN) -> None:
        self._max = max_line
        self._buffer = bytearray()
        self._skipping = False
        self._first = True

    def feed(self, data: bytes) -> Iterator[bytes | BadLine | LineTooLong]:
        """Give each line that ended in `data`, without its LF, or the error that stands for it."""
        for piece in _split(data):
            ended = piece.endswith(b"\n")
            if not self._skipping:
                self._buffer += piece
                if len(self._buffer) > self._max + ended:
                    self._skipping = True
                    self._buffer.clear()
                    yield LineTooLong(f"The line is longer than {self._max} bytes.", limit=self._max)
            if ended:
                if not self._skipping:
                    yield self._take()
                self._skipping = False

    def end(self) -> BadLine | None:
        """Answer a last line without LF: it may be half a command of a dying parent, so it is not executed."""
        if self._skipping or not self._buffer.strip():
            return None
        return BadLine("The last line has no line feed at its end, so it was not executed.")

    def _take(self) -> bytes:
        line = bytes(self._buffer[:-1])
        self._buffer.clear()
        if self._first:
            line = line.removeprefix(_BOM)
            self._first = False
        return line


def _split(data: bytes) -> list[bytes]:
    # bytes.splitlines would also split at a lone CR, which is no line end here.
    parts = data.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


class Writer:
    """Writes to a descriptor without ever waiting for its reader.

    The descriptor's own flags are left alone where they are shared with other processes.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.gone = False
        """True once nobody can read any more."""
        self._socket: socket.socket | None = None
        self._chunk: int | None = None
        mode = os.fstat(fd).st_mode
        if stat.S_ISSOCK(mode):
            self._socket = socket.socket(fileno=os.dup(fd))
        elif not stat.S_ISREG(mode):
            self._open_again(fd)

    def _open_again(self, fd: int) -> None:
        try:
            # A second open file description has flags of its own, so the reader's and our parent's stay as they are.
            self.fd = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            # Once select says so, a pipe or a terminal takes that many bytes without blocking.
            self._chunk = 512

    def write(self, data: bytes) -> int:
        """Write what fits now, and give its number of bytes; 0 if the reader lags or is gone."""
        try:
            if self._socket is not None:
                return self._socket.send(data, socket.MSG_DONTWAIT)
            return os.write(self.fd, data[: self._chunk] if self._chunk else data)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno == errno.EINTR:
                return 0
            self.gone = True
            return 0

    def close(self) -> None:
        """Let go of what was opened for writing."""
        if self._socket is not None:
            self._socket.close()

    @property
    def waits_for_select(self) -> bool:
        """True where a write is safe only after select has said so."""
        return self._chunk is not None


class _Item:
    """A line in the outbox; a step or progress keeps its message, since a later one may take it over."""

    __slots__ = ("kind", "line", "message", "seq")

    def __init__(self, line: bytes, kind: str, seq: int | None, message: Step | Progress | Gap | None) -> None:
        self.line = line
        self.kind = kind
        self.seq = seq
        self.message = message


class Outbox:
    """The lines that one reader has not taken yet: ordered, bounded, never in the way of training."""

    def __init__(
        self,
        writer: Writer,
        encode: Callable[[Step | Progress | Gap], bytes],
        *,
        max_backlog: int = MAX_BACKLOG,
        coalesce_after: int = COALESCE_AFTER,
    ) -> None:
        self.writer = writer
        self._encode = encode
        self._max_backlog = max_backlog
        self._coalesce_after = coalesce_after
        self._items: deque[_Item] = deque()
        self._first: deque[Iterator[bytes]] = deque()
        self._rest = b""
        self._last: dict[str, _Item] = {}
        self._lines = 0
        self._bytes = 0
        self.response_bytes = 0
        """Bytes of responses that wait to be read."""

    @property
    def lines(self) -> int:
        """Lines that wait to be read."""
        return self._lines

    @property
    def size(self) -> int:
        """Bytes that wait to be read."""
        return self._bytes + len(self._rest)

    def put(self, line: bytes, kind: str, seq: int | None = None, message: Step | Progress | None = None) -> None:
        """Add a line. `message` is given for lines that may be put together while the reader lags."""
        if self.writer.gone:
            return
        item = _Item(line, kind, seq, message)
        if message is not None:
            key = kind if isinstance(message, Step) else f"{kind}:{message.id}"
            if self._lines >= self._coalesce_after:
                self._take_over(item, key)
            self._last[key] = item
        self._items.append(item)
        self._lines += 1
        self._bytes += len(item.line)
        if kind == "response":
            self.response_bytes += len(line)
        elif self._bytes - self.response_bytes > self._max_backlog:
            self._fall_behind()

    def _take_over(self, item: _Item, key: str) -> None:
        older = self._last.get(key)
        if older is None or not older.line:
            return
        if isinstance(older.message, Step) and isinstance(item.message, Step):
            item.message = merge_steps(older.message, item.message)
            item.line = self._encode(item.message)
        self._lines -= 1
        self._bytes -= len(older.line)
        older.line = b""

    def _fall_behind(self) -> None:
        """Replace everything but the responses by one `gap`."""
        dropped = [item for item in self._items if item.line and item.kind != "response"]
        sequence = [item.seq for item in dropped if item.seq is not None]
        kept = [item for item in self._items if item.kind == "response" and item.line]
        counts: Counter[str] = Counter()
        low, high = min(sequence, default=0), max(sequence, default=0)
        for item in dropped:
            if item.kind == "gap" and isinstance(item.message, Gap):
                counts.update(item.message.counts)
                low = min(low or item.message.from_seq, item.message.from_seq)
                high = max(high, item.message.to_seq)
            else:
                counts[item.kind] += 1
        gap = Gap(from_seq=low, to_seq=high, counts=dict(counts), reason="slow_reader")
        marker = _Item(self._encode(gap), "gap", None, gap)
        self._items = deque([marker, *kept])
        self._last.clear()
        self._lines = len(self._items)
        self._bytes = sum(len(item.line) for item in self._items)

    def put_first(self, lines: Iterator[bytes]) -> None:
        """Send lines, made as the reader takes them, before everything that waits."""
        self._first.append(lines)

    @property
    def waiting(self) -> bool:
        """True if there is something to write and somebody to read it."""
        return not self.writer.gone and bool(self._rest or self._lines or self._first)

    def _next_line(self) -> bytes:
        if self._first:
            line = next(self._first[0], None)
            if line is None:
                self._first.popleft()
            return line or b""
        item = self._items.popleft()
        line, item.line = item.line, b""
        if line:
            self._lines -= 1
            self._bytes -= len(line)
            if item.kind == "response":
                self.response_bytes -= len(line)
        return line

    def flush(self) -> None:
        """Write as much as the reader takes now; each line goes out in one write unless the reader lags."""
        writer = self.writer
        while self.waiting:
            if not self._rest:
                self._rest = self._next_line()
                if not self._rest:
                    continue
            written = writer.write(self._rest)
            if not written:
                break
            self._rest = self._rest[written:]
            if writer.waits_for_select:
                break
        if writer.gone:
            self._items.clear()
            self._first.clear()
            self._last.clear()
            self._rest, self._lines, self._bytes, self.response_bytes = b"", 0, 0, 0


class TextWriter:
    """A stderr that cannot hold anybody up: what its reader does not take in time is dropped."""

    def __init__(self, fd: int, limit: int = 64 << 10) -> None:
        self._writer = Writer(fd)
        self._limit = limit
        self._rest = b""
        self._fd = fd

    def write(self, text: str) -> int:
        """Write text, as a file does."""
        self.write_bytes(text.encode("utf-8", "replace"))
        return len(text)

    def write_bytes(self, data: bytes) -> None:
        """Write bytes as they are."""
        if len(self._rest) + len(data) <= self._limit:
            self._rest += data
        self.flush()

    def flush(self) -> None:
        """Write what the reader takes now."""
        while self._rest and not self._writer.gone:
            written = self._writer.write(self._rest)
            if not written:
                return
            self._rest = self._rest[written:]

    def fileno(self) -> int:
        """Give the descriptor, by which a progress bar finds the terminal's width."""
        return self._fd

    def isatty(self) -> bool:
        """Say whether a person reads it on a terminal."""
        return os.isatty(self._fd)
