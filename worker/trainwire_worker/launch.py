"""The process between the worker and an engine of several ranks: starts them, passes on what they say, ends them.

To the worker it is the engine: one process, one channel, one exit status. Rank 0 connects to it over TCP and proves
itself by a token. mlx.launch is not used: it gives stdin to all ranks, forwards no end of input, and its exit status
is 0 whatever happened.
"""

import argparse
import contextlib
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from trainwire_protocol.channel import (
    CHANNEL_FD_VARIABLE,
    LEADER_LOST,
    Begin,
    Failed,
    Frames,
    Report,
    decode_order,
    encode,
)
from trainwire_protocol.errors import EngineDied, TrainwireError
from trainwire_protocol.rundir import list_checkpoints

from .hosts import Place, from_file, on_this_machine
from .options import BACKENDS
from .rank_process import Rank, write_output
from .ready import wait_ready

STARTING = 20.0
"""Seconds that the ranks get to start, besides the rank timeout."""
LEAVING = 1.0
"""Seconds that the other ranks get once rank 0 has left."""
FULL = 1 << 20


class Launcher:
    """All ranks of a run, until the last of them is gone."""

    def __init__(self, places: list[Place], worker: socket.socket, timeout: float) -> None:
        self._worker = worker
        self._timeout = timeout
        self._listener, address = _listen(places[0])
        self._token = secrets.token_hex(16)
        self._leader: socket.socket | None = None
        self._down, self._up = bytearray(), bytearray()
        self._orders, self._reports = Frames(), Frames()
        self._run_dir: Path | None = None
        self._worker_gone = False
        self._spoken = False
        self._last_word = False
        self._deadline: float | None = time.monotonic() + timeout + STARTING
        self._reason = EngineDied(f"The ranks did not find each other within {timeout + STARTING:g} s.")
        self._blamed = False
        self._wake, woken = socket.socketpair()
        self._wake.setblocking(False)
        woken.setblocking(False)
        self._woken = woken
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        self.ranks = [Rank(place, address, self._token, timeout) for place in places]

    def run(self) -> int:
        """Serve until all ranks are gone; the exit status, which is rank 0's if it had a last word."""
        try:
            while any(rank.status is None for rank in self.ranks) or self._leader is not None:
                self._turn()
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    break
        finally:
            self._end_all()
        for rank in self.ranks:
            rank.pass_on()
        if not self._last_word:
            self._say(self._reason)
        self._flush_up(time.monotonic() + LEAVING)
        status = self.ranks[0].status
        return status if self._last_word and status is not None and status >= 0 else EngineDied.exit_code or 9

    def _turn(self) -> None:
        reading = {rank.output: rank.pass_on for rank in self.ranks if rank.open}
        reading[self._wake.fileno()] = self._drain_wake
        if not self._worker_gone:
            reading[self._worker.fileno()] = self._from_worker
        if self._leader is not None and len(self._up) < FULL:
            reading[self._leader.fileno()] = self._from_leader
        elif self._leader is None and not self._spoken:
            reading[self._listener.fileno()] = self._meet
        writing = {}
        if self._up and not self._worker_gone:
            writing[self._worker.fileno()] = lambda: self._flush_up(0)
        if self._down and self._leader is not None:
            writing[self._leader.fileno()] = self._flush_down
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        ready, writable = wait_ready(reading, writing, left)
        for fd in writable:
            writing[fd]()
        for fd in ready:
            reading[fd]()
        self._look_after()

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)

    def _meet(self) -> None:
        """Take rank 0's connection; whoever does not know the token is sent away."""
        connection = self._listener.accept()[0]
        connection.settimeout(2)
        try:
            word = connection.recv(len(self._token), socket.MSG_WAITALL)
        except OSError:
            word = b""
        if not secrets.compare_digest(word, self._token.encode()):
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
        if not self._spoken:
            self._spoken, self._deadline = True, None
        for frame in self._reports.feed(data):
            head = frame[:32]
            self._last_word = self._last_word or b"_failed" in head or b"_finished" in head
            if not self._worker_gone:
                self._up += struct.pack(">I", len(frame)) + frame

    def _flush_up(self, deadline: float) -> None:
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

    def _look_after(self) -> None:
        """See who has left. Rank 0 judges the others; what it cannot say any more is said here."""
        leader = self.ranks[0]
        if leader.status is not None:
            self._expect(None if self._last_word else f"Rank 0 died: {leader.how_it_left()}.", 0, self._patience())
            return
        for rank in self.ranks[1:]:
            if rank.status is None or self._last_word:
                continue
            if rank.status == LEADER_LOST:
                # Behind a cut network it may be alive, and saving.
                seconds = LEAVING if leader.stands_still() else self._timeout
                self._expect("Rank 0 gave the others no sign of life.", 0, seconds)
            elif not self._spoken:
                words = f"Rank {rank.place.rank} left before the ranks had found each other: {rank.how_it_left()}."
                self._expect(words, rank.place.rank, 0.0)
            else:
                words = f"Rank {rank.place.rank} died: {rank.how_it_left()}."
                if not self._blamed:
                    write_output(words.encode() + b"\n")
                self._expect(words, rank.place.rank, 2 * self._timeout)

    def _patience(self) -> float:
        """Once rank 0 has left: rank 1 may still have to notice it and save."""
        return LEAVING if self._last_word else 2 * self._timeout

    def _expect(self, words: str | None, rank: int, seconds: float) -> None:
        """Wait no longer than so many seconds for the others to leave; the first cause counts."""
        if self._blamed:
            return
        self._blamed = True
        self._deadline = time.monotonic() + seconds
        if words is not None:
            self._reason = EngineDied(words, hint="Its last lines are on stderr.", rank=rank)

    def _end_all(self) -> None:
        for rank in self.ranks:
            if rank.status is None:
                rank.process.kill()
        for rank in self.ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(LEAVING)

    def _say(self, error: TrainwireError) -> None:
        """Say the last word in rank 0's place."""
        newest = next(iter(list_checkpoints(self._run_dir)), None) if self._run_dir else None
        self._put(
            Failed(
                code=error.code,
                message=error.message,
                hint=error.hint,
                details=msgspec.to_builtins(error.details) or None,
                checkpoint=str(newest.path) if newest else None,
            )
        )

    def _put(self, report: Report) -> None:
        if not self._worker_gone:
            self._up += encode(report)


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


