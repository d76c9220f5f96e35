"""Lets every lane of a CPU have operations open, where MLX counts those of all threads together.

A thread that hands out operations waits while more than ten tasks of ten operations are open (`eval_impl` in
mlx/transforms.cpp), on whatever stream. When one ends, all that wait go on, so that streams make their operations at
one pace: each waits wherever the other has the larger ones. The number of open tasks is the first member of MLX's
scheduler; begun below zero, it leaves room for each lane's. `pieces` sees to it that none has many more than it needs.
"""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path
from typing import Any

import mlx.core as mx

from trainwire_engine.relocations import is_elf64

EACH = 20
"""Tasks that each lane may have open: those of a block's backward pass."""

_SCHEDULER = "_ZN3mlx4core9scheduler9schedulerEv"
_BEGINNING = re.compile(
    r"private:\s*(friend [^;]*;\s*)?StreamThread& get_thread\(Stream s\);\s*int n_active_tasks_\{0\};"
)

_allowed = 0


def allow(lanes: int) -> bool:
    """Let so many lanes have their tasks open, while nothing is; tells whether that was possible. Never takes away."""
    global _allowed
    count = _count()
    if count is None:
        return False
    more = lanes * EACH - _allowed
    if more > 0:
        mx.synchronize()
        count.value -= more
        _allowed += more
    return True


@functools.cache
def _count() -> Any:
    """MLX's number of open tasks, a C int; None where it is not found to be one."""
    if not is_elf64() or not _laid_out(_header()):
        return None
    scheduler = getattr(_library(), _SCHEDULER, None)
    if scheduler is None:
        return None
    scheduler.restype = ctypes.c_void_p
    count = ctypes.c_int.from_address(scheduler())
    return count if any(_counts(count) for _ in range(3)) else None


def _laid_out(header: str) -> bool:
    """Tell whether a scheduler begins with the number: no virtual function, and of the members it is the first."""
    body = header.partition("class MLX_API Scheduler {")[2].partition("\n};")[0]
    return _BEGINNING.search(body) is not None and "virtual" not in body


def _counts(count: Any) -> bool:
    """Tell whether a number is zero while nothing is open, a few tasks while some are, and zero again."""
    x = mx.ones(30_000)
    mx.eval(x)
    mx.synchronize()
    before = count.value
    for _ in range(60):
        x = mx.sin(x)
    mx.async_eval(x)
    while_open = count.value
    mx.eval(x)
    mx.synchronize()
    return before == count.value == 0 and 0 < while_open <= 60


def _header() -> str:
    try:
        return (Path(mx.__file__).parent / "include" / "mlx" / "scheduler.h").read_text()
    except OSError:
        return ""


def _library() -> Any:
    return ctypes.CDLL(str(Path(mx.__file__).parent / "lib" / "libmlx.so"))
