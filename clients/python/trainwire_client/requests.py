"""Commands that wait for their answers."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import msgspec

from trainwire_protocol.events import Gap, Response

from .channel import Channel
from .delivery import Item
from .errors import ClientError, CommandFailed, CommandTimeout, NoWorker
from .results import read_answer

Send = Callable[[bytes], None]


class OpenCommand:
    """A command without an answer yet; `result` waits for it."""

    def __init__(self, cmd: str, doing: Callable[[], str]) -> None:
        self._doing = doing
        self.cmd = cmd
        self.future: Future[Any] = Future()
        # Running futures cannot be cancelled: who stops waiting for an answer does not take the command back.
        self.future.set_running_or_notify_cancel()
        self.replayed: list[Item] = []

    def result(self, timeout: float | None) -> Any:
        """Give the answer. Raises CommandFailed, CommandTimeout, or what ended the run."""
        try:
            return self.future.result(timeout)
        except TimeoutError as error:
            if isinstance(error, ClientError):
                raise
            raise self.timed_out(timeout or 0.0) from None

    def timed_out(self, timeout: float) -> CommandTimeout:
        """Make the error for an answer that did not come in time."""
        message = f"{self.cmd} was not answered within {timeout:g} s. {self._doing()}"
        return CommandTimeout(message, cmd=self.cmd, timeout=timeout)


class Requests:
    """Sends commands, and gives each answer to the one who waits for it. Any thread asks, one thread answers."""

    def __init__(self, over: Callable[[], ClientError], doing: Callable[[], str]) -> None:
        self._over, self._doing = over, doing
        self._lock = threading.Lock()
        self._open: dict[int | str, OpenCommand] = {}
        self._channel = Channel()
        self._send: Send | None = None
        self._closed = False

    @property
    def waiting(self) -> bool:
        """Whether a command has no answer yet."""
        with self._lock:
            return bool(self._open)

    def connect(self, channel: Channel, send: Send | None) -> None:
        """Send through this channel from now on; None: nobody listens."""
        with self._lock:
            self._channel, self._send = channel, send

    def begin(self, cmd: str, parameters: Mapping[str, Any], send: Send | None = None) -> OpenCommand:
        """Send a command, by another way than the usual if one is given."""
        command = OpenCommand(cmd, self._doing)
        with self._lock:
            if self._closed:
                raise self._over()
            send = send or self._send
            if send is None:
                raise NoWorker(f"{cmd} was not sent: nobody listens to commands.")
            id_, line = self._channel.command(cmd, parameters)
            self._open[id_] = command
        send(line)
        return command

    def collect(self, item: Item) -> None:
        """Keep a line that was sent again for the `replay` that asked for it."""
        cause = item.get("cause") if isinstance(item, dict) else getattr(item, "cause", None)
        with self._lock:
            command = self._open.get(cause) if isinstance(cause, int | str) else None
        if command is not None:
            command.replayed.append(item)

    def answer(self, response: Response) -> None:
        """Give an answer to its command; that of nobody's command is passed over."""
        with self._lock:
            command = self._open.pop(response.id, None) if response.id is not None else None
        if command is None:
            return
        if response.ok:
            try:
                result = read_answer(command.cmd, response.result or {}, response.at_seq)
            except msgspec.ValidationError as error:
                message = f"The answer to {command.cmd} cannot be read: {error}."
                command.future.set_exception(ClientError(message))
                return
            command.future.set_result(command.replayed if command.cmd == "replay" else result)
        else:
            body = response.error
            code, message = (body.code, body.message) if body else ("internal", "no reason was given")
            failed = CommandFailed(
                f"{command.cmd} failed: {message}",
                cmd=command.cmd,
                code=code,
                hint=body.hint if body else None,
                details=body.details if body else None,
            )
            command.future.set_exception(failed)

    def lose(self, error: ClientError, channel: Channel | None = None, send: Send | None = None) -> None:
        """Fail every open command; what is sent from now on goes to `send`."""
        self._fail(lambda: error, channel, send, closed=False)

    def close(self) -> None:
        """Fail every open command, and every later one, with what came to an end."""
        self._fail(self._over, None, None, closed=True)

    def _fail(
        self, error: Callable[[], ClientError], channel: Channel | None, send: Send | None, *, closed: bool
    ) -> None:
        with self._lock:
            commands = list(self._open.values())
            self._open.clear()
            self._channel, self._send = channel or self._channel, send
            self._closed = closed
        for command in commands:
            command.future.set_exception(error())


def is_replay(item: Item) -> bool:
    """Say whether a line was sent again because a `replay` asked for it."""
    if isinstance(item, dict):
        return bool(item.get("replay"))
    return not isinstance(item, Gap) and bool(item.replay)
