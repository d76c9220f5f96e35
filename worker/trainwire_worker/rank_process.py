"""One rank's process, as the launcher sees it: its start, what it prints, and how it left."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys

from .hosts import Place
from .signals import signal_name


class Rank:
    """One rank's process; what the ranks other than 0 print gets their number in front."""

    def __init__(self, place: Place, channel: str, token: str, timeout: float) -> None:
        self.place = place
        environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            place.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            # The run's lock is among the inherited descriptors: it is held as long as any rank lives.
            close_fds=False,
            preexec_fn=lambda: _prepare_child(place.cores),
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.output = self.process.stdout.fileno()
        os.set_blocking(self.output, False)
        first = {
            "environment": {**place.environment, "TRAINWIRE_RANK_TIMEOUT": f"{timeout:g}"},
            "files": place.files,
            "channel": channel if place.rank == 0 else None,
            "token": token if place.rank == 0 else None,
        }
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(first).encode() + b"\n")
            self.process.stdin.flush()
        self._line = b""
        self.open = True

    @property
    def status(self) -> int | None:
        """Its exit status; None while it lives."""
        return self.process.poll()

    def pass_on(self) -> None:
        """Write what it has printed to stderr, whole lines at a time."""
        try:
            data = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return
        self.open = bool(data)
        if not self.place.rank:
            write_output(data)
            return
        *lines, self._line = (self._line + data).split(b"\n")
        if not data and self._line:
            lines, self._line = [self._line], b""
        write_output(b"".join(b"[rank %d] %s\n" % (self.place.rank, line) for line in lines))

    def stands_still(self) -> bool:
        """Whether its process here was stopped by a signal."""
        words = ["ps", "-o", "state=", "-p", str(self.process.pid)]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return subprocess.run(words, capture_output=True, timeout=2, check=False).stdout[:1] in (b"T", b"t")
        return False

    def how_it_left(self) -> str:
        """Say in words how it left."""
        status = self.status or 0
        return f"signal {signal_name(-status)}" if status < 0 else f"exit status {status}"


def _prepare_child(cores: set[int] | None) -> None:
    if cores is not None:
        os.sched_setaffinity(0, cores)
    if _libc is not None:
        # Should this process be killed, its ranks on this machine go too, stopped ones included.
        _libc.prctl(1, signal.SIGKILL)


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def write_output(data: bytes) -> None:
    """Write to stderr, which the worker reads."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(2, data) :]
