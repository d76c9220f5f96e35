"""How a rank that trainwire's launcher started learns its place, and notices that the launcher is gone.

The launcher writes one line of JSON to the standard input, which no process list shows, and keeps the other end open:
an end of input means that it is gone, and over ssh that the connection is.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
from typing import BinaryIO

_PR_SET_PDEATHSIG = 1
_written: list[str] = []


def take_place(stdin: BinaryIO) -> socket.socket | None:
    """Set what MLX and the ranks read from the environment; gives rank 0's connection to the worker, None elsewhere.

    The line has `environment`, `files` (contents, whose temporary files the environment names) and for rank 0
    `channel`, an address "host:port", and `token`, by which it is known there.
    """
    place = json.loads(stdin.readline())
    os.environ.update(place["environment"])
    for name, content in place["files"].items():
        descriptor, path = tempfile.mkstemp(prefix="trainwire-", suffix=".json")
        with os.fdopen(descriptor, "w") as file:
            file.write(content)
        os.environ[name] = path
        _written.append(path)
    threading.Thread(target=_leave_with_launcher, args=(stdin,), name="launcher", daemon=True).start()
    if not place.get("channel"):
        return None
    host, port = place["channel"].rsplit(":", 1)
    connection = socket.create_connection((host, int(port)), timeout=30)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(place["token"].encode())
    return connection


def keep() -> None:
    """Leave a parent behind that ends this process once the launcher is gone, even if a signal has stopped it.

    The parent passes the standard input on, and leaves with this process and its exit status.
    """
    there, here = os.pipe()
    lives, living = os.pipe()
    child = os.fork()
    if not child:
        os.close(here)
        os.close(lives)
        os.dup2(there, 0)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    os.close(there)
    os.close(living)
    while True:
        if lives in select.select([0, lives], [], [])[0]:
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
        data = os.read(0, 4096)
        if not data:
            os.kill(child, signal.SIGKILL)
            os._exit(9)
        with contextlib.suppress(BrokenPipeError):
            os.write(here, data)


def forget() -> None:
    """Remove the temporary files: MLX has read them."""
    while _written:
        os.unlink(_written.pop())


def _leave_with_launcher(stdin: BinaryIO) -> None:
    while stdin.read(4096):
        pass
    os._exit(9)