def command(ranks: int, hostfile: Path | None, backend: str | None, timeout: float) -> list[str]:
    """Give the command line that starts an engine of several ranks."""
    words = [sys.executable, "-m", "trainwire_worker.launch", "--timeout", f"{timeout:g}"]
    words += ["--hostfile", str(hostfile)] if hostfile is not None else ["--ranks", str(ranks)]
    return words + (["--backend", backend] if backend else [])


def main() -> int:
    """Start the ranks that the arguments name and serve the worker until they are gone; the exit status."""
    parser = argparse.ArgumentParser(prog="trainwire_worker.launch")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--hostfile", type=Path)
    parser.add_argument("--backend", choices=BACKENDS)
    parser.add_argument("--timeout", type=float, default=30.0)
    options = parser.parse_args()
    descriptor = int(os.environ.pop(CHANNEL_FD_VARIABLE))
    os.set_inheritable(descriptor, False)
    worker = socket.socket(fileno=descriptor)
    try:
        if options.hostfile is not None:
            places = from_file(options.hostfile, options.backend)
        else:
            places = on_this_machine(options.ranks, options.backend)
        launcher = Launcher(places, worker, options.timeout)
    except TrainwireError as error:
        worker.sendall(encode(Failed(code=error.code, message=error.message, hint=error.hint)))
        return error.exit_code or 1
    worker.setblocking(False)
    return launcher.run()


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)
