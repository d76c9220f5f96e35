"""What is known of the run, and how its phases and its end are said."""

import os
import time
from collections.abc import Callable
from typing import Any

from trainwire_protocol.events import End, Error, Level, Log, Phase, Status
from trainwire_protocol.rundir import LockInfo

from .desk import Desk
from .emitter import Clock, Emitter
from .ending import Ending
from .engine_session import EngineSession
from .options import Options
from .prepare import Prepared
from .request import Request
from .snapshot import Snapshot
from .timers import Mailbox, Timers


class RunState:
    """The run as far as it has come; shared by those who begin it, follow it and end it."""

    def __init__(
        self, options: Options, emitter: Emitter, snapshot: Snapshot, clock: Clock, timers: Timers, mailbox: Mailbox
    ) -> None:
        self.options = options
        self.emitter = emitter
        self.snapshot = snapshot
        self.clock = clock
        self.timers = timers
        self.mailbox = mailbox
        fixed = frozenset({"log_every"}) if options.dialect == "mlx-tui" else frozenset()
        self.desk = Desk(emitter, snapshot, fixed)
        self.request: Request | None = None
        """The checked config, once a run was asked for."""
        self.prepared: Prepared | None = None
        """The locked folder and its log, once they are open."""
        self.engine: EngineSession | None = None
        self.attempt = 0
        self.begin_order = 0
        """Number of the order that the engine begins with."""
        self.ending: Ending | None = None
        """Set when the run is to end."""
        self.ended: Ending | None = None
        """Set when the last line is said."""
        self.listen: Callable[[], str | None] = lambda: None
        """Opens the control socket and gives its path."""
        self.show_output: Callable[[bytes], None] = emitter.terminal.write_bytes
        """Shows people what the engine prints."""
        self.control_path: str | None = None

    def log(self, level: Level, message: str, code: str | None = None, **details: Any) -> None:
        """Say something that a person should know."""
        self.emitter.emit(Log(level=level, message=message, code=code, details=details or None))

    def enter(self, phase: Phase, message: str) -> None:
        """Change the phase, and say so."""
        self.snapshot.phase = phase
        if self.emitter.log is None:
            return
        self.emitter.emit(
            Status(phase=phase, message=message, activity=self.snapshot.activity, step=self.snapshot.step)
        )
        self.describe_lock()

    def describe_lock(self) -> None:
        """Write into the lock file who works on the run, and how it can be reached."""
        if self.prepared is None:
            return
        self.prepared.lock.describe(
            LockInfo(
                pid=os.getpid(),
                since_ms=self.clock.started_ms,
                run_id=self.prepared.run_id,
                phase=self.snapshot.phase,
                socket=self.control_path,
                engine_pid=self.engine.pid if self.engine else None,
            )
        )

    def conclude(self, ending: Ending, step: int | None = None, checkpoint: str | None = None) -> None:
        """Say why the run ends, answer what is open, and say the last line."""
        if self.ended is not None:
            return
        step = self.snapshot.step if step is None else step
        checkpoint = checkpoint or self.snapshot.last_checkpoint
        if ending.error is not None:
            error = ending.error
            self.emitter.emit(
                Error(code=error.code, message=error.message, details=error.details or None, hint=error.hint)
            )
        result = {"outcome": ending.outcome, "step": step, "checkpoint": checkpoint}
        self.desk.close(result if ending.error is None else {}, ending.error)
        self.snapshot.phase = "ended"
        self.snapshot.activity = "none"
        resumable = ending.outcome != "completed" and self.prepared is not None
        self.emitter.emit(
            End(
                outcome=ending.outcome,
                reason=ending.reason,
                step=step,
                checkpoint=checkpoint,
                resumable=resumable,
                resume_args=self.request.resume_args if resumable and self.request else [],
                exit_code=ending.exit_code,
            )
        )
        self.ended = ending

    def loop_age_ms(self) -> int:
        """Give the time since the engine's last sign of life."""
        return int((time.monotonic() - self.engine.last_report) * 1000) if self.engine else 0

    def as_result(self) -> dict[str, Any]:
        """Give the snapshot for `status`."""
        lines, size = self.emitter.queue()
        return {
            **self.snapshot.as_result(),
            "last_seq": self.emitter.log.last_seq if self.emitter.log else 0,
            "queue": {"lines": lines, "bytes": size},
            "open_ids": self.desk.open_ids,
            "loop_age_ms": self.loop_age_ms(),
            "engine_pid": self.engine.pid if self.engine else None,
        }
