"""What can go wrong between a front end and a worker: a small tree of errors whose messages are sentences."""

from typing import Any


class ClientError(Exception):
    """Any failure that this client reports; `message` is a sentence."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class WorkerNotFound(ClientError):
    """The worker's command cannot be run; the message says which command, and why."""

    def __init__(self, message: str, *, command: list[str]) -> None:
        super().__init__(message)
        self.command = command


class ProtocolMismatch(ClientError):
    """The worker speaks another major version of the protocol: `theirs` instead of `ours`."""

    def __init__(self, message: str, *, theirs: Any, ours: int) -> None:
        super().__init__(message)
        self.theirs = theirs
        self.ours = ours


class WorkerDied(ClientError):
    """The worker left without an `end` line.

    `exit_code` is its exit status, None if a signal ended it or if the process is not ours; `signal` is the
    signal's name, as in "SIGKILL"; `stderr` holds the last lines it wrote there; `last_checkpoint` is the folder
    of the newest checkpoint it reported; `restarts` is how often supervision had started it again.
    """

    def __init__(
        self,
        message: str,
        *,
        exit_code: int | None = None,
        signal: str | None = None,
        stderr: str = "",
        last_checkpoint: str | None = None,
        restarts: int = 0,
    ) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.signal = signal
        self.stderr = stderr
        self.last_checkpoint = last_checkpoint
        self.restarts = restarts


class CommandFailed(ClientError):
    """The worker refused a command `cmd`, or could not carry it out; the run goes on.

    `code` is the protocol's error code, as in "wrong_state"; `hint` says what to do, `details` are facts.
    """

    def __init__(
        self,
        message: str,
        *,
        cmd: str,
        code: str,
        hint: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.cmd = cmd
        self.code = code
        self.hint = hint
        self.details = details or {}


class CommandTimeout(ClientError, TimeoutError):
    """Nothing came within `timeout` seconds; the message says what the worker was doing.

    `cmd` is the command that waits, "hello" for the worker's first line, or "wait" for the run's end.
    """

    def __init__(self, message: str, *, cmd: str, timeout: float) -> None:
        super().__init__(message)
        self.cmd = cmd
        self.timeout = timeout


class RunEnded(ClientError):
    """A command came after the run's end; `outcome` says how it ended."""

    def __init__(self, message: str, *, outcome: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class RunFailed(ClientError):
    """The run ended as failed: raised by `Result.check()`. `code` and `hint` are those of its `error` event."""

    def __init__(self, message: str, *, code: str, hint: str | None, exit_code: int) -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint
        self.exit_code = exit_code


class NoWorker(ClientError):
    """Nobody can be steered: the run's worker listens on no socket, or another controller holds it."""
