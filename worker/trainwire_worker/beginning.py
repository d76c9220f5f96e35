"""The beginning of a run and of each attempt at it: from a config to an engine that has its first order."""

from pathlib import Path

import msgspec

from trainwire_protocol import commands as c
from trainwire_protocol.channel import Begin, Order
from trainwire_protocol.errors import TrainwireError
from trainwire_protocol.events import Attempt
from trainwire_protocol.limits import PROTOCOL
from trainwire_protocol.rundir import CheckpointInfo
from trainwire_protocol.version import VERSION

from .ending import failure, from_os_error
from .engine_session import start_engine
from .host import Pending
from .prepare import Prepared, prepare
from .reports import Reports
from .request import Request, request_from_arguments, request_from_command
from .state import RunState


class Beginning:
    """Takes a run from its config to an engine that trains; a restart comes in at the engine."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._reports = Reports(state)
        self._early: list[Order] = []

    def from_arguments(self) -> None:
        """Begin the run of `trainwire run`."""
        try:
            request = request_from_arguments(self._state.options)
        except TrainwireError as error:
            self._state.conclude(failure(error))
            return
        self._begin(request, self._state.desk.file(Pending(None, "start", None)))

    def from_command(self, command: c.Start, order: int) -> None:
        """Begin the run of a `start` command; it is answered when `init` is out."""
        state = self._state
        try:
            request = request_from_command(
                command.config,
                state.options,
                resume=command.resume,
                overwrite=command.overwrite,
                linger=command.linger,
            )
        except TrainwireError as error:
            state.conclude(failure(error))
            return
        self._begin(request, order)

    def keep(self, order: Order) -> None:
        """Keep an order for the engine that is about to start."""
        self._early.append(order)

    def _begin(self, request: Request, order: int) -> None:
        state = self._state
        state.request = request
        state.begin_order = order
        state.enter("loading", request.config.model)
        state.mailbox.work(
            lambda: prepare(request, state.options, lambda: state.ending is not None, self._announce),
            self._on_prepared,
        )

    def _announce(self, message: str) -> None:
        self._state.mailbox.post(lambda: self._state.log("info", message))

    def _on_prepared(self, result: Prepared | BaseException | None) -> None:
        state = self._state
        if isinstance(result, Prepared):
            self._open(result)
        if state.ending is not None:
            state.conclude(state.ending)
        elif isinstance(result, TrainwireError):
            state.conclude(failure(result))
        elif isinstance(result, OSError):
            state.conclude(failure(from_os_error(result)))
        elif isinstance(result, BaseException):
            raise result
        else:
            assert state.prepared is not None
            self._start_engine(state.prepared.resume_from)

    def _open(self, prepared: Prepared) -> None:
        state = self._state
        state.prepared = prepared
        state.emitter.log = prepared.log
        state.attempt = prepared.attempt - 1
        state.control_path = state.listen()
        first_seq = prepared.log.last_seq + 1
        self._say_attempt(prepared.resume_from)
        if state.options.tracker:
            from .trackers import start_trackers

            folder = prepared.lock.path.parent
            start_trackers(state.options.tracker, folder, first_seq, state.timers.after, self._tell_tracker)
        start = state.desk.cause(state.begin_order)
        if start is not None and start.connection is not None:
            request = prepared.request
            parameters = {"resume": request.config.resume, "overwrite": request.overwrite, "linger": request.linger}
            state.desk.record("start", parameters, "stdin", start.id)
        if prepared.log.past.cut_bytes:
            state.log(
                "warn",
                "The log ended in the middle of a line; that rest was cut off.",
                "log_repaired",
                bytes=prepared.log.past.cut_bytes,
            )
        self._tell_of(prepared.passed_over)
        state.describe_lock()

    def _tell_of(self, passed_over: list[tuple[Path, str]]) -> None:
        for path, problem in passed_over:
            message = f"The checkpoint {path} is passed over: {problem}."
            self._state.log("warn", message, "checkpoint_broken", path=str(path))

    def _tell_tracker(self, name: str, output: str, status: int) -> None:
        message = f"The tracker {name} has left with exit code {status}; {output} has its last words."
        self._state.log("warn", message, "tracker_failed", tracker=name, status=status)

    def _say_attempt(self, resume_from: CheckpointInfo | None) -> None:
        state = self._state
        assert state.prepared is not None
        state.attempt += 1
        state.snapshot.run_dir = state.prepared.request.config.run_dir
        state.emitter.emit(
            Attempt(
                run_id=state.prepared.run_id,
                attempt=state.attempt,
                protocol=PROTOCOL,
                worker=VERSION,
                pid=state.clock.pid(),
                resumed_from=str(resume_from.path) if resume_from else None,
                resumed_from_step=resume_from.step if resume_from else None,
            )
        )

    def again(
        self, resume_from: CheckpointInfo | None, passed_over: list[tuple[Path, str]], orders: list[Order]
    ) -> None:
        """Begin another attempt in place of an engine that died; `orders` come before those that wait."""
        self._early[:0] = orders
        self._say_attempt(resume_from)
        self._tell_of(passed_over)
        self._start_engine(resume_from)

    def _start_engine(self, resume_from: CheckpointInfo | None) -> None:
        state = self._state
        assert state.prepared is not None
        request = state.prepared.request
        try:
            state.engine = start_engine(
                state.options,
                state.prepared.lock.fd,
                state.timers,
                state.show_output,
                self._reports.take,
                ranks=True,
            )
        except TrainwireError as error:
            state.conclude(failure(error))
            return
        state.enter("loading", request.config.model)
        state.engine.send(
            Begin(
                order=state.begin_order,
                config=msgspec.to_builtins(request.config),
                run_id=state.prepared.run_id,
                attempt=state.attempt,
                resume_from=str(resume_from.path) if resume_from else None,
                linger=request.linger,
                offline=state.options.offline,
                trust_remote_code=state.options.trust_remote_code,
                hold_on_failed_save=state.options.mode == "serve",
                blas=state.options.blas,
                profile=state.options.profile,
            )
        )
        early, self._early = self._early, []
        for order in early:
            state.engine.send(order)
