"""A run whose worker is a child of this process: spawned, supervised, brought down by a ladder, or let go."""

import functools
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from .channel import Channel
from .commands import QUICK
from .core import Core, death
from .errors import ClientError, CommandTimeout, NoWorker, ProtocolMismatch, WorkerDied
from .handle import Handle
from .process import Shutdown, WorkerProcess
from .requests import OpenCommand, Send
from .results import Result, Rung

SERVE = "serve"
"""What is appended to the command: the death of this process then stops the run gracefully."""


class Supervision(msgspec.Struct, frozen=True):
    """A worker that died is started again at most `restarts` times `within` seconds."""

    restarts: int = 5
    within: float = 180.0


class Run(Handle):
    """A run of our own. Leaving its `with` block stops it gracefully; `detach` leaves it running."""

    def __init__(
        self,
        start: Mapping[str, Any],
        *,
        run_dir: Path | None,
        command: Sequence[str],
        worker_args: Sequence[str] = (),
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        supervision: Supervision | None = None,
        shutdown: Shutdown = Shutdown(),  # noqa: B008 - frozen
        on_unknown: Callable[[dict[str, Any]], Any] | None = None,
        max_queue: int,
        cmd: str = "start",
    ) -> None:
        super().__init__(Core(max_queue), on_unknown)
        self._core.run_dir = run_dir
        self._cmd, self._parameters = cmd, dict(start)
        self._command, self._arguments = list(command), [SERVE, *worker_args]
        self._cwd, self._env = cwd, env
        self._supervision, self._shutdown = supervision, shutdown
        self._deaths: deque[float] = deque()
        self._closing = False
        self._owner = os.getpid()
        self._greeted = threading.Event()
        self._gate = threading.Lock()
        self._processes = 0
        self._core.describe = lambda: f"The worker (pid {self._process.pid})"
        self._core.requests.connect(*self._new_connection())
        self._spawn()

    def _new_connection(self) -> tuple[Channel, Send]:
        """Make the channel to the next process, and the way by which commands go to it and to no other."""
        with self._gate:
            self._processes += 1
            self._begun, self._held = False, list[bytes]()
            self._channel = Channel()
            return self._channel, functools.partial(self._send, self._processes)

    def _spawn(self) -> None:
        self._process = WorkerProcess(
            self._command,
            self._arguments,
            cwd=self._cwd,
            env=self._env,
            shutdown=self._shutdown,
            on_data=self._on_data,
            on_closed=self._on_closed,
        )
        self._process.start()

    def _send(self, process: int, line: bytes) -> None:
        """Send a command, but none before the one that begins the run, and none to a later process."""
        with self._gate:
            if process != self._processes:
                return
            if self._begun:
                self._process.send(line)
            else:
                self._held.append(line)

    def _begin_run(self) -> None:
        self._start = self._core.requests.begin(self._cmd, self._parameters, self._process.send)
        with self._gate:
            self._begun = True
            for line in self._held:
                self._process.send(line)
        self._greeted.set()

    @property
    def pid(self) -> int:
        """The worker's process id; it leads a process group of its own."""
        return self._process.pid

    @property
    def stderr(self) -> str:
        """The last lines that the worker wrote to stderr, at most 64 KiB."""
        return self._process.stderr

    @property
    def junk(self) -> int:
        """How many lines on the worker's stdout were no protocol lines."""
        return self._channel.junk

    def _on_data(self, data: bytes) -> None:
        try:
            received = self._channel.feed(data)
        except ProtocolMismatch as mismatch:
            self._core.failure = mismatch
            self._process.leaving = True
            self._process.close_stdin()
            self._greeted.set()
            return
        if received and self._core.failure is None:
            if self._channel.hello is not None and not self._begun:
                self._begin_run()
            self._core.receive(received)
            self._process.leaving = self._core.tracker.end is not None

    def _on_closed(self) -> None:
        core = self._core
        if core.failure is not None or core.tracker.end is not None:
            core.finish(core.failure)
        else:
            core.catch_up()
            error = death(core, self._process.status, self._process.stderr, self._channel.junk_tail)
            if core.tracker.end is not None or not self._restart(error):
                core.finish(None if core.tracker.end is not None else error)
        self._greeted.set()

    def _restart(self, error: WorkerDied) -> bool:
        rule = self._supervision
        if rule is None or self._closing or self._start is None:
            return False
        now = time.monotonic()
        while self._deaths and now - self._deaths[0] > rule.within:
            self._deaths.popleft()
        if len(self._deaths) >= rule.restarts:
            return False
        self._deaths.append(now)
        self._core.restarts += 1
        if self._core.begun:
            self._parameters |= {"resume": "auto", "overwrite": None}
        self._core.lose(error, *self._new_connection())
        try:
            self._spawn()
        except (ClientError, OSError):
            return False
        return True

    def _wait_for_hello(self, timeout: float) -> None:
        """Wait for the worker's first line. Raises what came instead; no worker is left behind then."""
        try:
            greeted = self._greeted.wait(timeout)
        except BaseException:
            self._abandon()
            raise
        if not greeted:
            self._abandon()
            noise = f" Its stderr says:\n{self.stderr.strip()[-2000:]}" if self.stderr.strip() else ""
            raise CommandTimeout(
                f"The worker (pid {self.pid}) printed no hello line within {timeout:g} s.{noise}",
                cmd="hello",
                timeout=timeout,
            )
        # A worker that said hello and died at once was launched: who iterates or waits is told.
        if self._core.failure is not None and not self._begun:
            self._abandon()
            raise self._core.failure.with_traceback(None)

    def _abandon(self) -> None:
        """End a worker that has nothing to save."""
        self._closing = True
        self._process.signal_group(signal.SIGKILL)
        self._process.join(5)

    def _first_answer(self, timeout: float | None) -> Any:
        """Wait for the answer to the command that this worker was started for."""
        assert self._start is not None
        return self._start.result(timeout)

    def close(self) -> None:
        """Bring the worker down by the ladder: stop, end of stdin, SIGTERM, SIGKILL; each rung only if needed.

        Does nothing if the run has ended, or in a process that was forked from the one that launched it. `rungs`
        tells what was needed.
        """
        if os.getpid() != self._owner:
            return
        self._closing = True
        pace = self._shutdown
        ladder: list[tuple[str, Callable[[], Any], float]] = [
            ("stop", self._ask_to_stop, pace.stop),
            ("stdin", lambda: self._process.close_stdin(), pace.stdin),
            ("terminate", lambda: self._process.signal_group(signal.SIGTERM, signal.SIGCONT), pace.terminate),
            ("kill", lambda: self._process.signal_group(signal.SIGKILL), pace.exit),
        ]
        for name, act, seconds in ladder:
            if self._core.ended.is_set():
                break
            began = time.monotonic()
            act()
            self._core.wait_unless_saving(seconds, pace.save)
            self._core.rungs.append(Rung(name, time.monotonic() - began))
        self._process.join(pace.exit)

    def kill(self) -> None:
        """Send SIGKILL to the worker and its engine: nothing is saved."""
        self._closing = True
        self._process.signal_group(signal.SIGKILL)
        self._process.join(self._shutdown.exit)

    def _ask_to_stop(self) -> OpenCommand | None:
        try:
            return self._core.requests.begin("stop", {})
        except ClientError:
            return None

    def detach(self, *, timeout: float | None = QUICK) -> None:
        """Leave the run running without this process; `attach(run_dir)` follows and steers it."""
        self._ask("detach", timeout)
        self._closing = True
        folder = self.run_dir
        self._core.failure = NoWorker(f"This client has let go of the run; attach({folder!r}) follows it.")
        self._process.let_go()
        self._process.join()

    def wait(self, timeout: float | None = None) -> Result:
        result = super().wait(timeout)
        self._process.join(self._shutdown.exit)
        return result
