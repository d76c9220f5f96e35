"""The loss on data that is not trained on, over all its rows, weighted by tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from trainwire_engine.batches import MicroBatch, plan
from trainwire_engine.passes import EvaluateSums
from trainwire_engine.ranks import Alone, Sums

_ROWS_AT_ONCE = 1024
"""Rows whose arrays are made together; a validation set may be larger than memory."""


@dataclass(frozen=True)
class EvalResult:
    """Mean loss in nats over `tokens` trained tokens, `correct` of them predicted; nan without a token."""

    loss: float
    tokens: int
    correct: int
    ms: float


def evaluate(
    sums: EvaluateSums,
    dataset: Any,
    config: Any,
    max_batches: int,
    interrupted: Callable[[], bool],
    ranks: Alone | None = None,
) -> EvalResult | None:
    """Evaluate the first `max_batches` times `batch_size` rows, or all of them if it is 0.

    Dropout and label smoothing are off. Between batches `interrupted` is asked; None is returned if it says so.
    The sums are made in double precision in a fixed order, so the same weights give the same loss, bit for bit,
    on however many ranks.
    """
    started = time.perf_counter()
    rows = len(dataset) if not max_batches else min(len(dataset), max_batches * config.batch_size)
    ranks = ranks or Alone()
    mine, own = ranks.take_turns(), list[tuple[int, float, float, int]]()
    running: tuple[int, mx.array, mx.array, int] | None = None
    for index, batch in enumerate(_batches(dataset, rows, config.micro_batch_tokens, config.packing)):
        if interrupted():
            ranks.tell("abandon")
            return None
        if not mine(batch.tokens.size):
            continue
        # The next batch is under way while the one before is read.
        ahead = (index, *sums(batch), int(batch.weights.sum()))
        mx.async_eval(*ahead[1:3])
        if running is not None:
            own.append(_read(running))
        running = ahead
    if running is not None:
        own.append(_read(running))
    merged: Sums | None = ranks.merge(own)
    if merged is None:
        return None
    loss, correct, tokens = 0.0, 0.0, 0
    for _, more_loss, more_correct, more_tokens in merged:
        loss, correct, tokens = loss + more_loss, correct + more_correct, tokens + more_tokens
    mean = loss / tokens if tokens else float("nan")
    return EvalResult(mean, tokens, round(correct), (time.perf_counter() - started) * 1000)


def _read(running: tuple[int, mx.array, mx.array, int]) -> tuple[int, float, float, int]:
    index, loss, correct, tokens = running
    return index, float(loss), float(correct), tokens


def _batches(dataset: Any, rows: int, micro_batch_tokens: int, packing: bool) -> Iterator[MicroBatch]:
    by_length = np.argsort(-np.asarray(dataset.lengths[:rows]), kind="stable")
    for start in range(0, rows, _ROWS_AT_ONCE):
        part = [int(row) for row in by_length[start : start + _ROWS_AT_ONCE]]
        yield from plan(dataset, part, micro_batch_tokens, packing=packing)
