"""One optimizer update from several micro-batches: gradients summed, divided once, clipped, guarded, applied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from trainwire_engine.batches import MicroBatch
from trainwire_engine.model import Model
from trainwire_engine.optimizer import Optimizer


@dataclass(frozen=True)
class UpdateResult:
    """What one update measured: `loss` in nats over `tokens` trained tokens, `correct` of them predicted."""

    loss: float
    tokens: int
    correct: int
    grad_norm: float
    skipped: bool


class UpdateStep:
    """Make updates of a model; `state` is the optimizer's state and can be set for a resume."""

    def __init__(self, model: Model, optimizer: Optimizer, config: Any) -> None:
        self.model = model
        self.optimizer = optimizer
        self.state: dict[str, mx.array] = optimizer.init(model.trainable)

    def __call__(
        self, micro_batches: Sequence[MicroBatch], *, step: int, learning_rate: float, max_grad_norm: float | None
    ) -> UpdateResult:
        raise NotImplementedError
