"""The control socket: a second way in for those who steer the run, one at a time."""

import contextlib
import os
import socket
from collections.abc import Callable

from trainwire_protocol.events import ErrorBody, Response

from .connection import Connection
from .control_folder import SOCKET_NAME, ControlFolder
from .desk import Desk
from .emitter import Emitter

_KNOCKING = 64
"""Controllers that may knock at one moment; one more is turned away by the system, with no word of ours."""


class ControlSocket:
    """A Unix socket that only the owner can reach, by which another process steers the run."""

    def __init__(self) -> None:
        self._folder = ControlFolder()
        self.path = self._folder.path / SOCKET_NAME
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        old = os.umask(0o177)
        try:
            self._listener.bind(str(self.path))
            self._listener.listen(_KNOCKING)
        except OSError:
            self.close()
            raise
        finally:
            os.umask(old)

    def fileno(self) -> int:
        """The descriptor that becomes readable when a controller knocks."""
        return self._listener.fileno()

    def accept(self) -> socket.socket | None:
        """Take the controller that knocked."""
        with contextlib.suppress(OSError):
            return self._listener.accept()[0]
        return None

    def close(self) -> None:
        """Remove the socket."""
        self._listener.close()
        self._folder.remove()


class Controllers:
    """Lets one controller in at a time, and out again when it has its answers."""

    def __init__(self, emitter: Emitter, desk: Desk, say_hello: Callable[[Connection], None]) -> None:
        self._emitter = emitter
        self._desk = desk
        self._say_hello = say_hello
        self._socket: ControlSocket | None = None
        self.current: Connection | None = None

    def open(self) -> str | None:
        """Listen; the socket's path, or None, with a line on stderr, if there can be none."""
        try:
            self._socket = ControlSocket()
        except OSError as error:
            self._emitter.terminal.write(f"trainwire: no control socket: {error.strerror or error}\n")
            return None
        return str(self._socket.path)

    @property
    def listening(self) -> int:
        """The descriptor that becomes readable when a controller knocks; -1 for none."""
        return -1 if self._socket is None else self._socket.fileno()

    def answer_knock(self) -> None:
        """Let a controller in, or tell it that another one steers."""
        accepted = None if self._socket is None else self._socket.accept()
        if accepted is None:
            return
        accepted.setblocking(False)
        fd = accepted.detach()
        newcomer = Connection(fd, fd, self._emitter.encode, source="socket")
        # What was said before the newcomer came is not for it.
        self._emitter.commit()
        self._say_hello(newcomer)
        if self.current is not None:
            body = ErrorBody(code="busy", message="Another controller steers the run.")
            self._emitter.say(Response(id=None, cmd=None, ok=False, error=body), newcomer)
            self._emitter.commit()
            newcomer.close()
            return
        self.current = newcomer
        self._emitter.connections.append(newcomer)

    def look_after(self) -> None:
        """Let go of a controller that is gone, or that will say nothing more and has its answers."""
        controller = self.current
        if controller is None:
            return
        served = not controller.input_open and not controller.waiting and not self._desk.serves(controller)
        if controller.output_gone or served:
            self._emitter.connections.remove(controller)
            self._desk.forget(controller)
            controller.close()
            self.current = None

    def close(self) -> None:
        """Remove the socket."""
        if self._socket is not None:
            self._socket.close()
