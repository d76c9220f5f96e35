"""The one place where events get their number and time, reach the log, and then the readers."""

import os
import time
from collections.abc import Callable

from trainwire_protocol.codec import encode_line
from trainwire_protocol.events import Event, Log, Transport

from .connection import Connection
from .eventlog import EventLog, Lost
from .wire import TextWriter


class Clock:
    """Tells the time in ms since the epoch; a scripted one counts, so that sessions can be compared."""

    SCRIPTED_START = 1_700_000_000_000

    def __init__(self, kind: str) -> None:
        self._next = self.SCRIPTED_START if kind == "scripted" else None
        self.started_ms = self.now_ms()

    def now_ms(self) -> int:
        """Give the time; a scripted clock goes on by one millisecond."""
        if self._next is None:
            return time.time_ns() // 1_000_000
        self._next += 1
        return self._next

    def pid(self) -> int:
        """Give the process id that the lines show; always 1 under a scripted clock."""
        return os.getpid() if self._next is None else 1


class Emitter:
    """Stamps, logs and hands out messages, in one order for the log and every reader."""

    def __init__(self, clock: Clock, max_line: int, watch: Callable[[Event], None], terminal: TextWriter) -> None:
        self._clock = clock
        self.max_line = max_line
        self._watch = watch
        self.terminal = terminal
        """The worker's stderr."""
        self.log: EventLog | None = None
        self.connections: list[Connection] = []
        self._batch: list[tuple[bytes, Event | Transport, Connection | None]] = []
        self._to_log: list[bytes] = []

    def encode(self, message: Event | Transport) -> bytes:
        """Encode a message for the wire."""
        return encode_line(message, self.max_line)

    def emit(self, event: Event) -> int | None:
        """Say an event to the log and to everybody; its `seq`, or None while no log is open."""
        event.ts = self._clock.now_ms()
        if self.log is not None:
            event.seq = self.log.next_seq()
        line = encode_line(event, self.max_line)
        if self.log is not None:
            self._to_log.append(line)
        self._batch.append((line, event, None))
        self._watch(event)
        return event.seq

    def say(self, message: Event | Transport, connection: Connection | None = None) -> None:
        """Say something that is not logged, to one connection or to all."""
        self._batch.append((self.encode(message), message, connection))

    def queue(self) -> tuple[int, int]:
        """Give the lines and bytes that the front end has not read yet."""
        outbox = self.connections[0].outbox if self.connections else None
        return (outbox.lines, outbox.size) if outbox else (0, 0)

    def commit(self) -> bool:
        """Write what was said since the last call, first to the log; True if there was anything."""
        log = self.log
        if log is not None and (self._to_log or log.degraded):
            self._write_log(log)
        if not self._batch:
            return False
        batch, self._batch = self._batch, []
        connections = self.connections
        for line, message, only in batch:
            if only is not None:
                only.send(line, message)
            else:
                for connection in connections:
                    connection.send(line, message)
        return True

    def _write_log(self, log: EventLog) -> None:
        was_degraded = log.degraded
        lines, self._to_log = self._to_log, []
        written = log.append(lines)
        if written == was_degraded:
            if written:
                self._say_recovered(log)
            else:
                message = "The log cannot be written; its lines wait in memory until the disk takes them."
                self.emit(Log(level="warn", code="log_degraded", message=message))
            lines, self._to_log = self._to_log, []
            log.append(lines)

    def _say_recovered(self, log: EventLog) -> None:
        lost, log.lost = log.lost, Lost()
        if lost.lines:
            message = f"The log is written again; {lost.lines} lines did not fit into memory and are lost."
            details = {"lost_lines": lost.lines, "last_lost_seq": lost.last_seq}
            self.emit(Log(level="error", code="log_degraded", message=message, details=details))
        else:
            self.emit(Log(level="info", code="log_recovered", message="The log is written again, nothing is missing."))
