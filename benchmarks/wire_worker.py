"""What the measurements of the wire share: a figure with what is promised of it, and a worker to talk to."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TICK = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGESIZE")
LONG = 10**7

SOURCE = """
import os, socket, sys
from trainwire_protocol import channel as ch
from trainwire_protocol.events import Complete, Init, Step
count = int(sys.argv[1])
connection = socket.socket(fileno=int(os.environ[ch.CHANNEL_FD_VARIABLE]))
begin = ch.EngineChannel(connection).next(block=True)
blob = bytearray(ch.encode(Init(
    model="m", config=begin.config, training_type="sft", run_id="r", run_name="r", run_dir="/r", total_steps=count,
    trainable_parameters=1, total_parameters=1, examples=1, start_step=0, device="cpu", head="full")))
blob += ch.encode(ch.Answer(order=begin.order, result={}))
for n in range(1, count + 1):
    blob += ch.encode(Step(
        step=n, loss=2.0 + 1 / n, total_tokens=256, training_time_ms=10.123, updates=1, total_steps=count, epoch=1,
        epoch_progress=n / count, learning_rate=1e-4 / n, grad_norm=1.23456, token_accuracy=0.51234, perplexity=7.3891,
        trained_tokens=256 * n, tokens_per_second=25600.12, padding_fraction=0.05, micro_batches=1, data_time_ms=0.1,
        active_bytes=64 << 20, cache_bytes=16 << 20, peak_bytes=96 << 20, eta_ms=10 * (count - n), skipped=0))
blob += ch.encode(Complete(total_steps=count, total_time_secs=1.0, reason="finished"))
blob += ch.encode(ch.Finished(outcome="completed", step=count))
connection.sendall(blob)
"""
FED = """
import sys
from trainwire_worker import engine_session
engine_session.engine_command = lambda *_: [sys.executable, {source!r}, {count!r}]
from trainwire_worker.__main__ import leave
leave()
"""


@dataclass
class Figure:
    """One measured value with what is promised of it."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    at_least: bool = False

    @property
    def kept(self) -> bool:
        """Say whether the promise is kept."""
        if self.limit is None:
            return True
        return self.value >= self.limit if self.at_least else self.value <= self.limit


class Worker:
    """A worker process whose lines are taken as fast as they come."""

    def __init__(
        self,
        folder: Path,
        mode: str,
        script: dict[str, Any] | None,
        *words: str,
        python: list[str] | None = None,
        config: dict[str, Any] | None = None,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "script.json").write_text(json.dumps(script))
        self.config = {"model": "m", "data": "d", "run_dir": str(folder / "run"), "save_every": 0, "max_steps": LONG}
        self.config |= config or {}
        self.log = folder / "run" / "events.jsonl"
        command = [sys.executable, *(python or ["-m", "trainwire_worker"]), mode]
        if mode == "run":
            text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in self.config.items())
            (folder / "config.toml").write_text(text)
            command.append(str(folder / "config.toml"))
        if script is not None:
            command += ["--engine", "fake", "--script", str(folder / "script.json")]
        command += words
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0, cwd=folder
        )
        self._rest = b""
        self._lines: list[bytes] = []
        self.pings = 0
        """Pings so far: the next one's id."""

    def send(self, **command: Any) -> None:
        """Send a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")

    def line(self, seconds: float = 60.0) -> bytes:
        """Give the next line."""
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        while not self._lines:
            if not select.select([fd], [], [], seconds)[0]:
                raise TimeoutError
            data = os.read(fd, 1 << 20)
            if not data:
                raise EOFError
            *self._lines, self._rest = (self._rest + data).split(b"\n")
        return self._lines.pop(0)

    def wait(self, *parts: bytes) -> bytes:
        """Read on to a line that has these parts."""
        line = self.line()
        while not all(part in line for part in parts):
            line = self.line()
        return line

    def start(self) -> Worker:
        """Start the run and wait for its first update."""
        self.send(cmd="start", config=self.config)
        self.wait(b'{"type":"step"')
        return self

    def drain(self) -> int:
        """Read to the end; the number of lines."""
        lines = len(self._lines)
        assert self.process.stdout is not None
        while data := os.read(self.process.stdout.fileno(), 1 << 20):
            lines += data.count(b"\n")
        self.process.wait()
        return lines

    def cpu_seconds(self) -> float:
        """Give the processor time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    def resident_mb(self) -> float:
        """Give the resident memory now."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * PAGE / 1e6

    def end(self) -> None:
        """Kill what is left."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        pids = children.read_text().split() if self.process.poll() is None else []
        for pid in [self.process.pid, *map(int, pids)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
