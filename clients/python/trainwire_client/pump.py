"""One thread that reads what a worker prints, always, and writes to it without making anybody wait."""

import contextlib
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable

_CHUNK = 1 << 18
_TICK = 0.25
"""Seconds between looks at whether the process still lives: a child of it may hold the pipe open."""
_QUICK_TICK = 0.005
"""The same once the pipe is at its end: the process is about to leave."""


class Pump:
    """Moves bytes between file descriptors, which it owns, and callbacks, which run in its thread.

    `on_data` gets what was read from `read_fd`, `on_noise` what was read from `noise_fd` (a worker's stderr).
    `over(open)` is asked now and then whether the other side is gone; `open` says whether `read_fd` is not at its
    end. Then what is left is read, and `on_closed` is called as the last thing.
    """

    def __init__(
        self,
        *,
        read_fd: int,
        write_fd: int,
        noise_fd: int | None = None,
        over: Callable[[bool], bool],
        on_data: Callable[[bytes], None],
        on_noise: Callable[[bytes], None] = lambda data: None,
        on_closed: Callable[[], None],
    ) -> None:
        self._read_fd, self._write_fd, self._noise_fd = read_fd, write_fd, noise_fd
        self._over, self._on_data, self._on_noise, self._on_closed = over, on_data, on_noise, on_closed
        self._lock = threading.Lock()
        self._outgoing: deque[memoryview] = deque()
        self._write_open, self._close_wanted, self._stop_wanted, self._released = True, False, False, False
        self._reading = True
        self._wake_read, self._wake_write = os.pipe()
        self._selector = selectors.DefaultSelector()
        for fd in {
            read_fd,
            write_fd,
            self._wake_read,
            self._wake_write,
            read_fd if noise_fd is None else noise_fd,
        }:
            os.set_blocking(fd, False)
        self._thread = threading.Thread(target=self._work, name="trainwire-client", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def send(self, data: bytes) -> None:
        """Write as soon as the other side takes it; after the close it is dropped."""
        with self._lock:
            if not self._write_open or self._close_wanted:
                return
            view = memoryview(data)
            if not self._outgoing:
                view = self._write(view)
            if view:
                self._outgoing.append(view)
                self._wake()

    def close_write(self) -> None:
        """Give the other side the end of its input, now; what waits to be written is dropped."""
        with self._lock:
            self._close_wanted = True
            self._outgoing.clear()
            self._wake()

    def stop(self) -> None:
        """Close everything without waiting for the other side."""
        with self._lock:
            self._stop_wanted = True
            self._wake()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread's end."""
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join(timeout)

    def _wake(self) -> None:
        if not self._released:
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_write, b"!")

    def _write(self, view: memoryview) -> memoryview:
        while view:
            try:
                view = view[os.write(self._write_fd, view) :]
            except BlockingIOError:
                return view
            except OSError:
                # The other side reads no more; what became of it is seen on the reading end.
                self._close_wanted = True
                return memoryview(b"")
        return view

    def _serve_write(self) -> None:
        """Write what waits, and watch the descriptor exactly while something is left."""
        with self._lock:
            while self._outgoing and not self._close_wanted:
                rest = self._write(self._outgoing[0])
                if rest:
                    self._outgoing[0] = rest
                    break
                self._outgoing.popleft()
            if self._close_wanted:
                self._drop_write()
            if not self._write_open:
                return
            watched = self._write_fd in self._selector.get_map()
            if self._write_fd == self._read_fd:
                # A socket whose other side says no more is not read any more, but may still be written to.
                self._forget(self._write_fd)
                events = selectors.EVENT_READ if self._reading else 0
                events |= selectors.EVENT_WRITE if self._outgoing else 0
                if events:
                    self._selector.register(self._write_fd, events)
            elif self._outgoing and not watched:
                self._selector.register(self._write_fd, selectors.EVENT_WRITE)
            elif watched and not self._outgoing:
                self._forget(self._write_fd)

    def _drop_write(self) -> None:
        self._outgoing.clear()
        if self._write_open and self._write_fd != self._read_fd:
            self._forget(self._write_fd)
            os.close(self._write_fd)
        self._write_open = False

    def _forget(self, fd: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(fd)

    def _drain(self, fd: int, take: Callable[[bytes], None], *, all_of_it: bool = False) -> bool:
        """Read once, or until nothing is left; False at the end of the stream."""
        while True:
            try:
                data = os.read(fd, _CHUNK)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            take(data)
            if not all_of_it:
                return True

    def _work(self) -> None:
        for fd in (self._read_fd, self._wake_read, self._noise_fd):
            if fd is not None:
                self._selector.register(fd, selectors.EVENT_READ)
        try:
            self._watch()
            if not self._stop_wanted:
                self._drain(self._read_fd, self._on_data, all_of_it=True)
                if self._noise_fd is not None:
                    self._drain(self._noise_fd, self._on_noise, all_of_it=True)
        finally:
            self._release()
            self._on_closed()

    def _watch(self) -> None:
        next_look = 0.0
        while not self._stop_wanted:
            for key, events in self._selector.select(_TICK if self._reading else _QUICK_TICK):
                if key.fd == self._wake_read:
                    self._drain(key.fd, lambda data: None, all_of_it=True)
                    self._serve_write()
                elif key.fd == self._noise_fd:
                    if not self._drain(key.fd, self._on_noise):
                        self._forget(key.fd)
                else:
                    if events & selectors.EVENT_WRITE:
                        self._serve_write()
                    if events & selectors.EVENT_READ and not self._drain(self._read_fd, self._on_data):
                        self._forget(self._read_fd)
                        self._reading, next_look = False, 0.0
                        self._serve_write()
            if time.monotonic() >= next_look:
                if self._over(self._reading):
                    return
                next_look = time.monotonic() + (_TICK if self._reading else _QUICK_TICK)

    def _release(self) -> None:
        with self._lock:
            self._drop_write()
            self._released = True
            self._selector.close()
            os.close(self._read_fd)
            os.close(self._wake_read)
            os.close(self._wake_write)
            if self._noise_fd is not None:
                os.close(self._noise_fd)
