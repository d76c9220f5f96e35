"""One engine from its start to its departure: what it reports is handed on, what it leaves behind is summed up."""

import os
import time
from collections.abc import Callable

import msgspec

from trainwire_protocol.channel import AnyReport, Failed, Finished, Order
from trainwire_protocol.errors import EngineDied

from .engine_link import EngineLink, engine_command
from .options import Options
from .signals import signal_name
from .timers import Timers


class Departure(msgspec.Struct, frozen=True):
    """How an engine left: its exit status (negative for a signal), its last word if it had one, what it printed."""

    status: int
    finished: Finished | None
    failed: Failed | None
    printed: list[str]
    trouble: str | None = None
    """What the worker ended it for, if it did."""

    def as_error(self, checkpoint: str | None) -> EngineDied:
        """Describe a departure without a last word."""
        name = signal_name(-self.status) if self.status < 0 else None
        hint = "What it printed last is in the details."
        how = f"signal {name}" if name else f"exit status {self.status}"
        if self.trouble is not None:
            how = self.trouble
        elif name == "SIGKILL":
            hint = "Nobody here asked for it: the system may have run out of memory. Lower micro_batch_tokens."
        return EngineDied(
            f"The engine died: {how}.",
            hint=hint,
            signal=name,
            exit_status=None if name else self.status,
            stderr=self.printed,
            checkpoint=checkpoint,
        )


class EngineSession:
    """The engine that runs now. `on_report` gets every report but the last word."""

    def __init__(
        self,
        command: list[str],
        lock_fd: int,
        timers: Timers,
        show_output: Callable[[bytes], None],
        on_report: Callable[[AnyReport], None],
        exit_grace: float,
    ) -> None:
        self.link = EngineLink(command, lock_fd)
        self._timers = timers
        self._show_output = show_output
        self._on_report = on_report
        self._exit_grace = exit_grace
        self._leaving = False
        self._trouble: str | None = None
        self.finished: Finished | None = None
        self.failed: Failed | None = None
        self.last_report = time.monotonic()

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self.link.pid

    def send(self, order: Order) -> None:
        """Give an order."""
        self.link.send(order)

    def kill(self) -> None:
        """End it now."""
        self.link.kill()

    def read_reports(self) -> None:
        """Handle what it has reported."""
        self.last_report = time.monotonic()
        for report in self.link.receive():
            if isinstance(report, Finished):
                self.finished = report
                self._expect_exit()
            elif isinstance(report, Failed):
                self.failed = report
                self._expect_exit()
            else:
                self._on_report(report)
        if self.link.closed:
            self._trouble = self._trouble or self.link.broken
            self._expect_exit()

    def _expect_exit(self) -> None:
        """A driver can hang when a process leaves: it gets a bounded time."""
        if not self._leaving:
            self._leaving = True
            self._timers.after(self._exit_grace, self._lose_patience)

    def _lose_patience(self) -> None:
        if self.link.exit_status() is None:
            if self._trouble is None:
                self._trouble = f"it closed its channel and did not leave within {self._exit_grace:g} s"
            self.link.kill()

    def abandon(self) -> None:
        """Leave it to itself: it saves and leaves when its channel is closed."""
        self.link.close()

    def read_output(self) -> None:
        """Pass on what it printed."""
        while self.link.output >= 0 and (data := self.link.read_output()) is not None:
            if not data:
                self.link.close_output()
                return
            self._show_output(data)

    def departure(self) -> Departure | None:
        """Give how it left, with everything that it had still said; None while it lives."""
        status = self.link.exit_status()
        if status is None:
            return None
        received = -1
        while not self.link.closed and received != self.link.received:
            received = self.link.received
            self.read_reports()
        self.read_output()
        self.link.close()
        return Departure(status, self.finished, self.failed, self.link.tail_lines(), self._trouble)


def start_engine(
    options: Options,
    lock_fd: int,
    timers: Timers,
    show_output: Callable[[bytes], None],
    on_report: Callable[[AnyReport], None],
    *,
    ranks: bool = False,
) -> EngineSession:
    """Start the engine that the arguments name, with `ranks` on as many as they say. Raises EngineUnavailable."""
    if ranks and (options.ranks > 1 or options.hostfile is not None):
        from .launch import command as launch_command

        command = launch_command(options.ranks, options.hostfile, options.backend, options.rank_timeout)
    else:
        command = engine_command(options.engine, options.script)
        # It may be a rank that somebody else's launcher started.
        os.environ["TRAINWIRE_RANK_TIMEOUT"] = f"{options.rank_timeout:g}"
    return EngineSession(command, lock_fd, timers, show_output, on_report, options.exit_grace)
