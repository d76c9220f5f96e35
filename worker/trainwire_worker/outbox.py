"""The lines that wait for a reader: put together, then given up for one `gap`, when it lags."""

from collections import Counter, deque
from collections.abc import Callable, Iterator

from trainwire_protocol.coalesce import merge_steps
from trainwire_protocol.events import Event, Gap, Log, Progress, Response, Step, Transport, type_name

from .hello import MAX_BACKLOG
from .wire import Writer

COALESCE_AFTER = 512
"""Unread lines after which `step` and `progress` lines are put together."""
FLUSH_BYTES = 256 << 10
"""Bytes written in one go to a reader that takes everything, so that the others get their turn."""
REPLAY_BYTES = 4 << 10
"""What a replay that waits for its reader counts as unread responses."""
_COMPACT_AFTER = 1024

Message = Event | Transport


class _Item:
    """A line that waits, or the lines of a replay; `count` lines from `first_seq` on are put together in it."""

    __slots__ = ("count", "first_seq", "kind", "line", "message", "replay", "seq", "stale")

    def __init__(self, line: bytes, message: Message, replay: Iterator[bytes] | None = None) -> None:
        self.line = line
        self.kind = type(message)
        self.seq = message.seq if isinstance(message, Event) else None
        self.first_seq = self.seq
        self.count = 1
        self.message = message if self.kind in (Step, Progress, Gap) else None
        self.replay = replay
        self.stale = False

    @property
    def is_answer(self) -> bool:
        """True for what is never dropped."""
        return self.kind is Response or self.replay is not None


class Outbox:
    """The lines that one reader has not taken yet: ordered, bounded, never in the way of training.

    Without `merge`, steps and progress are not put together.
    """

    def __init__(
        self,
        writer: Writer,
        encode: Callable[[Message], bytes],
        *,
        merge: bool = True,
        max_backlog: int = MAX_BACKLOG,
    ) -> None:
        self.writer = writer
        self._encode = encode
        self._max_backlog = max_backlog
        self._merge = merge
        self._items: deque[_Item] = deque()
        self._rest = b""
        self._last: dict[str, _Item] = {}
        self._dead = 0
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

    @property
    def waiting(self) -> bool:
        """True if there is something to write and somebody to read it."""
        return bool(self._rest or self._lines) and not self.writer.gone

    def put(self, line: bytes, message: Message) -> None:
        """Send a line, in one write; it waits if the reader has not taken those before it."""
        writer = self.writer
        if writer.gone:
            return
        if not self._lines and not self._rest:
            written = writer.write(line)
            if written == len(line) or writer.gone:
                return
            if written:
                self._rest = line[written:]
                return
        item = _Item(line, message)
        if self._merge and isinstance(message, Event):
            self._put_together(item)
        self._append(item)
        if self._bytes - self.response_bytes > self._max_backlog:
            self._fall_behind()

    def put_replay(self, lines: Iterator[bytes], answer: Message) -> None:
        """Send stored lines, made as the reader takes them; `answer` is what they end with."""
        if not self.writer.gone:
            self._append(_Item(bytes(REPLAY_BYTES), answer, lines))
            self._last.clear()

    def _append(self, item: _Item) -> None:
        self._items.append(item)
        self._lines += 1
        self._bytes += len(item.line)
        if item.is_answer:
            self.response_bytes += len(item.line)

    def _put_together(self, item: _Item) -> None:
        """Let a step or a progress take over what the last one of its kind said.

        A step is never carried over an event that says where the run stands, such as `paused` or `epoch_end`.
        """
        message = item.message
        if isinstance(message, Step):
            key = "step"
        elif isinstance(message, Progress):
            key = f"progress:{message.id}"
        else:
            if item.kind is not Log:
                self._last.pop("step", None)
            return
        older = self._last.get(key)
        self._last[key] = item
        if older is None or not older.line or self._lines < COALESCE_AFTER:
            return
        if isinstance(older.message, Step) and isinstance(message, Step):
            item.message = merge_steps(older.message, message)
            item.stale = True
        item.count += older.count
        item.first_seq = older.first_seq
        self._lines -= 1
        self._bytes -= len(older.line)
        older.line = b""
        self._dead += 1
        if self._dead > _COMPACT_AFTER and self._dead > self._lines:
            self._items = deque(i for i in self._items if i.line)
            self._dead = 0

    def _fall_behind(self) -> None:
        """Replace everything but the answers by one `gap`."""
        counts: Counter[str] = Counter()
        low: int | None = None
        high = 0
        kept: list[_Item] = []
        for item in self._items:
            if item.is_answer:
                kept.append(item)
            elif item.line:
                if isinstance(item.message, Gap):
                    counts.update(item.message.counts)
                else:
                    counts[type_name(item.kind)] += item.count
                if item.first_seq is not None and item.seq is not None:
                    low = min(low or item.first_seq, item.first_seq)
                    high = item.seq
        gap = Gap(from_seq=low or 0, to_seq=high, counts=dict(counts), reason="slow_reader")
        marker = _Item(self._encode(gap), gap)
        marker.first_seq, marker.seq = low, high or None
        self._items = deque([marker, *kept] if marker.line else kept)
        self._last.clear()
        self._dead = 0
        self._lines = len(self._items)
        self._bytes = sum(len(item.line) for item in self._items)

    def _next_line(self) -> bytes:
        item = self._items[0]
        if item.replay is not None:
            line = next(item.replay, b"")
            if line:
                return line
        self._items.popleft()
        size = len(item.line)
        if not size:
            self._dead -= 1
            return b""
        self._lines -= 1
        self._bytes -= size
        if item.is_answer:
            self.response_bytes -= size
        line = b"" if item.replay is not None else item.line
        if item.stale and item.message is not None:
            line = self._encode(item.message)
        item.line = b""
        return line

    def flush(self) -> None:
        """Write what the reader takes now, each line in one write unless the reader lags."""
        writer = self.writer
        budget = FLUSH_BYTES
        while budget > 0 and (self._rest or self._lines):
            if not self._rest:
                self._rest = self._next_line()
            written = writer.write(self._rest) if self._rest else 0
            budget -= written
            if written < len(self._rest):
                self._rest = self._rest[written:]
                break
            self._rest = b""
        if writer.gone:
            self._items.clear()
            self._last.clear()
            self._rest, self._lines, self._bytes, self._dead, self.response_bytes = b"", 0, 0, 0, 0
