"""Takes commands, says which fit the phase, and answers each of them exactly once."""

from typing import Any

from trainwire_protocol import commands as c
from trainwire_protocol.channel import Order, PauseOrder, ResumeOrder
from trainwire_protocol.codec import Refusal, decode_command
from trainwire_protocol.errors import BadLine, Busy, CommandRefused, ShuttingDown, TrainwireError, WrongState
from trainwire_protocol.events import Command, ErrorBody, Phase, Response, Source

from .connection import Connection
from .emitter import Emitter
from .hello import MAX_OPEN_COMMANDS
from .host import Host, Pending
from .orders import make_order, order_parameters
from .replay import check_types, marked_lines
from .snapshot import Snapshot

_BEFORE: frozenset[Phase] = frozenset({"loading", "preparing"})
_TRAINING: frozenset[Phase] = frozenset({"running", "pausing", "paused"})
ALLOWED: dict[str, frozenset[Phase]] = {
    "validate": frozenset({"idle"}),
    "start": frozenset({"idle"}),
    "pause": _BEFORE | _TRAINING,
    "resume": _TRAINING,
    "checkpoint": _TRAINING,
    "set": _TRAINING,
    "eval": _TRAINING | {"lingering"},
    "generate": _TRAINING | {"lingering"},
}
"""The phases in which a command is taken; those that are not listed are taken always."""


