"""A model ready to train: loaded with mlx-lm's architectures, adapters attached or weights unfrozen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class Model:
    """A module with its trainable weights kept apart as masters."""

    module: nn.Module
    trainable: dict[str, mx.array]
    model_config: dict[str, Any]
    folder: Path
    head: str
    head_reason: str | None
    vocab_size: int
    forward_dtype: mx.Dtype
    trainable_parameters: int
    total_parameters: int

    def set_trainable(self, params: dict[str, mx.array]) -> None:
        raise NotImplementedError

    def adapter_config(self) -> dict[str, Any]:
        raise NotImplementedError

    @contextmanager
    def adapter_disabled(self) -> Iterator[None]:
        raise NotImplementedError
        yield

    def tensors_to_save(self) -> dict[str, mx.array]:
        raise NotImplementedError


def load_model(config: Any) -> Model:
    """Load the config's model and prepare it for the config's method; raises ModelLoadFailed."""
    raise NotImplementedError
