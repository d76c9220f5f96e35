"""Passes over micro-batches: how a batch reaches the device, how a pass is compiled, and those without a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from trainwire_engine import pieces
from trainwire_engine.batches import MicroBatch
from trainwire_engine.cuda import tracing
from trainwire_engine.lanes import in_pieces
from trainwire_engine.loss import micro_batch_sums
from trainwire_engine.model import Arrays, Model
from trainwire_engine.segments import apart


class EvaluateSums:
    """Sum loss and correct guesses of micro-batches without gradient, dropout or label smoothing."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._traced = False
        self._sums = compiled(self._trace)

    def __call__(self, batch: MicroBatch) -> tuple[mx.array, mx.array]:
        """Return (loss sum in nats, correct), two lazy float32 scalars; the tokens are `batch.weights.sum()`."""
        with pieces.noted(in_pieces(self.model.total_parameters, batch)) as notes:
            sums: tuple[mx.array, mx.array] = self._sums(self.model.trainable, device_arrays(batch))
        pieces.compute(notes)
        if self._traced:
            self.model.release()
            self._traced = False
        return sums

    def _trace(self, params: Arrays, batch: tuple[mx.array, ...]) -> tuple[mx.array, mx.array]:
        self._traced = True
        self.model.train_mode(False)
        with apart(*batch[5:]):
            return micro_batch_sums(self.model, params, batch, smoothing=0.0, gradient=False)


def compiled(function: Callable[..., Any], *, fused: bool = False) -> Callable[..., Any]:
    """Compile a step function where that pays: on the CPU, fused kernels save less than their C++ compiler costs.

    Measured: tracing saves under 1 % of a step of 2 million weights and 18 % of one of 35 thousand, while the
    40 kernels of a first step take 20 s to compile. On a CUDA card with our kernels operations are `fused` only if
    asked for.
    """
    if mx.default_device() == mx.cpu:
        return function
    traced = mx.compile(function)
    if not fused:
        return traced

    def call(*args: Any) -> Any:
        with tracing.fusing():
            return traced(*args)

    return call


def device_arrays(batch: MicroBatch) -> tuple[mx.array, ...]:
    """Hand a micro-batch to MLX: tokens, positions, targets, weights, sources, and of a packed one back and spread."""
    return tuple(mx.array(array) for array in host_arrays(batch))


def host_arrays(batch: MicroBatch) -> tuple[np.ndarray, ...]:
    """The arrays of a micro-batch as `device_arrays` hands them over, each number four bytes."""
    arrays = (batch.tokens, batch.positions, batch.targets, batch.weights, batch.sources, batch.back, *batch.spread)
    return tuple(array for array in arrays if array is not None)