class Desk:
    """The open commands, by the number of the order that each became."""

    def __init__(self, emitter: Emitter, snapshot: Snapshot, fixed: frozenset[str] = frozenset()) -> None:
        self._emitter = emitter
        self._snapshot = snapshot
        self._fixed = fixed
        """Keys that `set` cannot change in this process."""
        self.host: Host
        """The run that is steered; set once it is there."""
        self._open: dict[int, Pending] = {}
        self._next_order = 1
        self._stretch: tuple[int, Pending] | None = None
        """The `resume` whose updates are counted, by its order."""

    @property
    def open_ids(self) -> list[int | str | None]:
        """Ids of the commands that wait for their effect."""
        return [pending.id for pending in self._open.values()]

    def serves(self, connection: Connection) -> bool:
        """Say whether a connection waits for a response."""
        return any(pending.connection is connection for pending in self._open.values())

    def forget(self, connection: Connection) -> None:
        """Let go of a connection that is gone: what it ordered still happens, and nobody hears of it."""
        for order, pending in list(self._open.items()):
            if pending.connection is connection:
                pending.connection = None
                if pending.cmd == "replay":
                    del self._open[order]

    def file(self, pending: Pending) -> int:
        """Keep a command open; the number of its order."""
        number = self._next_order
        self._next_order += 1
        self._open[number] = pending
        return number

    def cause(self, order: int | None) -> Pending | None:
        """Give the command behind an order: an open one, or the `resume` whose updates are counted."""
        if order is None:
            return None
        if self._stretch is not None and self._stretch[0] == order:
            return self._stretch[1]
        return self._open.get(order)

    def set_effect(self, order: int, seq: int | None) -> None:
        """Name the event that carried an order's effect."""
        if order in self._open:
            self._open[order].seq = seq

    def take(self, line: bytes | CommandRefused, connection: Connection) -> bool:
        """Handle one control line; False for a blank one."""
        try:
            if isinstance(line, CommandRefused):
                raise Refusal(line)
            decoded = decode_command(line)
            if decoded is None:
                return False
            command, is_word = decoded
        except Refusal as refusal:
            self._respond_error(refusal.error, Pending(refusal.id, refusal.cmd or "", connection))
            return True
        except RecursionError:
            self._respond_error(BadLine("The line is nested too deeply."), Pending(None, "", connection))
            return True
        pending = Pending(command.id, str(command.__struct_config__.tag), connection)
        try:
            self._check_phase(pending.cmd)
            self._dispatch(command, pending, "word" if is_word else connection.source)
        except TrainwireError as error:
            self._respond_error(error, pending)
        return True

    def _check_phase(self, cmd: str) -> None:
        phase = self._snapshot.phase
        allowed = ALLOWED.get(cmd)
        if allowed is not None and phase not in allowed:
            if phase in ("stopping", "ended"):
                raise ShuttingDown(f"The run is ending and takes no {cmd} any more.", phase=phase)
            raise WrongState(f"{cmd} is not taken in the phase {phase}.", phase=phase, allowed=sorted(allowed))
        # A run can be stopped whatever is open; a second stop is one command among others.
        if cmd == "stop" and phase != "stopping":
            return
        if cmd not in ("status", "ping", "detach") and len(self._open) >= MAX_OPEN_COMMANDS:
            raise Busy(f"{MAX_OPEN_COMMANDS} commands are open; wait for their responses.", limit=MAX_OPEN_COMMANDS)

    def _dispatch(self, command: c.ClientCommand, pending: Pending, source: Source) -> None:
        if isinstance(command, c.Ping):
            self.respond(pending, {"ts": self.host.now_ms()})
        elif isinstance(command, c.GetStatus):
            self.respond(pending, self.host.status_result())
        elif isinstance(command, c.Detach):
            self.respond(pending, {"changed": self.host.let_go()})
        elif isinstance(command, c.Replay):
            self._replay(command, pending)
        elif isinstance(command, c.Start):
            self.host.start_run(command, self.file(pending))
        elif isinstance(command, c.Validate):
            self.host.check_config(command, self.file(pending))
        elif isinstance(command, c.Stop):
            if self._snapshot.phase != "stopping":
                self._record(pending, {"save": command.save}, source)
            self.host.stop_run(pending, save=command.save)
        elif isinstance(command, c.Pause):
            self._pause(pending, source)
        elif isinstance(command, c.Resume):
            self._resume(command, pending, source)
        else:
            self._order(command, pending, source)

    def _pause(self, pending: Pending, source: Source) -> None:
        if self._snapshot.phase not in ("pausing", "paused"):
            self._record(pending, {}, source)
            self.host.enter("pausing", "Pausing at the next update boundary.")
        self.host.give_order(PauseOrder(order=self.file(pending)))

    def _resume(self, command: c.Resume, pending: Pending, source: Source) -> None:
        # One that is open has the run go on already, and may have it count updates.
        counts = self._stretch is not None or any(other.cmd == "resume" for other in self._open.values())
        if self._snapshot.phase == "running" and not counts:
            self.respond(pending, {"step": self._snapshot.step, "changed": False})
            return
        self._record(pending, {} if command.steps is None else {"steps": command.steps}, source)
        pending.steps = command.steps
        self.host.give_order(ResumeOrder(order=self.file(pending), steps=command.steps))

    def _order(self, command: c.ClientCommand, pending: Pending, source: Source) -> None:
        parameters = order_parameters(command, self._snapshot.run_dir, self._fixed)
        if pending.cmd in c.ORDERS:
            self._record(pending, parameters, source)
        self.host.give_order(make_order(command, self.file(pending), parameters))

    def _record(self, pending: Pending, parameters: dict[str, Any], source: Source) -> None:
        """Write the `command` event of an accepted order."""
        self.record(pending.cmd, parameters, source, pending.id)

    def record(self, cmd: str, parameters: dict[str, Any], source: Source, id: int | str | None = None) -> None:
        """Write a `command` event; an order before there is a run leaves no trace."""
        if self._emitter.log is not None:
            self._emitter.emit(Command(cmd=cmd, parameters=parameters, source=source, cause=id))

    def paused(self) -> None:
        """Take notice that no counted stretch goes on any more."""
        self._stretch = None

    def rest_of_stretch(self, step: int) -> Order | None:
        """Give the order by which an engine that goes on from `step` keeps to the updates that a `resume` counts."""
        if self._stretch is None:
            return None
        order, pending = self._stretch
        left = (pending.until or 0) - step
        return ResumeOrder(order=order, steps=left) if left > 0 else PauseOrder(order=order)

    def _replay(self, command: c.Replay, pending: Pending) -> None:
        log = self._emitter.log
        if log is None:
            raise WrongState("There is no run whose lines could be sent again.", phase=self._snapshot.phase)
        check_types(command.types)
        connection = pending.connection
        if connection is None:
            return
        self._emitter.commit()
        number = self.file(pending)

        def done(count: int) -> bytes:
            self._open.pop(number, None)
            return self._emitter.encode(Response(id=pending.id, cmd=pending.cmd, ok=True, result={"count": count}))

        to_seq = log.last_seq if command.to_seq is None else min(command.to_seq, log.last_seq)
        stored = log.replay(command.from_seq, to_seq, None if command.types is None else frozenset(command.types))
        lines = marked_lines(stored, pending.id, self._emitter.encode, self._emitter.max_line, done)
        connection.replay(lines, Response(id=pending.id, cmd=pending.cmd, ok=True))

    def answer(self, order: int, result: dict[str, Any] | None, error: TrainwireError | None) -> None:
        """Answer the command behind an order."""
        pending = self._open.pop(order, None)
        if pending is None:
            return
        if error is not None:
            self._respond_error(error, pending)
            return
        if pending.cmd == "resume":
            self._stretch = (order, pending) if pending.steps else None
            pending.until = (result or {}).get("step", 0) + (pending.steps or 0)
        self.respond(pending, result or {})

    def respond(self, pending: Pending, result: dict[str, Any]) -> None:
        """Answer that a command has taken effect."""
        self._say(pending, Response(id=pending.id, cmd=pending.cmd, ok=True, result=result, at_seq=pending.seq))

    def _respond_error(self, error: TrainwireError, pending: Pending) -> None:
        body = ErrorBody(code=error.code, message=error.message, details=error.details or None, hint=error.hint)
        self._say(pending, Response(id=pending.id, cmd=pending.cmd or None, ok=False, error=body, at_seq=pending.seq))

    def _say(self, pending: Pending, response: Response) -> None:
        if pending.connection is not None and pending.connection in self._emitter.connections:
            self._emitter.say(response, pending.connection)

    def close(
        self, ending: dict[str, Any], error: TrainwireError | None, *, keep: frozenset[str] = frozenset()
    ) -> None:
        """Answer everything that is open: `stop` with the ending, the rest with `error`, or that it is too late."""
        for order, pending in list(self._open.items()):
            # A replay is answered behind its lines.
            if pending.cmd in keep or pending.cmd == "replay":
                continue
            if pending.cmd == "stop" and ending:
                self.answer(order, ending, None)
            else:
                self.answer(order, None, error or ShuttingDown("The run ended before the command took effect."))
