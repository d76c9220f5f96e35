"""What the process computes with on a CPU: a fast BLAS under MLX, and an allocator that keeps its memory.

The `mlx-cpu` wheel calls `cblas_sgemm` of a reference BLAS that it carries. On Linux the address that libmlx calls
sits in a slot of its relocation table, found by `relocations`; this module puts in the address of the same function
from OpenBLAS, BLIS or MKL, whatever prefix that library gives its names. Nothing is written to disk and no
compiler is needed. A product is checked against plain arithmetic, and the old address goes back if it is wrong.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwire_engine.relocations import find_slots, is_elf64, read_slot, write_slot

SYSTEM_LIBRARIES = ("libopenblas.so.0", "libmkl_rt.so.2", "libblis.so.4")


@dataclass(frozen=True)
class Native:
    """What computes, so that a resume can compute with the same.

    `blas` names the library in words, `path` is its file if it is not MLX's own, `lanes` is the number of streams
    and threads that the work is spread over.
    """

    blas: str
    path: str | None = None
    lanes: int = 1

    @property
    def words(self) -> str:
        """The BLAS and the cores it uses, for the `init` event."""
        if self.path is None:
            return self.blas
        used = str(self.lanes) if self.lanes == cores() else f"{self.lanes} of {cores()}"
        return f"{self.blas}, {used} {'core' if cores() == 1 else 'cores'}"


_set_threads: Any = None
_lanes: int | None = None


def use_threads(count: int) -> None:
    """Let the exchanged BLAS use so many threads for one product; MLX's own has always one.

    OpenBLAS's threads wait for each other in loops: with more of them than free cores a small product takes a
    hundred times as long. So `prepare` leaves it one thread, `lanes` gives it more where nothing else runs, and it
    never gets more than there are cores.
    """
    if _set_threads is not None:
        _set_threads(min(count, cores()))


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def lanes() -> int:
    """Streams and threads that the work is spread over: one for each core, or as many as the resumed run had."""
    return _lanes or cores()


def prepare_like(before: Native) -> Native:
    """Set up this process as the one that wrote a checkpoint was, as far as its library and its cores can be had.

    The numbers of products and of their sums depend on both in the last bit. A library of the same name and version
    elsewhere on the disk is as good; where there is none, it is what `prepare` finds.
    """
    _use_lanes(before.lanes)
    places = ["none"] if before.path is None else [before.path, *_candidates()]
    for place in places:
        with contextlib.suppress(ValueError):
            found = _set_up(place)
            if found.blas == before.blas:
                return found
    return _set_up("auto")


def _use_lanes(count: int | None) -> None:
    global _lanes
    _lanes = count


def prepare(blas: str = "auto", lanes: int | None = None) -> Native:
    """Set up allocator and BLAS of this process, before MLX computes anything.

    `blas` is `auto` (the first library found that works), `none` (MLX's own) or the path of a library. A machine
    that lacks all of them keeps MLX's own BLAS. `lanes` are as many as there are cores, or as given. Raises ValueError
    if a named library cannot be used.
    """
    _use_lanes(lanes)
    return _set_up(blas)


def _set_up(blas: str) -> Native:
    if sys.platform == "darwin":
        if blas not in ("auto", "none"):
            raise ValueError("on a Mac MLX computes with Accelerate and with nothing else")
        return Native("Accelerate", None, lanes())
    _keep_memory()
    if blas == "none" or not is_elf64():
        return Native("MLX's own", None, lanes())
    slots = find_slots()
    for path in [blas] if blas != "auto" else _candidates():
        native = _try_library(path, slots)
        if native is not None:
            return native
    if blas != "auto":
        raise ValueError(f"{blas} is no BLAS library that MLX can compute with")
    return Native("MLX's own", None, lanes())


def _keep_memory() -> None:
    """Tell glibc to serve large blocks from a heap that is never trimmed: MLX frees and takes the same sizes
    all the time, and a fresh mapping costs a page fault per 4 KiB."""
    mmap_threshold, trim_threshold, arenas = -3, -1, -8
    if not _glibc("mallopt", mmap_threshold, 2**30):
        # Older versions take no more than half of the heap of a thread.
        _glibc("mallopt", mmap_threshold, 2**25)
    _glibc("mallopt", trim_threshold, 2**31 - 1)
    _glibc("mallopt", arenas, 1)


def give_memory_back() -> None:
    """Return what the allocator has kept of freed memory to the system, once, where it keeps any."""
    _glibc("malloc_trim", 0)


def _glibc(name: str, *arguments: int) -> int:
    """Call a function of the C library that others than glibc lack; 0 if it is not there, or did nothing."""
    with contextlib.suppress(OSError, AttributeError):
        return int(getattr(ctypes.CDLL(None), name)(*arguments))
    return 0


def _candidates() -> Iterator[str]:
    spec = importlib.util.find_spec("scipy_openblas32")
    if spec is not None and spec.submodule_search_locations:
        for root in spec.submodule_search_locations:
            yield from (str(file) for file in sorted(Path(root, "lib").glob("libscipy_openblas*.so")))
    yield from SYSTEM_LIBRARIES
    yield from (str(file) for file in sorted(Path(sys.prefix, "lib").glob("libmkl_rt.so.*")))


def _try_library(path: str, slots: dict[str, int]) -> Native | None:
    try:
        library = ctypes.CDLL(path)
    except OSError:
        return None
    addresses = {name: _address(library, name) for name in slots}
    if not slots or not all(addresses.values()):
        return None
    before = {name: read_slot(slot) for name, slot in slots.items()}
    try:
        for name, slot in slots.items():
            write_slot(slot, addresses[name])
    except OSError:
        return None
    if not _computes():
        for name, slot in slots.items():
            write_slot(slot, before[name])
        return None
    _take_threads(library)
    return Native(_describe(library, path), path, lanes())


def _take_threads(library: ctypes.CDLL) -> None:
    global _set_threads
    for name in ("scipy_openblas_set_num_threads", "openblas_set_num_threads", "bli_thread_set_num_threads"):
        function = getattr(library, name, None)
        if function is not None:
            function.argtypes = [ctypes.c_int if "openblas" in name else ctypes.c_long]
            _set_threads = function
            break
    use_threads(1)


def _address(library: ctypes.CDLL, name: str) -> int:
    for prefix in ("", "scipy_"):
        function = getattr(library, prefix + name, None)
        if function is not None:
            return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


def _describe(library: ctypes.CDLL, path: str) -> str:
    for prefix in ("", "scipy_"):
        config = getattr(library, f"{prefix}openblas_get_config", None)
        if config is not None:
            config.restype = ctypes.c_char_p
            words = config().decode("ascii", "replace").split()
            core = getattr(library, f"{prefix}openblas_get_corename", None)
            if core is not None:
                core.restype = ctypes.c_char_p
            kind = core().decode("ascii", "replace") if core is not None else platform.machine()
            return f"{' '.join(words[:2])}, {kind}"
    return Path(path).name


def _computes() -> bool:
    """Multiply small matrices of whole numbers, whose products are exact, in both layouts MLX uses."""
    import mlx.core as mx

    a, b = mx.arange(35.0).reshape(5, 7), mx.arange(21.0).reshape(7, 3)
    exact = [[float(sum((7 * i + k) * (3 * k + j) for k in range(7))) for j in range(3)] for i in range(5)]
    with mx.stream(mx.cpu):
        return bool((a @ b).tolist() == exact and (a @ mx.contiguous(b.T).T).tolist() == exact)
