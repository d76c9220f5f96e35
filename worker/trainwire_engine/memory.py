"""The engine's memory: limits set at the start, figures for the step events, the default micro-batch size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MemoryFigures:
    """Bytes that MLX holds: in use, kept for reuse, and the highest use since the last reset."""

    active: int
    cache: int
    peak: int


def configure() -> None:
    """Cap the buffer cache, and set the wired limit on Apple GPUs; called once before a model loads."""


def figures(*, reset_peak: bool = False) -> MemoryFigures:
    raise NotImplementedError


def clear_cache() -> None:
    """Give the kept buffers back to the system, as while paused."""


def default_micro_batch_tokens(model_config: dict[str, Any], method: str, max_seq_length: int) -> int:
    """Padded tokens of one micro-batch from the model and the device's total memory, a power of two."""
    raise NotImplementedError
