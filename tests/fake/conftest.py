"""Plays the worker for a scripted engine: starts it, gives it orders, collects its reports."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trainwire_protocol import channel as ch
from trainwire_protocol.config_load import build_config

TIMEOUT_SECONDS = 90.0


class Engine:
    """A scripted engine process, seen from the worker's end of the channel."""

    def __init__(self, folder: Path, script: dict[str, Any] | str | None, **config: Any) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.config = msgspec.to_builtins(build_config({"model": "m", "data": "d", "run_dir": "run"} | config, folder))
        ours, theirs = socket.socketpair()
        ours.settimeout(TIMEOUT_SECONDS)
        command = [sys.executable, "-m", "trainwire_fake"]
        if script is not None:
            path = folder / "script.json"
            path.write_bytes(script.encode() if isinstance(script, str) else msgspec.json.encode(script))
            command += ["--script", str(path)]
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115
        environment = os.environ | {ch.CHANNEL_FD_VARIABLE: str(theirs.fileno()), "PYTHONSAFEPATH": "1"}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self.stderr,
            stderr=self.stderr,
            pass_fds=[theirs.fileno()],
            env=environment,
        )
        theirs.close()
        self.channel = ours
        self._frames = ch.Frames()
        self._waiting: list[bytes] = []
        self._orders = 0
        self.reports: list[Any] = []

    def order(self, kind: type[ch.Order], **fields: Any) -> int:
        """Send an order and give its number."""
        self._orders += 1
        self.channel.sendall(ch.encode(kind(order=self._orders, **fields)))
        return self._orders

    def begin(self, **fields: Any) -> int:
        """Start the run."""
        return self.order(ch.Begin, **{"config": self.config, "run_id": "r1", "attempt": 1} | fields)

    def frames(self) -> Iterator[bytes]:
        """Give every frame until the engine closes its end."""
        while True:
            while self._waiting:
                yield self._waiting.pop(0)
            try:
                data = self.channel.recv(1 << 16)
            except ConnectionResetError:
                return
            if not data:
                return
            self._waiting.extend(self._frames.feed(data))

    def stream(self) -> Iterator[Any]:
        """Give every report until the engine closes its end."""
        for frame in self.frames():
            report = ch.decode_report(frame)
            self.reports.append(report)
            yield report

    def until(self, kind: type[Any], **fields: Any) -> Any:
        """Read on to the first report of a kind with these fields."""
        for report in self.stream():
            if isinstance(report, kind) and all(getattr(report, k) == v for k, v in fields.items()):
                return report
        seen = [type(report).__name__ for report in self.reports[-20:]]
        raise AssertionError(f"no {kind.__name__} {fields} came; the last reports: {seen}; {self.printed()[-2000:]!r}")

    def rest(self) -> list[Any]:
        """Read to the end and give all reports of the run."""
        for _ in self.stream():
            pass
        return self.reports

    def exit_code(self) -> int:
        """Wait for the process and give its exit code."""
        return self.process.wait(TIMEOUT_SECONDS)

    def printed(self) -> bytes:
        """Give what came out of stdout and stderr so far."""
        self.stderr.seek(0)
        return self.stderr.read()

    def close(self) -> None:
        """Leave, as a worker that dies."""
        self.channel.close()

    def end(self) -> None:
        """Clean up whatever is left."""
        self.channel.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.stderr.close()


Start = Callable[..., Engine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start scripted engines: `start(script, **config)`."""
    engines: list[Engine] = []

    def begin(script: dict[str, Any] | str | None = None, **config: Any) -> Engine:
        engines.append(Engine(tmp_path, script, **config))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.end()


def names(reports: list[Any]) -> list[str]:
    """Name the reports by their types on the wire, without signs of life."""
    return [str(r.__struct_config__.tag) for r in reports if not isinstance(r, ch.Alive)]


@pytest.fixture(name="names")
def _names() -> Callable[[list[Any]], list[str]]:
    return names
