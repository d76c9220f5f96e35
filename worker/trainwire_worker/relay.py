"""What passes between the worker and rank 0 of several: orders down, reports up, through the launcher."""

import contextlib
import secrets
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from trainwire_protocol.channel import Begin, Failed, Frames, decode_order, encode
from trainwire_protocol.errors import TrainwireError
from trainwire_protocol.rundir import list_checkpoints

from .hosts import Place
from .ready import wait_ready

FULL = 1 << 20
"""Bytes of unread reports after which no more are taken from rank 0."""
Handlers = dict[int, Callable[[], None]]


class Relay:
    """The worker's socket, and rank 0's once it has connected and proved itself by the token."""

    def __init__(self, worker: socket.socket, first: Place) -> None:
        self._worker = worker
        self._listener, self.address = _listen(first)
        self.token = secrets.token_hex(16)
        self._leader: socket.socket | None = None
        self._down, self._up = bytearray(), bytearray()
        self._orders, self._reports = Frames(), Frames()
        self._run_dir: Path | None = None
        self._worker_gone = False
        self.spoken = False
        """Whether rank 0 has reported anything."""
        self.last_word = False
        """Whether rank 0 has said how the run ended."""

    @property
    def connected(self) -> bool:
        """Whether rank 0 may still say something."""
        return self._leader is not None

    def reading(self) -> Handlers:
        """What is to be called when these descriptors are readable."""
        handlers: Handlers = {}
        if not self._worker_gone:
            handlers[self._worker.fileno()] = self._from_worker
        if self._leader is not None and len(self._up) < FULL:
            handlers[self._leader.fileno()] = self._from_leader
        elif self._leader is None and not self.spoken:
            handlers[self._listener.fileno()] = self._meet
        return handlers

    def writing(self) -> Handlers:
        """What is to be called when these descriptors are writable."""
        handlers: Handlers = {}
        if self._up and not self._worker_gone:
            handlers[self._worker.fileno()] = self.flush_up
        if self._down and self._leader is not None:
            handlers[self._leader.fileno()] = self._flush_down
        return handlers

    def _meet(self) -> None:
        """Take rank 0's connection; whoever does not know the token is sent away."""
        connection = self._listener.accept()[0]
        connection.settimeout(2)
        try:
            word = connection.recv(len(self.token), socket.MSG_WAITALL)
        except OSError:
            word = b""
        if not secrets.compare_digest(word, self.token.encode()):
            connection.close()
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self._leader = connection
        if self._worker_gone:
            connection.shutdown(socket.SHUT_WR)

    def _from_worker(self) -> None:
        try:
            data = self._worker.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            # Rank 0 sees it, saves at the next boundary, and all leave.
            self._worker_gone = True
            self._up.clear()
            if self._leader is not None:
                with contextlib.suppress(OSError):
                    self._leader.shutdown(socket.SHUT_WR)
            return
        self._down += data
        if self._run_dir is None:
            for frame in self._orders.feed(data):
                order = decode_order(frame)
                if isinstance(order, Begin):
                    self._run_dir = Path(order.config.get("run_dir") or ".")

    def _flush_down(self) -> None:
        assert self._leader is not None
        try:
            del self._down[: self._leader.send(self._down)]
        except BlockingIOError:
            return
        except OSError:
            self._down.clear()

    def _from_leader(self) -> None:
        assert self._leader is not None
        try:
            data = self._leader.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._leader.close()
            self._leader = None
            return
        self.spoken = True
        for frame in self._reports.feed(data):
            head = frame[:32]
            self.last_word = self.last_word or b"_failed" in head or b"_finished" in head
            if not self._worker_gone:
                self._up += struct.pack(">I", len(frame)) + frame

    def flush_up(self, seconds: float = 0.0) -> None:
        """Hand the worker what it takes, waiting for it as long as this."""
        deadline = time.monotonic() + seconds
        while self._up and not self._worker_gone:
            try:
                del self._up[: self._worker.send(self._up)]
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                wait_ready([], [self._worker.fileno()], left)
            except OSError:
                self._worker_gone = True

    def say(self, error: TrainwireError) -> None:
        """Say the last word in rank 0's place, with the newest checkpoint that this machine sees."""
        newest = next(iter(list_checkpoints(self._run_dir)), None) if self._run_dir else None
        details = msgspec.to_builtins(error.details) or None
        checkpoint = str(newest.path) if newest else None
        if not self._worker_gone:
            self._up += encode(
                Failed(code=error.code, message=error.message, hint=error.hint, details=details, checkpoint=checkpoint)
            )


def _listen(first: Place) -> tuple[socket.socket, str]:
    """Listen for rank 0, on loopback unless it is elsewhere."""
    if first.local:
        listener = socket.create_server(("127.0.0.1", 0))
        return listener, f"127.0.0.1:{listener.getsockname()[1]}"
    listener = socket.create_server(("0.0.0.0", 0))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((first.host.rsplit("@", 1)[-1], 9))
        host = probe.getsockname()[0]
    return listener, f"{host}:{listener.getsockname()[1]}"
