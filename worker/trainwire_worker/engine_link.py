"""The engine as a child process: its start, its channel, what it prints, and its death."""

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from trainwire_protocol.channel import CHANNEL_FD_VARIABLE, AnyReport, Frames, Order, decode_report, encode
from trainwire_protocol.errors import EngineUnavailable

STDERR_TAIL = 8 << 10
"""Bytes of what the engine printed last that are kept for an error's details."""
ENGINE_IGNORES = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)
"""Signals of a terminal or a launcher that reach the engine too, and mean the worker."""
_NEEDED = ("mlx", "mlx_lm", "trainwire_engine")


def check_engine_installed() -> None:
    """Raise EngineUnavailable, with the sentence that says what to install, if the engine cannot be started."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        extra = "" if sys.platform == "darwin" else "[cpu]"
        raise EngineUnavailable(
            f"The engine is not installed: there is no package {' and no package '.join(missing)}.",
            hint=f"Run `pip install 'trainwire{extra}'`"
            + ("." if sys.platform == "darwin" else ", or with the extra cuda12 or cuda13 for an NVIDIA GPU."),
            missing=missing,
        )


def engine_command(engine: str, script: Path | None) -> list[str]:
    """Give the command line that starts an engine: `mlx`, or the scripted `fake`."""
    if engine == "fake":
        return [sys.executable, "-m", "trainwire_fake", *(["--script", str(script)] if script else [])]
    return [sys.executable, "-m", "trainwire_engine"]


def _ignore_ending_signals() -> None:
    """Make an engine deaf from its first instruction on, before it can say so itself."""
    for number in ENGINE_IGNORES:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENGINE_IGNORES)


class EngineLink:
    """One engine process. Orders go down, reports come up; its output ends on the worker's stderr."""

    def __init__(self, command: list[str], lock_fd: int) -> None:
        ours, theirs = socket.socketpair()
        output, output_end = os.pipe()
        environment = {**os.environ, CHANNEL_FD_VARIABLE: str(theirs.fileno()), "PYTHONSAFEPATH": "1"}
        environment.setdefault("PYTHONUNBUFFERED", "1")
        inherited = [theirs.fileno(), *([lock_fd] if lock_fd >= 0 else [])]
        # A signal to the whole group ends the run by the worker's hand; one that comes now waits for it.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, ENGINE_IGNORES)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output_end,
                stderr=output_end,
                env=environment,
                pass_fds=inherited,
                preexec_fn=_ignore_ending_signals,
            )
        except OSError as error:
            ours.close()
            os.close(output)
            raise EngineUnavailable(f"The engine cannot be started: {error.strerror}.", command=command) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
            theirs.close()
            os.close(output_end)
        ours.setblocking(False)
        os.set_blocking(output, False)
        self.channel = ours
        self.output = output
        self.closed = False
        """True once the engine's end of the channel is closed."""
        self.received = 0
        """Bytes of reports so far."""
        self.broken: str | None = None
        """What came instead of a report, in words."""
        self.tail = b""
        self._frames = Frames()
        # One buffer for all reports: a new one for each read costs more than a short report.
        self._inbox = memoryview(bytearray(1 << 18))
        self._unsent = b""

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._process.pid

    def send(self, order: Order) -> None:
        """Give an order; what the socket does not take now is kept until it does."""
        self._unsent += encode(order)
        self.flush()

    def flush(self) -> None:
        """Send what is left of the orders."""
        while self._unsent and not self.closed:
            try:
                sent = self.channel.send(self._unsent)
            except BlockingIOError:
                return
            except OSError:
                self._unsent = b""
                return
            self._unsent = self._unsent[sent:]

    @property
    def has_unsent(self) -> bool:
        """True while orders wait for room in the socket."""
        return bool(self._unsent) and not self.closed

    def receive(self) -> Iterator[AnyReport]:
        """Give the reports that have arrived; `closed` becomes true at the channel's end or at a broken frame."""
        try:
            size = self.channel.recv_into(self._inbox)
        except BlockingIOError:
            return
        except OSError:
            size = 0
        if not size:
            self.closed = True
            return
        self.received += size
        try:
            for frame in self._frames.feed(bytes(self._inbox[:size])):
                yield decode_report(frame)
        except (msgspec.DecodeError, ValueError) as error:
            self.broken = f"it sent what is no report ({error})"
            self.closed = True
            # The engine sees that nobody listens any more, saves and leaves.
            with contextlib.suppress(OSError):
                self.channel.shutdown(socket.SHUT_RDWR)

    def read_output(self) -> bytes | None:
        """Give what the engine printed since, b"" at the end, None if there is nothing now."""
        try:
            data = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        self.tail = (self.tail + data)[-STDERR_TAIL:]
        return data

    def tail_lines(self, count: int = 20) -> list[str]:
        """Give the last lines that the engine printed."""
        return self.tail.decode("utf-8", "replace").splitlines()[-count:]

    def exit_status(self) -> int | None:
        """Give the exit status, negative for a signal; None while the process lives."""
        return self._process.poll()

    def kill(self) -> None:
        """End the process now. Checkpoints appear by rename, so none is left half written under its name."""
        with contextlib.suppress(OSError):
            self._process.send_signal(signal.SIGKILL)

    def wait_dead(self, seconds: float) -> None:
        """Wait for a process that was killed; one that a driver holds up is left to the system."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def close_output(self) -> None:
        """Let go of the output."""
        if self.output >= 0:
            os.close(self.output)
            self.output = -1

    def close(self) -> None:
        """Let go of the channel and the output."""
        self.closed = True
        self.channel.close()
        self.close_output()
