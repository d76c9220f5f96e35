"""Whether MLX fuses the operations of a compiled function: each fused kernel costs NVRTC seconds on a CUDA card.

A function that is compiled without fusing is still traced once and replayed without Python. MLX has this mode in C++
(`set_compile_mode`, mlx/compile.h) and not in Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainwire_engine.cuda.graphs import library

_NO_FUSE, _ENABLED = 2, 3
_SYMBOL = "_ZN3mlx4core16set_compile_modeENS0_11CompileModeE"

_fuses = True


def stop_fusing() -> bool:
    """Compile without fusing from now on in this process; False, and all as before, if MLX has no such mode."""
    return _set(False)


@contextmanager
def fusing(wanted: bool = True) -> Iterator[None]:
    """Fuse, or not, what is traced inside the block."""
    before = _fuses
    _set(wanted)
    try:
        yield
    finally:
        _set(before)


def _set(fuse: bool) -> bool:
    global _fuses
    if fuse == _fuses:
        return True
    function = _function()
    if function is None:
        return False
    function(_ENABLED if fuse else _NO_FUSE)
    _fuses = fuse
    return True


def _function() -> Any:
    try:
        return getattr(library(), _SYMBOL)
    except (OSError, AttributeError):
        return None
