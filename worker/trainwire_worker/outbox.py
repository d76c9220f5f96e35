"""The lines that wait for a reader: put together, then given up for one `gap`, when it lags."""

from collections import Counter, deque
from collections.abc import Callable, Iterator

from trainwire_protocol.coalesce import merge_steps
from trainwire_protocol.events import Gap, Progress, Step

from .wire import Writer

MAX_BACKLOG = 8 << 20
"""Bytes of unread lines after which the backlog becomes one `gap`."""
MAX_RESPONSE_BACKLOG = 8 << 20
"""Bytes of unread responses after which no more commands are read."""
COALESCE_AFTER = 64
"""Unread lines after which `step` and `progress` lines are put together."""


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
