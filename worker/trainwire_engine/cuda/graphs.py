"""The graphs of kernels that MLX hands to the card while it evaluates, kept so that they can be launched again.

MLX builds a CUDA graph of what it evaluates, launches it and lets it go. The host needs 25 µs for each operation of it;
to launch a graph that is ready takes less than a microsecond a kernel. MLX tells nobody about its graphs, so its
function that is called once after every launch is replaced, through its slot in the relocation table, while one looks.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from trainwire_engine.relocations import find_slots, is_elf64, write_slot

_LAUNCHED = "_ZN3mlx4core2cu14CommandEncoder17clear_graph_stateEv"
_STREAM, _GRAPH = 8, 16
_LAYOUT = ("Device& device_;", "CudaStream stream_;", "CudaGraph graph_;")
"""The first members of CommandEncoder, a pointer each (mlx/backend/cuda/device.h)."""


class GraphFailed(Exception):
    """CUDA's driver refused something: its number."""


class Graph:
    """One graph on its stream, ready to be launched any number of times; what its kernels point to must stay."""

    def __init__(self, graph: int, stream: int) -> None:
        self._stream = ctypes.c_void_p(stream)
        self._ready = ctypes.c_void_p()
        check(driver().cuGraphInstantiateWithFlags(ctypes.byref(self._ready), ctypes.c_void_p(graph), 0))

    def launch(self) -> None:
        """Hand it to the card, behind everything that its stream was given before."""
        check(driver().cuGraphLaunch(self._ready, self._stream))

    def __del__(self) -> None:
        if self._ready:
            driver().cuGraphExecDestroy(self._ready)


def usable() -> bool:
    """Tell whether MLX is built as it is expected here: its slot is there, and its header has the layout."""
    if not is_elf64() or not _slot():
        return False
    header = Path(mx.__file__).parent / "include" / "mlx" / "backend" / "cuda" / "device.h"
    try:
        encoder = header.read_text().split("class MLX_API CommandEncoder")[1].split("class MLX_API Device")[0]
    except (OSError, IndexError):
        return False
    return " ".join(_LAYOUT) in " ".join(encoder.split()) and "virtual" not in encoder


@contextmanager
def watched() -> Iterator[list[Graph]]:
    """Collect the graphs that this thread's evaluations launch inside the block; raises GraphFailed at its end."""
    found: list[Graph] = []
    failures: list[Exception] = []
    slot = _slot()
    original = getattr(library(), _LAUNCHED)
    original.argtypes, original.restype = (ctypes.c_void_p,), None
    thread = threading.get_ident()

    def launched(encoder: int) -> None:
        if threading.get_ident() == thread and not failures:
            try:
                graph, stream = (ctypes.c_void_p.from_address(encoder + at).value or 0 for at in (_GRAPH, _STREAM))
                found.append(Graph(graph, stream))
                # MLX reuses memory once the card is through with it: less memory is needed if the host waits.
                check(driver().cuStreamSynchronize(ctypes.c_void_p(stream)))
            except Exception as error:
                failures.append(error)
        original(encoder)

    hook = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(launched)
    write_slot(slot, ctypes.cast(hook, ctypes.c_void_p).value or 0)
    try:
        yield found
    finally:
        write_slot(slot, ctypes.cast(original, ctypes.c_void_p).value or 0)
    if failures:
        raise failures[0]


@functools.cache
def _slot() -> int:
    """The place of the function's address, 0 if there is none; to read the table takes a twentieth of a second."""
    return find_slots((_LAUNCHED,)).get(_LAUNCHED, 0)


def driver() -> Any:
    """CUDA's driver, which MLX has loaded."""
    return ctypes.CDLL("libcuda.so.1")


def check(status: int) -> None:
    """Raise GraphFailed for a status that is no success."""
    if status:
        raise GraphFailed(f"CUDA error {status}")


def library() -> Any:
    return ctypes.CDLL(str(Path(mx.__file__).parent / "lib" / "libmlx.so"))
