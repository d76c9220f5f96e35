"""Signals as events of the worker's loop, and the watch over the process that spawned it."""

import contextlib
import os
import signal
import socket

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end the run gracefully."""


def hold() -> None:
    """Keep the signals that end a run waiting until `Signals` takes them, so that each is answered by a last line."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


def signal_name(number: int) -> str:
    """Name a signal; some have only a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


class Signals:
    """Turns signals into bytes on a descriptor that the loop waits for."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for number in ENDING:
            # A signal that the parent has told to ignore (nohup does so) stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _wake)
        signal.signal(signal.SIGCHLD, _wake)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        for name in ("SIGTTIN", "SIGTTOU", "SIGPIPE"):
            signal.signal(getattr(signal, name), signal.SIG_IGN)

    def fileno(self) -> int:
        """The descriptor that becomes readable when a signal arrived."""
        return self._receiver.fileno()

    def received(self) -> list[int]:
        """Give the numbers of the signals since the last call."""
        with contextlib.suppress(BlockingIOError):
            return list(self._receiver.recv(4096))
        return []


def _wake(_number: int, _frame: object) -> None:
    """Nothing to do here: the wakeup descriptor carries the number."""


class ParentWatch:
    """Knows whether the process that spawned the worker is gone.

    The parent's id is compared with the one at the start, never with 1: in a container 1 may be the parent.
    """

    def __init__(self, parent_pid: int | None) -> None:
        self._first = os.getppid()
        self._pid = parent_pid

    def gone(self) -> bool:
        """Say whether the parent, or the process named by its id, has ended."""
        if self._pid is None or self._pid == self._first:
            return os.getppid() != self._first
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False
