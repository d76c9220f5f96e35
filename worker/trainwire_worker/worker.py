"""The worker's loop: descriptors, signals and timers in one thread."""

import time
import traceback
from collections.abc import Callable

import msgspec

from trainwire_protocol.events import Event, Heartbeat, Hello, Queue

from .connection import Connection
from .control import Controllers
from .dialect import translator
from .emitter import Clock, Emitter
from .ending import last_words
from .hello import hello_fields
from .options import Options
from .presence import Presence
from .ready import wait_ready
from .run import Run
from .signals import Signals
from .sleep import SleepWatch
from .snapshot import Snapshot
from .terminal import Terminal
from .timers import Mailbox, Timers
from .wire import FULL_DISK_PAUSE, TextWriter


class Worker:
    """One worker process: it never blocks, whatever its readers, its engine or its parent do.

    `greeted` says that `hello` is out already.
    """

    def __init__(self, options: Options, stdin: int, stdout: int, stderr: TextWriter, *, greeted: bool = False) -> None:
        self._greeted = greeted
        self._options = options
        self._started = time.monotonic()
        self._clock = Clock(options.clock)
        self._snapshot = Snapshot()
        self._terminal = Terminal(stderr, options.progress)
        self._emitter = Emitter(self._clock, options.max_line, self._observe, stderr)
        self._timers = Timers()
        self._mailbox = Mailbox()
        self._signals = Signals()
        self._run = Run(options, self._emitter, self._snapshot, self._clock, self._timers, self._mailbox)
        self._front = Connection(
            stdin,
            stdout,
            self._emitter.encode,
            source="stdin",
            translate=translator(options.dialect, options.max_line),
            lossless=options.backpressure == "block",
        )
        self._emitter.connections.append(self._front)
        self._controllers = Controllers(self._emitter, self._run.state.desk, self._say_hello)
        self._run.state.listen = self._controllers.open
        self._run.state.show_output = self._terminal.pass_on
        self._presence = Presence(options, self._run, self._timers, self._controllers)
        self._sleep = SleepWatch()
        self._last_line = self._started
        self._heartbeat_on = options.mode == "serve"

    def run(self) -> int:
        """Serve until the last line; the exit code."""
        if not self._greeted:
            self._say_hello(None)
        try:
            self._begin()
            while self._run.state.ended is None:
                self._turn()
            self._emitter.commit()
        except Exception as error:
            self._crash(error)
        self._drain(self._options.flush_grace)
        self._terminal.close()
        self._run.close()
        self._controllers.close()
        ended = self._run.state.ended
        return ended.exit_code if ended is not None else 1

    def _begin(self) -> None:
        if self._options.mode == "run":
            self._run.beginning.from_arguments()
        self._presence.watch_parent()
        if self._options.heartbeat:
            self._beat()
        if not self._front.input_open:
            self._presence.end_of_input()

    def _crash(self, error: Exception) -> None:
        """End because of a bug here: still with a reason and a last line, whatever is broken."""
        self._emitter.terminal.write(traceback.format_exc())
        try:
            self._run.crash(error)
            self._emitter.commit()
        except Exception:
            self._emitter.terminal.write(traceback.format_exc())
            for message in last_words(error, self._clock.now_ms()):
                self._front.send(self._emitter.encode(message), message)

    def _turn(self) -> None:
        """Say what is to be said, wait for something to happen, handle it."""
        if self._emitter.commit():
            self._last_line = time.monotonic()
        if self._front.output_gone:
            self._presence.detach("nobody reads stdout any more")
        self._controllers.look_after()
        self._presence.settle()
        if self._run.state.ended is not None:
            return
        reading, writing = self._descriptors()
        ready, writable = wait_ready(reading, writing, self._seconds_left())
        for fd in writable:
            writing[fd]()
        for fd in ready:
            reading[fd]()
        if (seconds := self._sleep.slept()) is not None and self._run.active:
            self._run.state.log(
                "info", f"The machine slept for {seconds:.0f} s.", "system_slept", seconds=round(seconds)
            )
        self._timers.run_due()
        if self._signals.fileno() in ready or self._run.engine_is_closing:
            self._run.check_engine()

    def _seconds_left(self) -> float | None:
        left = self._timers.seconds_left()
        if any(connection.on_full_disk for connection in self._emitter.connections):
            return FULL_DISK_PAUSE if left is None else min(left, FULL_DISK_PAUSE)
        return left

    def _descriptors(self) -> tuple[dict[int, Callable[[], None]], dict[int, Callable[[], None]]]:
        """Give what can be read and written now, each with what is done then."""
        reading: dict[int, Callable[[], None]] = {
            self._signals.fileno(): lambda: self._presence.signals(self._signals.received()),
            self._mailbox.fileno(): self._mailbox.run,
        }
        writing: dict[int, Callable[[], None]] = {}
        for connection in self._emitter.connections:
            if connection.wants_input:
                reading[connection.read_fd] = self._on_front if connection is self._front else self._on_controller
            if connection.outbox is not None and connection.waiting and not connection.on_full_disk:
                writing[connection.outbox.writer.fd] = connection.outbox.flush
        if self._controllers.listening >= 0:
            reading[self._controllers.listening] = self._controllers.answer_knock
        engine = self._run.state.engine
        if engine is not None:
            link = engine.link
            if link.output >= 0:
                reading[link.output] = engine.read_output
            if not link.closed:
                # With --backpressure=block the engine waits, and so does training, until the reader took everything.
                if self._options.backpressure != "block" or not self._front.waiting:
                    reading[link.channel.fileno()] = engine.read_reports
                if link.has_unsent:
                    writing[link.channel.fileno()] = link.flush
        return reading, writing

    def _drain(self, seconds: float) -> None:
        """Wait until the readers have taken everything, at most so many seconds."""
        deadline = time.monotonic() + seconds
        for connection in self._emitter.connections:
            # A disk that was full a moment ago may have room now.
            if connection.on_full_disk and connection.outbox is not None:
                connection.outbox.flush()
        while (left := deadline - time.monotonic()) > 0:
            waiting = [x.outbox for x in self._emitter.connections if x.outbox and x.waiting and not x.on_full_disk]
            if not waiting:
                return
            wait_ready([], [outbox.writer.fd for outbox in waiting], left)
            for outbox in waiting:
                outbox.flush()

    # What is said

    def _observe(self, event: Event) -> None:
        self._snapshot.observe(event)
        self._terminal.show(event)

    def _say_hello(self, connection: Connection | None) -> None:
        hello = msgspec.convert(hello_fields(self._options), Hello)
        self._emitter.say(hello, connection)
        self._emitter.commit()

    def _beat(self) -> None:
        """Give a sign of life if nothing was said for the interval."""
        interval = self._options.heartbeat
        silent = time.monotonic() - self._last_line
        if silent >= interval:
            silent = 0.0
            if self._heartbeat_on:
                lines, size = self._emitter.queue()
                self._emitter.say(
                    Heartbeat(
                        ts=self._clock.now_ms(),
                        phase=self._snapshot.phase,
                        activity=self._snapshot.activity,
                        step=self._snapshot.step,
                        last_seq=self._emitter.log.last_seq if self._emitter.log else 0,
                        up_ms=int((time.monotonic() - self._started) * 1000),
                        loop_age_ms=self._run.state.loop_age_ms(),
                        queue=Queue(lines=lines, bytes=size),
                    )
                )
        self._timers.after(interval - silent, self._beat)

    # Who gives orders

    def _on_front(self) -> None:
        self._take_lines(self._front)
        if not self._front.input_open:
            self._presence.end_of_input()

    def _on_controller(self) -> None:
        if self._controllers.current is not None:
            self._take_lines(self._controllers.current)

    def _take_lines(self, connection: Connection) -> None:
        for line in connection.receive():
            if self._run.state.desk.take(line, connection):
                self._heartbeat_on = True
            if self._run.state.ended is not None:
                return
