"""Drives `trainwire run --ranks N`: its lines, its commands, and the processes behind it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker_driver import LineReader, Steering

SHORT = 2.0
"""Rank timeout, in seconds, of the tests in which somebody is silent; what a busy machine does in it is not judged."""
PATIENCE = 120.0


class Run(Steering):
    """One `trainwire run`."""

    def __init__(
        self,
        config: Path,
        ranks: int,
        words: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
    ) -> None:
        self._log = config.with_suffix(".stderr").open("w+b")
        several = ("--ranks", str(ranks)) if ranks > 1 else ()
        command = [*prefix, sys.executable, "-m", "trainwire_cli", "run", str(config), *several, *words]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1", **(env or {})},
        )
        assert self.process.stdout is not None
        self.reader = LineReader(self.process.stdout.fileno())
        self.sent: list[Any] = []

    def raw(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def wait(self, kind: str = "", *, seconds: float = PATIENCE, **fields: Any) -> dict[str, Any]:
        try:
            return super().wait(kind, seconds=seconds, **fields)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.printed()}") from None

    def finish(self) -> dict[str, Any]:
        """Read to the end; the `end` line."""
        self.reader.rest(PATIENCE)
        self.process.wait(PATIENCE)
        return self.lines[-1]

    def printed(self) -> str:
        """What it wrote on stderr."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-6000:]

    def processes(self) -> list[int]:
        """The ranks' processes in their order, once the run trains."""
        launcher = self.result("status")["engine_pid"]
        return [launcher, *children(launcher)]

    def steps(self) -> dict[int, tuple[float, float]]:
        """Loss and gradient norm by step."""
        return {line["step"]: (line["loss"], line["grad_norm"]) for line in self.of("step")}

    def close(self) -> None:
        """End it, whatever it does."""
        if self.process.poll() is None:
            with contextlib.suppress(AssertionError, OSError):
                os.kill(self.processes()[0], signal.SIGKILL)
            self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.stdout.close()
        self._log.close()


Start = Callable[..., Run]
AT_ONCE = ("--rank-timeout", f"{SHORT:g}")
"""The option by which a silent rank is soon missed."""


def children(pid: int) -> list[int]:
    """Give the child processes of a process, oldest first."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout
    return sorted(int(word) for word in found.split())


def wait_gone(pids: list[int], seconds: float = PATIENCE) -> list[int]:
    """Wait until processes are gone; gives those that are not, after so many seconds."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if _lives(pid)]) and time.monotonic() < deadline:
        # Other processes' ends cannot be waited for.
        time.sleep(0.02)
    return left


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError, IndexError):
        return False
