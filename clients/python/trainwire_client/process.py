"""A worker as a process of its own session: spawned, read, signalled, reaped."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from .errors import WorkerNotFound
from .pump import Pump

_NOISE_KEPT = 1 << 16
DEFAULT_COMMAND: tuple[str, ...] = (sys.executable, "-m", "trainwire_worker")


class Shutdown(msgspec.Struct, frozen=True, kw_only=True):
    """How long each rung of the shutdown ladder may take, in seconds.

    After `stop` the worker has that long to end gracefully, then its stdin is closed, after `stdin` its process group
    gets SIGTERM and SIGCONT, after `terminate` SIGKILL. While it writes a checkpoint no rung is taken before `save`
    seconds of that. `exit` is how long a worker may stay that has said `end` or closed its stdout.
    """

    stop: float = 60.0
    stdin: float = 20.0
    terminate: float = 10.0
    save: float = 600.0
    exit: float = 10.0


class WorkerProcess:
    """A running worker. Its callbacks run in the thread that reads from it."""

    def __init__(
        self,
        command: Sequence[str],
        arguments: Sequence[str],
        *,
        cwd: str | os.PathLike[str] | None,
        env: Mapping[str, str] | None,
        shutdown: Shutdown,
        on_data: Callable[[bytes], None],
        on_closed: Callable[[], None],
    ) -> None:
        self._shutdown = shutdown
        self._noise = bytearray()
        self.leaving = False
        """Set once the worker is to leave by itself soon: it has said `end`, or it is of no use."""
        self._left_alone_since: float | None = None
        self._terminated = False
        ours_in, ours_out, ours_err = self._spawn([*command, *arguments], cwd, env)
        self._pump = Pump(
            read_fd=ours_out,
            write_fd=ours_in,
            noise_fd=ours_err,
            over=self._over,
            on_data=on_data,
            on_noise=self._take_noise,
            on_closed=on_closed,
        )
        self.pid = self._popen.pid
        self.send = self._pump.send
        self.close_stdin = self._pump.close_write
        self.join = self._pump.join

    def _spawn(
        self, argv: list[str], cwd: str | os.PathLike[str] | None, env: Mapping[str, str] | None
    ) -> tuple[int, int, int]:
        (theirs_in, ours_in), (ours_out, theirs_out), (ours_err, theirs_err) = os.pipe(), os.pipe(), os.pipe()
        try:
            self._popen = subprocess.Popen(
                argv,
                stdin=theirs_in,
                stdout=theirs_out,
                stderr=theirs_err,
                cwd=cwd,
                env={**os.environ, **(env or {}), "PYTHONSAFEPATH": "1"},
                start_new_session=True,
            )
        except OSError as error:
            for fd in (ours_in, ours_out, ours_err):
                os.close(fd)
            where = f" in {os.fspath(cwd)}" if cwd is not None else ""
            raise WorkerNotFound(
                f"The worker's command cannot be run{where}: {shlex.join(argv)}: {error.strerror}."
                " `command` names the program that starts it, for instance ['trainwire'].",
                command=argv,
            ) from None
        finally:
            for fd in (theirs_in, theirs_out, theirs_err):
                os.close(fd)
        return ours_in, ours_out, ours_err

    def start(self) -> None:
        """Begin to read from it."""
        self._pump.start()

    @property
    def stderr(self) -> str:
        """The last lines it wrote to stderr, at most 64 KiB."""
        return self._noise.decode("utf-8", "replace")

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return self._popen.poll() is None

    @property
    def status(self) -> tuple[int | None, str | None]:
        """Its exit code and None, or None and the name of the signal that ended it; both None while it lives."""
        code = self._popen.returncode
        if code is None or code >= 0:
            return code, None
        try:
            return None, signal.Signals(-code).name
        except ValueError:
            return None, f"signal {-code}"

    def signal_group(self, *signals: signal.Signals) -> None:
        """Send signals to its process group, as long as the process is there."""
        for number in signals:
            if self._popen.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, number)

    def let_go(self) -> None:
        """Leave it running: close the pipes, and reap it once it has ended while this process still lives."""
        threading.Thread(target=self._popen.wait, name="trainwire-reaper", daemon=True).start()
        self._pump.stop()

    def _take_noise(self, data: bytes) -> None:
        self._noise += data
        del self._noise[:-_NOISE_KEPT]

    def _over(self, stdout_open: bool) -> bool:
        """Say whether it is gone; one that stays behind after its last line is helped to leave."""
        if self._popen.poll() is not None:
            return True
        if stdout_open and not self.leaving:
            return False
        if self._left_alone_since is None:
            self._left_alone_since = time.monotonic()
        alone = time.monotonic() - self._left_alone_since
        if alone >= self._shutdown.exit and not self._terminated:
            self._terminated = True
            self.close_stdin()
            self.signal_group(signal.SIGTERM, signal.SIGCONT)
        if alone >= self._shutdown.exit + self._shutdown.terminate:
            self.signal_group(signal.SIGKILL)
        return False
