"""The run's state machine: orders go to the engine, its reports become events, and one cause decides the end."""

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trainwire_protocol import commands as c
from trainwire_protocol.channel import (
    Alive,
    Answer,
    AnyReport,
    Begin,
    Check,
    Order,
    PauseOrder,
    Report,
    StepHistory,
    StopOrder,
)
from trainwire_protocol.codec import PROTOCOL
from trainwire_protocol.errors import ConfigInvalid, EngineDied, Internal, TrainwireError, from_code
from trainwire_protocol.events import (
    Activity,
    Attempt,
    Checkpoint,
    Complete,
    End,
    Error,
    Event,
    Init,
    Log,
    Outcome,
    Paused,
    Phase,
    Resumed,
    Source,
    Status,
    Step,
)
from trainwire_protocol.rundir import CheckpointInfo, LockInfo, newest_whole_checkpoint
from trainwire_protocol.version import VERSION

from .desk import Desk, Pending
from .emitter import Clock, Emitter
from .engine_link import check_engine_installed, engine_command
from .engine_session import Departure, EngineSession
from .options import Options
from .prepare import Prepared, Request, prepare, request_from_arguments, request_from_command
from .snapshot import Snapshot
from .timers import Mailbox, Timers

_WORDS_FOR: dict[Activity, tuple[Phase, str]] = {
    "download": ("loading", "Downloading the model."),
    "load": ("loading", "Loading the model."),
    "tokenize": ("preparing", "Reading and tokenizing the data."),
    "compile": ("running", "Compiling the update for a new shape."),
}
LOW_DISK_FACTOR = 2
"""A warning is given when fewer checkpoints than this fit on the disk."""


@dataclass(frozen=True)
class Ending:
    """Why the run ends; the first cause decides."""

    outcome: Outcome
    reason: str
    exit_code: int
    error: TrainwireError | None = None


def _failure(error: TrainwireError) -> Ending:
    return Ending("failed", error.code, error.exit_code or 1, error)


def _invalid(code: str, message: str) -> dict[str, Any]:
    """Make the result of `validate` for data or a model that cannot be used."""
    return {"valid": False, "issues": [{"path": "", "code": code, "message": message}]}


