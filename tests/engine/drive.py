"""Plays the worker: starts a real engine process, gives it orders over the channel and takes its reports."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from trainwire_protocol import channel as ch
from trainwire_protocol.config_load import build_config

PATIENCE = 150.0


class Engine:
    """One engine process. `reports` holds everything it has said so far."""

    def __init__(self, log: Path | None = None, environment: Mapping[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair()
        self._stderr = (log or Path(os.devnull)).open("ab")
        env = {**os.environ, ch.CHANNEL_FD_VARIABLE: str(theirs.fileno()), "PYTHONSAFEPATH": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trainwire_engine"],
            stdin=subprocess.DEVNULL,
            stdout=self._stderr,
            stderr=self._stderr,
            env={**env, **(environment or {})},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._socket = ours
        self._frames = ch.Frames()
        self._number = 0
        self._seen = 0
        self._log = log
        self.reports: list[Any] = []
        self.at_end = False

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._stderr.close()

    def begin(self, config: Mapping[str, Any], base: Path, **more: Any) -> int:
        """Give the first order; `config` is written as people write it."""
        built = msgspec.to_builtins(build_config(config, base))
        fields = {"run_id": "test", "attempt": 1, **more}
        return self.order(ch.Begin, config=built, **fields)

    def order(self, kind: type[ch.Order], **fields: Any) -> int:
        """Give an order; its number."""
        self._number += 1
        self._socket.sendall(ch.encode(kind(order=self._number, **fields)))
        return self._number

    def wait_for(self, found: Callable[[Any], bool] | type, *, after: int | None = None) -> Any:
        """Give the first report, among those not looked at yet, that is meant; fails if the engine leaves before."""
        meets = (lambda report: isinstance(report, found)) if isinstance(found, type) else found
        place = self._seen if after is None else after
        deadline = time.monotonic() + PATIENCE
        while True:
            while place < len(self.reports):
                place += 1
                if meets(self.reports[place - 1]):
                    self._seen = place
                    return self.reports[place - 1]
            if self.at_end or time.monotonic() > deadline:
                raise AssertionError(f"the engine never reported it; last: {self.reports[-3:]}\n{self.printed()}")
            self._read(deadline - time.monotonic())

    def answer(self, number: int) -> ch.Answer:
        """Wait for the answer to an order."""
        found: ch.Answer = self.wait_for(lambda r: isinstance(r, ch.Answer) and r.order == number, after=0)
        return found

    def ask(self, kind: type[ch.Order], **fields: Any) -> ch.Answer:
        """Give an order and wait for its answer."""
        return self.answer(self.order(kind, **fields))

    def finish(self) -> int:
        """Read until the engine has left; its exit status."""
        while not self.at_end:
            self._read(PATIENCE)
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        """End it as nothing can be prepared for."""
        self.process.send_signal(signal.SIGKILL)
        while not self.at_end:
            self._read(PATIENCE)
        self.process.wait(PATIENCE)

    def hang_up(self) -> None:
        """Be gone, as a worker that was killed."""
        self._socket.close()
        self.at_end = True

    def of(self, kind: type) -> list[Any]:
        """Every report of a kind so far."""
        return [report for report in self.reports if isinstance(report, kind)]

    def reported(self, kind: type) -> bool:
        """Say whether a report of a kind has come."""
        return bool(self.of(kind))

    def listen(self, seconds: float) -> None:
        """Take what it says for a while."""
        deadline = time.monotonic() + seconds
        while not self.at_end and (left := deadline - time.monotonic()) > 0:
            if select.select([self._socket], [], [], left)[0]:
                self._read(0)

    def printed(self) -> str:
        """What it wrote on stderr."""
        self._stderr.flush()
        return self._log.read_text(errors="replace")[-4000:] if self._log else ""

    def _read(self, timeout: float) -> None:
        if not select.select([self._socket], [], [], max(timeout, 0.0))[0]:
            raise AssertionError(f"the engine said nothing for {timeout:.0f} s\n{self.printed()}")
        try:
            data = self._socket.recv(1 << 18)
        except OSError:
            data = b""
        if not data:
            self.at_end = True
        self.reports.extend(ch.decode_report(frame) for frame in self._frames.feed(data))
