"""Memory that recorded passes compute in: taken from MLX for good, and shared by all recordings.

Kernels of a recording write where they wrote when they were recorded. MLX gave that memory back to its cache of
buffers then, and would give it to others. So the arena takes whatever is in the cache after a recording, and lends it
to MLX again for the next one: passes do not overlap, so they may use the same memory one after the other.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx

from trainwire_engine.cuda.compiler import compile_source
from trainwire_engine.cuda.graphs import library

_ALLOCATOR = "_ZN3mlx4core9allocator9allocatorEv"
_LIMIT, _FIRST, _SIZE, _PAGE, _ACTIVE = 0x48, 0x80, 0x90, 0x98, 0xE0
"""Where the members of CudaAllocator lie (mlx/backend/cuda/allocator.h and common/buffer_cache.h)."""
_PAGE_SIZE = 16384
_AT_ONCE = (64, 8, 1)
"""Arrays that a kernel allocates."""
_SMALL = 8
"""Bytes of MLX's smallest buffers, some of which live on: marks of recordings, constants of traces."""

Buffer = tuple[int, int]
"""Address and bytes."""


class Arena:
    """Buffers that MLX counts as in use and nobody reads or writes but recordings."""

    def __init__(self) -> None:
        self._held: list[mx.array] = []
        self._buffers: set[Buffer] = set()

    @property
    def size(self) -> int:
        """Its bytes."""
        return sum(array.nbytes for array in self._held)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let MLX compute in the arena, and nowhere else if it is large enough; it has grown if it was not."""
        mx.synchronize()
        mx.clear_cache()
        self._held.clear()
        page = ctypes.c_size_t.from_address(_allocator() + _PAGE)
        # MLX takes a cached buffer that is two pages too large at most: passes of other sizes would share nothing.
        page.value = 2**50
        try:
            yield
        finally:
            page.value = _PAGE_SIZE
            mx.synchronize()
            self._take()

    def whole_after(self, before: set[Buffer]) -> bool:
        """Tell whether nothing was lost of what the arena was, as where MLX gave memory back to the system."""
        return not {buffer for buffer in before - self._buffers if buffer[1] > _SMALL}

    @property
    def buffers(self) -> set[Buffer]:
        """What it consists of."""
        return set(self._buffers)

    def _take(self) -> None:
        """Take everything that is in MLX's cache."""
        self._buffers.clear()
        # Other threads give buffers back too.
        for _ in range(3):
            cached = sorted(_cached(), key=lambda buffer: -buffer[1])
            self._buffers.update(cached)
            sizes = [size for _, size in cached]
            for count in _AT_ONCE:
                while len(sizes) >= count:
                    self._held += _claimed(sizes[:count])
                    sizes = sizes[count:]


def usable() -> bool:
    """Tell whether MLX's allocator lies in memory as it is expected here; nobody else may compute meanwhile."""
    # A thread of MLX's may still be giving buffers back.
    return any(_as_expected() for _ in range(3))


def _as_expected() -> bool:
    try:
        # The list of an empty cache would tell nothing.
        mx.eval(mx.zeros(_PAGE_SIZE))
        mx.synchronize()
        base = _allocator()
        limit = mx.set_cache_limit(0)
        mx.set_cache_limit(limit)
        return (
            _word(base + _LIMIT) == limit
            and _word(base + _PAGE) == _PAGE_SIZE
            and _word(base + _SIZE) == mx.get_cache_memory() > 0
            and _word(base + _ACTIVE) == mx.get_active_memory()
            and sum(size for _, size in _cached()) == mx.get_cache_memory()
        )
    except (AttributeError, OSError):
        return False


def compile_claims() -> None:
    """Compile the kernels by which memory is taken."""
    for count in _AT_ONCE:
        _claim(count)


def _cached() -> list[Buffer]:
    """The buffers in MLX's cache: a list of holders {previous, next, buffer}, a buffer being {address, bytes, …}."""
    found = []
    holder = _word(_allocator() + _FIRST)
    while holder:
        buffer = _word(holder + 16)
        found.append((_word(buffer), _word(buffer + 8)))
        holder = _word(holder + 8)
    return found


def _claimed(sizes: Sequence[int]) -> list[mx.array]:
    """Allocate arrays of so many bytes, by a kernel that does nothing."""
    shapes = [(size,) if size < 2**31 else (size // _PAGE_SIZE, _PAGE_SIZE) for size in sizes]
    made = mx.fast.precompiled_cuda_kernel(
        name="claim",
        compiled_source=_claim(len(sizes)),
        inputs=[],
        output_shapes=shapes,
        output_dtypes=[mx.uint8] * len(sizes),
        scalars=[],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
    )
    mx.eval(made)
    return list(made)


@functools.cache
def _claim(count: int) -> bytes:
    arguments = ", ".join(f"unsigned char* buffer{i}" for i in range(count))
    return compile_source(f'extern "C" __global__ void claim({arguments}) {{}}\n')


@functools.cache
def _allocator() -> int:
    function = getattr(library(), _ALLOCATOR)
    function.restype = ctypes.c_size_t
    return int(function())


def _word(address: int) -> int:
    return ctypes.c_size_t.from_address(address).value
