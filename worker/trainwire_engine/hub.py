"""What ranks say to each other beside the collectives: small messages over TCP, and who is still there.

Rank 0 is connected with every other rank. A thread on each rank receives, gives signs of life and watches for
theirs, so a rank that died, stands still or was cut off is named whatever the other ranks wait in. A wait for a
message costs nothing, where MLX's backends would keep a core busy: a pause may last for days.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from trainwire_engine.peers import COMPILING, Message, Peer
from trainwire_protocol.errors import EngineDied, TrainwireError, from_code

HESITATION = 1.0
"""Seconds in which the watch may still tell why a collective failed."""
NOTICED = 0.8
"""Part of the timeout after which a silent or hanging rank is lost; the rest is for saving and leaving."""


class Hub:
    """The connections of one rank. `on_lost` is called in a thread of its own and does not return.

    The main thread marks where it only waits (`waiting`): there it can hold nothing half done, and when a rank is
    lost meanwhile another thread takes over. Elsewhere the loss is raised at the next wait. Signs of life go on
    until this process leaves, so that nobody misses a rank that saves.
    """

    def __init__(self, rank: int, connections: dict[int, socket.socket], timeout: float) -> None:
        self.rank = rank
        self.peers = {other: Peer(other, connection) for other, connection in connections.items()}
        self.on_lost: Callable[[TrainwireError], None] = lambda error: None
        self.on_leave: Callable[[], None] = lambda: os._exit(0)
        """Ends this process, a rank other than 0, at the end of the run; called in the watching thread."""
        self.lost: TrainwireError | None = None
        self.ticks = 0
        self.patience = self._elsewhere = COMPILING if rank else 0
        self._timeout = timeout
        self._needs_others = False
        self._idle = False
        self._since = time.monotonic()
        self._mutex = threading.Lock()
        self._handled = threading.Event()
        self._taken_over = False
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    # The main thread's side

    @contextlib.contextmanager
    def waiting(self, *, for_others: bool = True) -> Iterator[None]:
        """Mark a wait: for other ranks, whose delay counts, or for a person. Raises what a lost rank ends with."""
        with self._mutex:
            if self.lost is None:
                self._idle, self._needs_others, self._since = True, for_others, time.monotonic()
        if not self._idle:
            self.check()
        try:
            yield
        finally:
            with self._mutex:
                lost = self.lost is not None
                self._idle = self._needs_others = False
                self.ticks += 1
            if lost:
                threading.Event().wait()

    @contextlib.contextmanager
    def expected(self, *, compiles: bool) -> Iterator[None]:
        """Mark an update, in which the others may expect this rank within the timeout, or ten of them."""
        self.patience = COMPILING if compiles else 1
        self.ticks += 1
        try:
            yield
        finally:
            self.patience = self._elsewhere

    def check(self) -> None:
        """Raise what a lost rank ends the run with."""
        if self.lost is not None:
            self._handle()
            raise self.lost

    def verdict(self, error: Exception) -> Exception:
        """Name the rank behind a failed collective: the connection's end is seen a moment before or after."""
        self._handle()
        if isinstance(error, RuntimeError) and self.lost is None:
            broken = "peer" in str(error)
            deadline = time.monotonic() + (self._timeout if broken else HESITATION)
            while self.lost is None and time.monotonic() < deadline:
                time.sleep(0.01)
            return self.lost or (EngineDied("The connection between the ranks broke.") if broken else error)
        return self.lost or error

    def _handle(self) -> None:
        """Say that the main thread ends the run; if another thread does already, it stays here."""
        with self._mutex:
            if not self._taken_over:
                self._handled.set()
        if self._taken_over:
            threading.Event().wait()

    def send(self, *message: Any, to: int | None = None) -> None:
        """Send to one rank, or to all that are connected; a rank that is gone is noticed by the watch."""
        body = msgspec.msgpack.encode(message)
        for peer in list(self.peers.values()):
            if to in (None, peer.rank):
                with peer.sending, contextlib.suppress(OSError):
                    peer.socket.sendall(struct.pack(">I", len(body)) + body)

    def _beat(self) -> None:
        body = msgspec.msgpack.encode(("beat", self.ticks, self._idle, self.patience))
        for peer in self.peers.values():
            # Where the main thread is in the middle of a message, that is a sign of life too.
            if peer.sending.acquire(blocking=False):
                try:
                    with contextlib.suppress(OSError):
                        peer.socket.sendall(struct.pack(">I", len(body)) + body)
                finally:
                    peer.sending.release()

    def take(self, rank: int) -> Message:
        """Wait for the next message of a rank."""
        with self.waiting():
            return self.peers[rank].inbox.get()

    def close(self) -> None:
        """Tell the others that the run is over here, and let go."""
        self.on_lost = lambda error: None
        self.send("leave")
        for peer in self.peers.values():
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_WR)

    # The watching thread

    def _watch(self) -> None:
        interval = min(1.0, self._timeout / 10)
        due = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= due:
                if now - due > interval:
                    self._discount(now - due)
                due = now + interval
                self._beat()
                self._judge(now)
            # Not select, which knows no descriptor above 1,023: a parent may have left that many open.
            with selectors.DefaultSelector() as watched:
                for peer in self.peers.values():
                    watched.register(peer.socket, selectors.EVENT_READ, peer)
                for key, _ in watched.select(max(0.0, due - time.monotonic())):
                    self._receive(key.data)

    def _receive(self, peer: Peer) -> None:
        try:
            data = peer.socket.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._lose(EngineDied(f"Rank {peer.rank} died.", rank=peer.rank))
            del self.peers[peer.rank]
            return
        peer.heard = time.monotonic()
        for frame in peer.frames.feed(data):
            message = msgspec.msgpack.decode(frame)
            match message:
                case ["beat", ticks, idle, patience]:
                    if (ticks, idle) != (peer.ticks, peer.idle):
                        peer.ticks, peer.idle, peer.moved = ticks, idle, peer.heard
                    peer.patience = patience
                case ["leave"] if self.rank:
                    # Rank 0 has saved whatever is to be saved.
                    self.on_leave()
                case ["failed", code, text, details, hint]:
                    self._lose(
                        from_code(code, f"Rank {peer.rank}: {text}", hint=hint, **(details | {"rank": peer.rank}))
                    )
                case _:
                    peer.inbox.put(message)

    def _discount(self, seconds: float) -> None:
        """Count no time in which this process did not run, stopped or on a busy machine: it could hear nobody then."""
        with self._mutex:
            self._since += seconds
        for peer in self.peers.values():
            peer.heard += seconds
            peer.moved += seconds

    def _judge(self, now: float) -> None:
        """Find a rank that is silent, or that others wait for in vain."""
        limit = self._timeout * NOTICED
        for peer in list(self.peers.values()):
            if now - peer.heard > limit:
                words = f"Rank {peer.rank} has given no sign of life for {limit:g} s."
                self._lose(EngineDied(words, hint=_SILENT, rank=peer.rank, silent=True))
            waited = min(now - self._since, now - peer.moved)
            if self._needs_others and not peer.idle and peer.patience and waited > limit * peer.patience:
                words = f"Rank {peer.rank} hangs: the others have waited for it for {limit * peer.patience:g} s."
                self._lose(EngineDied(words, hint=_SLOW, rank=peer.rank, hangs=True))
        stuck = bool(self.peers) and all(peer.idle for peer in self.peers.values())
        if self.rank == 0 and self._needs_others and stuck and now - self._since > self._timeout * COMPILING:
            self._lose(EngineDied(f"The ranks have waited for each other for {now - self._since:.0f} s.", hint=_CUT))

    def _lose(self, error: TrainwireError) -> None:
        with self._mutex:
            if self.lost is not None:
                return
            self.lost = error
            waits = self._idle
        threading.Thread(target=self._take_over, args=(error, waits), name="loss", daemon=True).start()

    def _take_over(self, error: TrainwireError, waits: bool) -> None:
        # Where it is at work the main thread comes to its next wait, ends the run there and leaves; or it hangs.
        if not waits:
            self._handled.wait(self._timeout)
        with self._mutex:
            if not waits and self._handled.is_set():
                return
            self._taken_over = True
        self.on_lost(error)


_SILENT = "Its process stands still, or the network between the hosts is cut."
_SLOW = "If it is only slow, raise --rank-timeout."
_CUT = "The connection that the backend made between them is cut, or slower than the gradients need."