class Run:
    """At most one run: from its config to its end."""

    def __init__(
        self,
        options: Options,
        emitter: Emitter,
        snapshot: Snapshot,
        clock: Clock,
        timers: Timers,
        mailbox: Mailbox,
    ) -> None:
        self._options = options
        self._emitter = emitter
        self._snapshot = snapshot
        self._clock = clock
        self._timers = timers
        self._mailbox = mailbox
        self.desk = Desk(emitter, snapshot, self)
        self.engine: EngineSession | None = None
        self.prepared: Prepared | None = None
        self.ended: Ending | None = None
        """Set when the last line is said."""
        self.control_path: str | None = None
        self.released = False
        """True once a client let the run outlive it."""
        self._request: Request | None = None
        self._ending: Ending | None = None
        self._start: Pending | None = None
        self._begin_order = 0
        self._checking: int | None = None
        self._early: list[Order] = []
        self._killed = False
        self._restarts = 0
        self._attempt = 0

    @property
    def active(self) -> bool:
        """True from the acceptance of a config until the end."""
        return self._request is not None and self.ended is None

    @property
    def checking(self) -> bool:
        """True while a `validate` command waits for its engine."""
        return self._checking is not None

    # Beginning

    def start_from_arguments(self) -> None:
        """Begin the run of `trainwire run`."""
        try:
            self._begin(request_from_arguments(self._options))
        except TrainwireError as error:
            self._conclude(_failure(error))

    def start_run(self, command: c.Start, pending: Pending) -> None:
        """Begin the run of a `start` command; it is answered when `init` is out."""
        self._start = pending
        try:
            request = request_from_command(
                command.config,
                self._options,
                resume=command.resume,
                overwrite=command.overwrite,
                linger=command.linger,
            )
        except TrainwireError as error:
            self.desk.file(pending)
            self._conclude(_failure(error))
            return
        self._begin(request)

    def _begin(self, request: Request) -> None:
        self._request = request
        self._begin_order = self.desk.file(self._start or Pending(None, "start", None))
        self.enter("loading", request.config.model)
        self._mailbox.work(
            lambda: prepare(request, self._options, lambda: self._ending is not None, self._announce),
            self._on_prepared,
        )

    def _announce(self, message: str) -> None:
        self._mailbox.post(lambda: self._log("info", message))

    def _log(self, level: str, message: str, code: str | None = None, **details: Any) -> None:
        self._emitter.emit(Log(level=level, message=message, code=code, details=details or None))  # type: ignore[arg-type]

    def _on_prepared(self, result: Prepared | BaseException | None) -> None:
        if isinstance(result, Prepared):
            self._open(result)
        if self._ending is not None:
            self._conclude(self._ending)
        elif isinstance(result, TrainwireError):
            self._conclude(_failure(result))
        elif isinstance(result, BaseException):
            raise result
        else:
            assert self.prepared is not None
            self._start_engine(self.prepared.resume_from)

    def _open(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self._emitter.log = prepared.log
        self._attempt = prepared.attempt - 1
        self._new_attempt(prepared.resume_from)
        if self._start is not None:
            request = prepared.request
            parameters = {"resume": request.config.resume, "overwrite": request.overwrite, "linger": request.linger}
            self.desk.record("start", parameters, "stdin", self._start.id)
        if prepared.log.past.cut_bytes:
            self._log(
                "warn",
                "The log ended in the middle of a line; that rest was cut off.",
                "log_repaired",
                bytes=prepared.log.past.cut_bytes,
            )
        for path, problem in prepared.passed_over:
            self._log("warn", f"The checkpoint {path} is passed over: {problem}.", "checkpoint_broken", path=str(path))
        self.describe_lock()

    def _new_attempt(self, resume_from: CheckpointInfo | None) -> None:
        assert self.prepared is not None
        self._attempt += 1
        self._snapshot.run_dir = self.prepared.request.config.run_dir
        self._emitter.emit(
            Attempt(
                run_id=self.prepared.run_id,
                attempt=self._attempt,
                protocol=PROTOCOL,
                worker=VERSION,
                pid=self._clock.pid(),
                resumed_from=str(resume_from.path) if resume_from else None,
                resumed_from_step=resume_from.step if resume_from else None,
            )
        )

    def _start_engine(self, resume_from: CheckpointInfo | None) -> None:
        assert self.prepared is not None
        try:
            self.engine = self._new_engine(self.prepared.lock.fd)
        except TrainwireError as error:
            self._conclude(_failure(error))
            return
        self.enter("loading", self.prepared.request.config.model)
        self.engine.send(
            Begin(
                order=self._begin_order,
                config=msgspec.to_builtins(self.prepared.request.config),
                run_id=self.prepared.run_id,
                attempt=self._attempt,
                resume_from=str(resume_from.path) if resume_from else None,
                linger=self.prepared.request.linger,
                offline=self._options.offline,
                trust_remote_code=self._options.trust_remote_code,
                hold_on_failed_save=self._options.mode == "serve",
            )
        )
        early, self._early = self._early, []
        for order in early:
            self.engine.send(order)

    def _new_engine(self, lock_fd: int) -> EngineSession:
        options = self._options
        command = engine_command(options.engine, options.script)
        return EngineSession(
            command, lock_fd, self._timers, self._emitter.terminal, self._on_report, options.exit_grace
        )

    def check_config(self, command: c.Validate, pending: Pending) -> None:
        """Answer `validate`: at once if the config is wrong, else when an engine has looked at the data."""
        try:
            request = request_from_command(command.config, self._options, resume=None, overwrite=False, linger=False)
            if self._options.engine == "mlx":
                check_engine_installed()
        except ConfigInvalid as error:
            self.desk.respond(pending, {"valid": False, "issues": error.details.get("issues", [])})
            return
        self.engine = self._new_engine(-1)
        self._checking = self.desk.file(pending)
        self.engine.send(
            Check(
                order=self._checking,
                config=msgspec.to_builtins(request.config),
                offline=self._options.offline,
                trust_remote_code=self._options.trust_remote_code,
            )
        )

    # Orders

    def give_order(self, order: Order) -> None:
        """Hand an order to the engine; one that comes before the engine is there is kept for it."""
        if self.engine is not None:
            self.engine.send(order)
        else:
            self._early.append(order)

    def stop_run(self, pending: Pending, *, save: bool) -> None:
        """End the run because a client asks."""
        self.desk.file(pending)
        self._stop(Ending("stopped", "stop", 0), save=save)

    def stop_because(self, ending: Ending, source: Source, parameters: dict[str, Any]) -> None:
        """End the run gracefully for a reason of the outside; a run that is ending already keeps its reason."""
        if self._ending is None and self.ended is None:
            self.desk.record("stop", parameters, source)
            self._stop(ending, save=True)

    def _stop(self, ending: Ending, *, save: bool) -> None:
        if self._ending is not None:
            return
        self._ending = ending
        lingering = self._snapshot.phase == "lingering"
        if lingering:
            self._ending = Ending("completed", "stop" if ending.exit_code == 0 else ending.reason, 0)
        if self._request is not None:
            self.enter("stopping", f"Stopping: {ending.reason}.")
        if self.engine is None or self._checking is not None:
            if self.engine is not None:
                self.kill_engine()
            if self._request is None or self.prepared is not None:
                self._conclude(self._ending)
            return
        self.engine.send(StopOrder(order=0, save=save))
        if not self._snapshot.attempt_started:
            self._timers.after(self._options.stop_grace, self._stop_before_first_update)

    def _stop_before_first_update(self) -> None:
        """Nothing is lost by ending an engine that has not trained yet and is too busy to listen."""
        if self.engine is not None and not self._snapshot.attempt_started and self.engine.finished is None:
            self._killed = True
            self.kill_engine()

    def let_go(self) -> bool:
        """Let the run outlive its front end; false if it would have done so already."""
        changed, self.released = not self.outlives, True
        return changed

    @property
    def outlives(self) -> bool:
        """True if the run goes on when its front end is gone."""
        return self.released or self._options.on_detach == "continue"

    def kill_engine(self) -> None:
        """End the engine now."""
        if self.engine is not None:
            self.engine.kill()

    def leave_now(self, ending: Ending) -> None:
        """End at once, without waiting for the engine."""
        self.kill_engine()
        self._conclude(ending)

    # Reports

    def _on_report(self, report: AnyReport) -> None:
        if type(report) is Step:
            self._emitter.emit(report)
        elif isinstance(report, Report):
            self._on_private(report)
        else:
            self._on_event(report)

    def _on_event(self, event: AnyReport) -> None:
        assert isinstance(event, Event)
        pending = self.desk.cause(event.cause if isinstance(event.cause, int) else None)
        event.cause = pending.id if pending else None
        if isinstance(event, Paused):
            self.desk.paused()
            self._snapshot.activity = "none"
            if self._ending is None:
                self.enter("paused", "Paused.")
        elif isinstance(event, Resumed):
            self._snapshot.activity = "train"
            self.enter("running", "Training.")
        elif isinstance(event, Complete) and self._prepared_request().linger and self._ending is None:
            self._snapshot.activity = "none"
            self.enter("lingering", "Finished; the model stays for eval and generate.")
        seq = self._emitter.emit(event)
        if pending is not None:
            pending.seq = seq
        if isinstance(event, Init):
            self.desk.set_effect(self._begin_order, seq)
            self._snapshot.activity = "train"
            if self._snapshot.phase in ("loading", "preparing"):
                self.enter("running", "Training.")
        elif isinstance(event, Checkpoint):
            self._check_disk(event)

    def _prepared_request(self) -> Request:
        assert self._request is not None
        return self._request

    def _on_private(self, report: Report) -> None:
        if isinstance(report, Answer):
            error = None
            if report.code is not None:
                error = from_code(report.code, report.message or "", hint=report.hint, **(report.details or {}))
            if report.order == self._checking and error is not None:
                self.desk.answer(report.order, _invalid(error.code, error.message), None)
            elif report.order:
                self.desk.answer(report.order, report.result, error)
        elif isinstance(report, Alive):
            self._on_alive(report)
        elif isinstance(report, StepHistory):
            self._complete_log(report)

    def _on_alive(self, report: Alive) -> None:
        if report.activity == self._snapshot.activity:
            return
        self._snapshot.activity = report.activity
        words = _WORDS_FOR.get(report.activity)
        if words is not None and self._checking is None:
            phase, message = words
            keeps = self._snapshot.phase not in ("loading", "preparing", "running") or report.activity == "compile"
            self.enter(self._snapshot.phase if keeps else phase, message)

    def _complete_log(self, history: StepHistory) -> None:
        """Append the updates that the log lacks, so that log and weights agree after a crash of the worker."""
        assert self.prepared is not None
        known = self.prepared.log.past.last_step
        for step in history.steps:
            if step.step > known and self._attempt == self.prepared.attempt:
                self._emitter.emit(step)

    def _check_disk(self, checkpoint: Checkpoint) -> None:
        try:
            free = shutil.disk_usage(checkpoint.path).free
        except OSError:
            return
        if free < LOW_DISK_FACTOR * checkpoint.bytes:
            self._log("warn", f"Only {free} bytes are left on the disk.", "low_disk", free_bytes=free)

    # The engine's end

    def check_engine(self) -> None:
        """Notice an engine that has left, and decide what follows."""
        departure = self.engine.departure() if self.engine is not None else None
        if departure is None:
            return
        self.engine = None
        if self._checking is not None:
            self._check_is_over(departure)
        elif self.ended is None:
            self._engine_left(departure)

    def _check_is_over(self, departure: Departure) -> None:
        order, self._checking = self._checking, None
        failed = departure.failed
        if order is not None and failed is not None:
            self.desk.answer(order, _invalid(failed.code, failed.message), None)
        elif order is not None:
            self.desk.answer(order, None, departure.as_error(None))
        self._snapshot.activity = "none"

    def _engine_left(self, departure: Departure) -> None:
        finished, failed = departure.finished, departure.failed
        if failed is not None:
            error = from_code(failed.code, failed.message, hint=failed.hint, **(failed.details or {}))
            self._conclude(_failure(error), checkpoint=failed.checkpoint)
        elif finished is not None and finished.outcome == "completed":
            reason = self._ending.reason if self._ending else "finished"
            self._conclude(Ending("completed", reason, 0), finished.step, finished.checkpoint)
        elif finished is not None and self._ending is not None:
            self._conclude(self._ending, finished.step, finished.checkpoint)
        elif self._killed and self._ending is not None:
            self._conclude(self._ending)
        else:
            self._engine_died(departure.as_error(self._snapshot.last_checkpoint))

    def _engine_died(self, error: EngineDied) -> None:
        if self._ending is not None or self._restarts >= self._options.restarts:
            self._conclude(_failure(error))
            return
        self._restarts += 1
        message = f"{error.message} Restart {self._restarts} of {self._options.restarts}."
        self._log("error", message, error.code, **error.details)
        # A start that is still open is answered by the attempt that gets as far as `init`.
        self.desk.close({}, error, keep=frozenset({"start"}))
        run_dir = Path(self._prepared_request().config.run_dir or "")
        self._mailbox.work(lambda: newest_whole_checkpoint(run_dir), self._restart)

    def _restart(self, found: tuple[CheckpointInfo | None, list[tuple[Path, str]]] | BaseException) -> None:
        if isinstance(found, BaseException):
            raise found
        if self._ending is not None:
            self._conclude(self._ending)
            return
        was_paused = self._snapshot.phase in ("pausing", "paused")
        self._new_attempt(found[0])
        self._start_engine(found[0])
        if was_paused and self.engine is not None:
            self.engine.send(PauseOrder(order=0))

    # The end

    def crash(self, error: BaseException) -> None:
        """End because of a bug in the worker itself."""
        self.kill_engine()
        problem = Internal(f"{type(error).__name__}: {error}", hint="This is a bug in trainwire; please report it.")
        self._conclude(_failure(problem))

    def end_idle(self, reason: str) -> None:
        """End a worker that has no run."""
        self._conclude(Ending("stopped", reason, 0))

    def _conclude(self, ending: Ending, step: int | None = None, checkpoint: str | None = None) -> None:
        """Say why, answer what is open, and say the last line."""
        if self.ended is not None:
            return
        step = self._snapshot.step if step is None else step
        checkpoint = checkpoint or self._snapshot.last_checkpoint
        if ending.error is not None:
            error = ending.error
            self._emitter.emit(
                Error(code=error.code, message=error.message, details=error.details or None, hint=error.hint)
            )
        result = {"outcome": ending.outcome, "step": step, "checkpoint": checkpoint}
        self.desk.close(result if ending.error is None else {}, ending.error)
        self._snapshot.phase = "ended"
        self._snapshot.activity = "none"
        resumable = ending.outcome != "completed" and self.prepared is not None
        self._emitter.emit(
            End(
                outcome=ending.outcome,
                reason=ending.reason,
                step=step,
                checkpoint=checkpoint,
                resumable=resumable,
                resume_args=self._request.resume_args if resumable and self._request else [],
                exit_code=ending.exit_code,
            )
        )
        self.ended = ending

    # What is said of it

    def enter(self, phase: Phase, message: str) -> None:
        """Change the phase, and say so."""
        self._snapshot.phase = phase
        if self._emitter.log is None:
            return
        self._emitter.emit(
            Status(phase=phase, message=message, activity=self._snapshot.activity, step=self._snapshot.step)
        )
        self.describe_lock()

    def describe_lock(self) -> None:
        """Write into the lock file who works on the run, and how it can be reached."""
        if self.prepared is None:
            return
        self.prepared.lock.describe(
            LockInfo(
                pid=os.getpid(),
                since_ms=self._clock.started_ms,
                run_id=self.prepared.run_id,
                phase=self._snapshot.phase,
                socket=self.control_path,
                engine_pid=self.engine.pid if self.engine else None,
            )
        )

    def status_result(self) -> dict[str, Any]:
        """Give the snapshot for `status`."""
        lines, size = self._emitter.queue()
        return {
            **self._snapshot.as_result(),
            "last_seq": self._emitter.log.last_seq if self._emitter.log else 0,
            "queue": {"lines": lines, "bytes": size},
            "loop_age_ms": self.loop_age_ms(),
            "engine_pid": self.engine.pid if self.engine else None,
        }

    def now_ms(self) -> int:
        """Give the time in ms since the epoch."""
        return self._clock.now_ms()

    def loop_age_ms(self) -> int:
        """Give the time since the engine's last sign of life."""
        return int((time.monotonic() - self.engine.last_report) * 1000) if self.engine else 0

    def close(self) -> None:
        """Let go of the log and the lock."""
        if self.engine is not None:
            self.engine.kill()
            self.engine.link.wait_dead()
        if self.prepared is not None:
            self.prepared.log.close()
            self.prepared.lock.release()
