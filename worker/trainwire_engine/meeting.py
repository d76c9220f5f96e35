"""How the ranks of a run find each other: over MLX's backend, which a launcher's environment describes."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import socket
from pathlib import Path
from typing import NoReturn

import mlx.core as mx
import numpy as np

from trainwire_engine import place
from trainwire_engine.hub import Hub
from trainwire_engine.ranks import Alone
from trainwire_engine.team import Team
from trainwire_protocol.errors import EngineUnavailable

TIMEOUT_VARIABLE = "TRAINWIRE_RANK_TIMEOUT"
DEFAULT_TIMEOUT = 30.0
HANDSHAKE = 5.0
"""Seconds in which whoever connects says which rank it is."""
_ADDRESS_BYTES = 256


def backend() -> str | None:
    """Name the backend that a launcher's environment speaks of; None for a single process."""
    known = os.environ
    if "MLX_RANK" in known:
        if known.get("MLX_HOSTFILE"):
            return "ring"
        if "NCCL_HOST_IP" in known:
            return "nccl"
        if "MLX_JACCL_COORDINATOR" in known:
            return "jaccl"
    return "mpi" if int(known.get("OMPI_COMM_WORLD_SIZE", "1")) > 1 else None


def form() -> Alone:
    """Find the other ranks, if a launcher has started any; raises EngineUnavailable if they cannot be reached."""
    name = backend()
    if name is None:
        return Alone()
    try:
        group = mx.distributed.init(strict=True, backend=name)
    except (RuntimeError, ValueError) as error:
        raise EngineUnavailable(f"The ranks cannot be connected over MLX's {name} backend: {error}.") from error
    if group.size() == 1:
        return Alone()
    try:
        connections, timeout = _connect(group, float(os.environ.get(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT)))
    except OSError as error:
        raise EngineUnavailable(f"The ranks cannot be connected with rank 0: {error}.") from error
    place.forget()
    hub = Hub(group.rank(), connections, timeout)

    def leave() -> NoReturn:
        part()
        os._exit(0)

    hub.on_leave = leave
    return Team(group, hub)


def part() -> None:
    """Take leave of MPI at the end of a run: a process that leaves without a word has failed, to its launcher."""
    if backend() == "mpi":
        ctypes.CDLL(os.environ.get("MLX_MPI_LIBNAME", "libmpi.so")).MPI_Finalize()


def _connect(group: mx.distributed.Group, timeout: float) -> tuple[dict[int, socket.socket], float]:
    """Connect every rank with rank 0; its address, a secret and its timeout come to them through the backend."""
    own, listener = b"", None
    if group.rank() == 0:
        host = _own_address()
        listener = socket.create_server((host, 0), backlog=group.size())
        listener.settimeout(timeout)
        own = f"{host} {listener.getsockname()[1]} {secrets.token_hex(16)} {timeout:g}".encode()
    padded = mx.array(np.frombuffer(own.ljust(_ADDRESS_BYTES, b"\0"), np.uint8).astype(np.int32))
    mine = padded if group.rank() == 0 else mx.zeros_like(padded)
    shared = bytes(np.array(mx.distributed.all_sum(mine, group=group)).astype(np.uint8)).rstrip(b"\0").decode()
    host, port, secret, given = shared.split(" ")
    timeout = float(given)
    found: dict[int, socket.socket] = {}
    if listener is None:
        connection = socket.create_connection((host, int(port)), timeout=timeout)
        connection.sendall(f"{secret} {group.rank():>8}".encode())
        found[0] = connection
    else:
        with listener:
            while len(found) < group.size() - 1:
                connection = listener.accept()[0]
                connection.settimeout(HANDSHAKE)
                word = list[str]()
                with contextlib.suppress(OSError):
                    word = connection.recv(len(secret) + 9, socket.MSG_WAITALL).decode("ascii", "replace").split()
                if len(word) == 2 and secrets.compare_digest(word[0], secret):
                    found[int(word[1])] = connection
                else:
                    connection.close()
    for connection in found.values():
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found, timeout


def _own_address() -> str:
    """The address under which the other ranks reach rank 0: the one that the backend uses."""
    known = os.environ
    if known.get("MLX_HOSTFILE"):
        first = json.loads(Path(known["MLX_HOSTFILE"]).read_text())[0]
        return str((first if isinstance(first, str) else first[0]).rsplit(":", 1)[0])
    if "NCCL_HOST_IP" in known:
        return known["NCCL_HOST_IP"]
    if "MLX_JACCL_COORDINATOR" in known:
        return known["MLX_JACCL_COORDINATOR"].rsplit(":", 1)[0]
    # The address of the way out; a host name often leads to a loopback address. No packet is sent.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())
