"""Which processes make a run on several ranks: their commands, and the environment that MLX's backends expect.

The host file is MLX's own: a list of {"ssh", "ips", "rdma"}, or an object with such `hosts`, `backend` and `envs`.
The variables are those that mlx.launch sets.
"""

import itertools
import json
import os
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainwire_protocol.errors import ConfigInvalid

from .options import BACKENDS

RING_PORT, COORDINATOR_PORT = 32323, 12345
_ENGINE = ["-m", "trainwire_engine", "--rank"]
_SSH = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]


@dataclass
class Place:
    """One rank: the command that starts it, and what it reads from its standard input."""

    rank: int
    host: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    cores: set[int] | None = None

    @property
    def local(self) -> bool:
        """Whether it runs on this machine."""
        return is_here(self.host)


def is_here(host: str) -> bool:
    """Whether a host of the host file is this machine."""
    return host in ("127.0.0.1", "localhost", "::1", socket.gethostname())


def on_this_machine(count: int, backend: str | None) -> list[Place]:
    """Give the places of so many ranks here: one GPU each where there are enough, else the ring over loopback."""
    gpus = _gpus()
    backend = backend or ("nccl" if len(gpus) >= count else "ring")
    hosts = [{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]} for _ in range(count)]
    places = _places(hosts, backend, [], iter(_free_ports(count)))
    if backend == "nccl":
        for place, gpu in zip(places, gpus):
            place.environment["CUDA_VISIBLE_DEVICES"] = gpu
    elif not gpus:
        _divide_cores(places)
    return places


def from_file(path: Path, backend: str | None) -> list[Place]:
    """Give the places that a host file names. Raises ConfigInvalid."""
    try:
        content = json.loads(path.read_bytes())
        listed = content["hosts"] if isinstance(content, dict) else content
        about: Mapping[str, Any] = content if isinstance(content, dict) else {}
        hosts = [{"ssh": str(h["ssh"]), "ips": list(h.get("ips", [])), "rdma": h.get("rdma", [])} for h in listed]
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ConfigInvalid(
            f"The host file {path} cannot be used: {type(error).__name__}: {error}.",
            hint='It is a list of {"ssh": "name", "ips": ["address"]}, as mlx.launch reads it.',
        ) from None
    backend = backend or about.get("backend") or "ring"
    if backend not in BACKENDS:
        raise ConfigInvalid(f"{path}: the backend {backend!r} is not one of {', '.join(BACKENDS)}.")
    wanting = [h["ssh"] for h in (hosts if backend == "ring" else hosts[:1]) if not h["ips"]]
    if not hosts or wanting:
        raise ConfigInvalid(f"{path}: {', '.join(wanting) or 'it'} has no ips, by which the other hosts reach it.")
    if backend.startswith("jaccl") and any(len(h["rdma"]) != len(hosts) for h in hosts):
        raise ConfigInvalid(f"{path}: every host needs one rdma device for each host (null for itself).")
    here = all(is_here(h["ssh"]) for h in hosts)
    free = _free_ports(1 + sum(len(h["ips"]) for h in hosts)) if here else ()
    ports = itertools.chain(free, itertools.count(RING_PORT))
    return _places(hosts, backend, [str(word) for word in about.get("envs", [])], ports)


def _places(hosts: Sequence[Mapping[str, Any]], backend: str, extra: list[str], ports: Iterator[int]) -> list[Place]:
    environment = dict(word.split("=", 1) for word in extra if "=" in word)
    environment["MLX_WORLD_SIZE"] = str(len(hosts))
    files: dict[str, str] = {}
    if backend == "ring":
        # As with mlx.launch, several addresses of a host are as many connections.
        files["MLX_HOSTFILE"] = json.dumps([[f"{ip}:{next(ports)}" for ip in host["ips"]] for host in hosts])
    elif backend == "nccl":
        environment |= {"NCCL_HOST_IP": hosts[0]["ips"][0], "NCCL_PORT": str(next(ports))}
    else:
        environment["MLX_JACCL_COORDINATOR"] = f"{hosts[0]['ips'][0]}:{COORDINATOR_PORT}"
        files["MLX_IBV_DEVICES"] = json.dumps([host["rdma"] for host in hosts])
        if backend == "jaccl-ring":
            environment["MLX_JACCL_RING"] = "1"
    places = []
    for rank, host in enumerate(hosts):
        own = {**environment, "MLX_RANK": str(rank)}
        if backend == "nccl":
            before = sum(other["ssh"] == host["ssh"] for other in hosts[:rank])
            own["CUDA_VISIBLE_DEVICES"] = str(before)
        places.append(Place(rank, host["ssh"], _command(host["ssh"]), own, dict(files)))
    return places


def _command(host: str) -> list[str]:
    if is_here(host):
        return [sys.executable, *_ENGINE]
    folder, python = shlex.quote(str(Path.cwd())), shlex.quote(sys.executable)
    script = (
        f"cd {folder} 2>/dev/null; exec env PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 {python} {shlex.join(_ENGINE)} --keep"
    )
    return [*_SSH, "--", host, script]


def _gpus() -> list[str]:
    """Name the NVIDIA GPUs that a process started here may use."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [word for word in chosen.split(",") if word.strip()]
    return [str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def _divide_cores(places: list[Place]) -> None:
    """Give each rank its own cores; ranks on the same ones would wait for each other."""
    if not hasattr(os, "sched_getaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // len(places)
    for place in places if share else ():
        place.cores = set(cores[place.rank * share : (place.rank + 1) * share])


def _free_ports(count: int) -> list[int]:
    """Find ports on which nobody listens; another process may take one before MLX does, which then says so."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports
