"""The process between the worker and an engine of several ranks: starts them, passes on what they say, ends them.

To the worker it is the engine: one process, one channel, one exit status. mlx.launch is not used for it: that gives
its stdin to all ranks, forwards no end of input, needs bash on every host, and its exit status is 0 whatever happened.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from trainwire_protocol.channel import CHANNEL_FD_VARIABLE, LEADER_HANGS, LEADER_LOST, Failed, encode
from trainwire_protocol.errors import EngineDied, TrainwireError

from .hosts import Place, from_file, on_this_machine
from .options import BACKENDS
from .rank_process import Rank, write_output
from .ready import wait_ready
from .relay import Relay

STARTING = 20.0
"""Seconds that the ranks get to start, besides the rank timeout."""
LEAVING = 1.0
"""Seconds that the other ranks get once rank 0 has left."""


class Launcher:
    """All ranks of a run, until the last of them is gone."""

    def __init__(self, places: list[Place], worker: socket.socket, timeout: float) -> None:
        self._relay = Relay(worker, places[0])
        self._timeout = timeout
        self._deadline: float | None = time.monotonic() + timeout + STARTING
        self._reason = EngineDied(f"The ranks did not find each other within {timeout + STARTING:g} s.")
        self._blamed = False
        self._given_up = False
        """Whether rank 0 is not waited for any more."""
        self._wake, woken = socket.socketpair()
        self._wake.setblocking(False)
        woken.setblocking(False)
        self._woken = woken
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        self.ranks = [Rank(place, self._relay.address, self._relay.token, timeout) for place in places]

    def run(self) -> int:
        """Serve until all ranks are gone; the exit status, which is rank 0's if it had a last word."""
        relay = self._relay
        try:
            while self._waits():
                self._turn()
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    break
        finally:
            self._end_all()
        for rank in self.ranks:
            rank.pass_on()
        if not relay.last_word:
            relay.say(self._reason)
        relay.flush_up(LEAVING)
        status = self.ranks[0].status
        return status if relay.last_word and status is not None and status >= 0 else EngineDied.exit_code or 9

    def _waits(self) -> bool:
        if self._given_up:
            return any(rank.status is None for rank in self.ranks[1:])
        return any(rank.status is None for rank in self.ranks) or self._relay.connected

    def _turn(self) -> None:
        reading = {rank.output: rank.pass_on for rank in self.ranks if rank.open}
        reading[self._wake.fileno()] = self._drain_wake
        reading |= self._relay.reading()
        writing = self._relay.writing()
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        ready, writable = wait_ready(reading, writing, left)
        for fd in writable:
            writing[fd]()
        for fd in ready:
            reading[fd]()
        if self._relay.spoken and not self._blamed:
            self._deadline = None
        self._look_after()

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)

    def _look_after(self) -> None:
        """See who has left. Rank 0 judges the others; what it cannot say any more is said here."""
        leader, said = self.ranks[0], self._relay.last_word
        if leader.status is not None:
            # Rank 1 may still have to notice it and save.
            words = None if said else f"Rank 0 died: {leader.how_it_left()}."
            self._expect(words, 0, LEAVING if said else self._timeout)
            return
        for rank in self.ranks[1:]:
            number = rank.place.rank
            if rank.status is None or said:
                continue
            if self._blamed:
                continue
            if rank.status in (LEADER_LOST, LEADER_HANGS):
                hangs = rank.status == LEADER_HANGS
                # Behind a cut network it may be alive, and saving.
                self._given_up = hangs or leader.stands_still()
                words = "Rank 0 hangs: the others have waited for it in vain."
                self._expect(words if hangs else "Rank 0 gave the others no sign of life.", 0, self._timeout)
            elif not self._relay.spoken:
                words = f"Rank {number} left before the ranks had found each other: {rank.how_it_left()}."
                self._expect(words, number, 0.0)
            else:
                words = f"Rank {number} died: {rank.how_it_left()}."
                write_output(words.encode() + b"\n")
                self._expect(words, number, self._timeout)

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
