"""Optimizers as pure functions over flat dictionaries of arrays, and learning-rate schedules in updates."""

from __future__ import annotations

from typing import Any

import mlx.core as mx


class Optimizer:
    """An update rule by name: `init` makes the state, `apply` returns new weights and state, compilable."""

    def __init__(self, config: Any) -> None:
        self.name: str = config.optimizer

    def init(self, params: dict[str, mx.array]) -> dict[str, mx.array]:
        raise NotImplementedError

    def apply(
        self,
        params: dict[str, mx.array],
        grads: dict[str, mx.array],
        state: dict[str, mx.array],
        learning_rate: mx.array,
    ) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
        raise NotImplementedError


class Schedule:
    """The learning rate of each update, from warm-up to the end of the run."""

    def __init__(self, config: Any, total_steps: int) -> None:
        self.total_steps = total_steps

    def learning_rate(self, update: int, peak: float) -> float:
        """The rate of the update with this index (from 0) when the schedule's peak is `peak`."""
        raise NotImplementedError
