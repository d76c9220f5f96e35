"""What work takes of MLX's memory at its peak."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from trainwire_engine.pieces import compute, noted


def peak_of(work: Callable[[], Any]) -> int:
    """The peak of work that is handed out in pieces, as a pass is."""
    before = 0
    for _ in range(2):
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        with noted() as notes:
            made = work()
        compute(notes)
        mx.eval(made)
        del made
    return mx.get_peak_memory() - before
