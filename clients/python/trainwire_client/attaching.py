"""Follows a run through its log, and steers it through its control socket, without being its parent."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainwire_protocol.events import Response
from trainwire_protocol.rundir import LockInfo, lock_holder

from .channel import Channel
from .core import Core, death
from .delivery import Item
from .errors import NoWorker, ProtocolMismatch
from .handle import Handle
from .launching import MAX_QUEUE
from .log import Tail, Timeline, decode_log_line, latest_checkpoint, log_path
from .pump import Pump
from .requests import OpenCommand

_POLL = 0.1
_HANDOVER = 1.5
"""Seconds without a holder of the lock that are no death yet: a supervised worker is being started again."""
_LOOK = 0.3
"""The same where nobody has held it since this client looks."""
_LINGER = 0.2
"""Seconds that a control socket without open commands is kept: another controller may want to steer."""


class AttachedRun(Handle):
    """A run of somebody else, or one that is over. Closing it only ends the following."""

    def __init__(
        self, run_dir: Path, from_seq: int, on_unknown: Callable[[dict[str, Any]], Any] | None, max_queue: int
    ) -> None:
        super().__init__(Core(max_queue), on_unknown)
        path = log_path(run_dir)
        self._folder, self._from_seq = path.parent, from_seq
        self._core.run_dir = self._folder
        self._core.describe = self._describe
        self._timeline = Timeline.of(path)
        self._tail = Tail(path)
        self._holder: LockInfo | None = lock_holder(self._folder)
        self._socket: Pump | None = None
        self._used = 0.0
        self._connecting = threading.Lock()
        self._refusal: str | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="trainwire-follow", daemon=True)
        self._thread.start()

    def _describe(self) -> str:
        return f"The worker (pid {self._holder.pid})" if self._holder else f"The worker of {self._folder}"

    @property
    def pid(self) -> int | None:
        """Process id of the worker that holds the run's lock; None if there is none."""
        holder = lock_holder(self._folder)
        return holder.pid if holder else None

    def _follow(self) -> None:
        free_since: float | None = None
        while not self._closed.is_set():
            self._let_others_steer()
            # Who is asked before the log is read cannot have written to it after the reading.
            holder = lock_holder(self._folder)
            self._holder = holder or self._holder
            lines = self._tail.read()
            if lines:
                self._take(lines)
                continue
            if holder is not None and not self._tail.replaced:
                free_since = None
            elif self._core.tracker.end is not None:
                break
            elif free_since is None:
                free_since = time.monotonic()
            elif time.monotonic() - free_since > (_HANDOVER if self._holder else _LOOK):
                break
            self._closed.wait(_POLL)
        self._tail.close()
        core = self._core
        if (found := latest_checkpoint(self._folder, verify=False)) is not None:
            # An engine that outlived its worker told nobody.
            core.tracker.last_checkpoint = str(found.path)
        if self._closed.is_set():
            core.finish(NoWorker("This client has let go of the run."))
        else:
            core.finish(None if core.tracker.end is not None else death(core, (None, None), "", b""))
        if self._socket is not None:
            self._socket.stop()

    def _take(self, lines: list[bytes]) -> None:
        items: list[tuple[Item, int]] = []
        for line in lines:
            item = decode_log_line(line)
            if item is not None and self._timeline.is_valid(item):
                items.append((item, len(line)))
        for start in range(0, len(items), 256):
            while not self._core.delivery.wait_for_room(_POLL):
                if self._closed.is_set():
                    return
            self._core.take_from_log(items[start : start + 256], self._from_seq)

    def _begin(self, cmd: str, parameters: Mapping[str, Any]) -> OpenCommand:
        with self._connecting:
            if self._socket is None and not self._core.ended.is_set():
                self._connect()
            return self._core.requests.begin(cmd, parameters)

    def _let_others_steer(self) -> None:
        """Leave the control socket once every command has had its answer for a moment; the next one takes it again."""
        # Who connects at this moment may wait for the thread that asks here.
        if not self._connecting.acquire(blocking=False):
            return
        try:
            now = time.monotonic()
            if self._core.requests.waiting:
                self._used = now
            elif self._socket is not None and now - self._used > _LINGER:
                pump, self._socket = self._socket, None
                pump.stop()
        finally:
            self._connecting.release()

    def _connect(self) -> None:
        """Take the control socket."""
        holder = lock_holder(self._folder)
        if holder is None:
            # The follower is about to see the end.
            if not self._core.ended.wait(5):
                raise NoWorker(f"No worker holds {self._folder}.")
            return
        if holder.orphan:
            raise NoWorker(
                f"The worker (pid {holder.pid}) of {self._folder} is dead; the engine that it left behind"
                f" (pid {holder.engine_pid}) saves, leaves by itself, and takes no orders."
            )
        if holder.socket is None:
            raise NoWorker(f"The worker (pid {holder.pid}) of {self._folder} listens on no socket.")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(10)
            connection.connect(holder.socket)
        except OSError as error:
            connection.close()
            raise NoWorker(
                f"The worker (pid {holder.pid}) cannot be reached at {holder.socket}: {error.strerror or error}."
            ) from None
        channel = Channel()
        fd = connection.detach()

        def on_data(data: bytes) -> None:
            with contextlib.suppress(ProtocolMismatch):
                received = channel.feed(data)
                self._core.receive_answers(received)
                for line in received:
                    if isinstance(line.message, Response) and line.message.id is None and line.message.error:
                        self._refusal = line.message.error.message

        pump = Pump(
            read_fd=fd,
            write_fd=fd,
            over=lambda is_open: not is_open,
            on_data=on_data,
            on_closed=lambda: self._on_disconnected(pump),
        )
        self._socket, self._used = pump, time.monotonic()
        self._core.requests.connect(channel, pump.send)
        pump.start()

    def _on_disconnected(self, pump: Pump) -> None:
        with self._connecting:
            if self._socket is not pump:
                # It was left, not lost.
                return
            self._socket = None
            refusal, self._refusal = self._refusal, None
        # A worker that leaves closes the socket too: the follower is about to see the end then.
        if refusal or not self._core.ended.wait(2):
            reason = refusal or "It closed its control socket."
            self._core.requests.lose(NoWorker(f"{self._describe()} cannot be steered: {reason}"))

    def close(self) -> None:
        """Stop following; the run goes on."""
        self._closed.set()
        self._thread.join()
        if self._socket is not None:
            self._socket.stop()

    def detach(self) -> None:
        """Stop following; the run goes on."""
        self.close()


def attach(
    run_dir: str | os.PathLike[str],
    *,
    from_seq: int = 1,
    on_unknown: Callable[[dict[str, Any]], Any] | None = None,
    max_queue: int = MAX_QUEUE,
) -> AttachedRun:
    """Follow a run by its folder, whoever started it, and whether or not it is over.

    Its events come from the log, from the one numbered `from_seq` on; `step`, `eval_end` and `generation` events of
    timelines that were abandoned before this call are left out. While its worker lives, commands go through its
    control socket, which takes one controller at a time: it is held while commands wait for answers.

    Raises ClientError if the folder holds no run. Iteration and `wait` raise WorkerDied if the log has no `end` and
    no worker holds the run; a command raises NoWorker if it cannot be sent.
    """
    return AttachedRun(Path(run_dir), from_seq, on_unknown, max_queue)
