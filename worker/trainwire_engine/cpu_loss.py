"""Cross entropy under a plain head on the CPU: blocks of logits that stay in a core's cache, each made once.

A block has some positions and some words of the vocabulary. The hidden gradient of a position with scores z under a
head W is `w · (Σ e^(z_j - m) W_j / Σ e^(z_j - m) - W_t)`: a sum over words above a sum over words. Both go over the
blocks with a running maximum m, as attention does in arXiv 2205.14135, so a block's powers meet their rows of W while
they are in the cache, and nothing of the size of the vocabulary is made. A trained head's gradient wants the powers
again when their sum is known: those of one span of positions are kept until then.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx

from trainwire_engine.fastmath import LOG2_E, exp2, row_sums
from trainwire_engine.pieces import note

ROWS, WORDS = 256, 1024
"""Positions and words of a block of logits, a megabyte: larger ones leave the cache, smaller ones are many."""

NOTED = 2
"""Blocks that are a piece of a pass (`pieces`)."""

KEPT = 2**26
"""Powers that a trained head keeps of a span of positions at most, a quarter of a gigabyte; never below 64 rows."""

LN_2 = math.log(2)


def blockwise_cross_entropy(
    hidden: mx.array, weight: mx.array, targets: mx.array, weights: mx.array, *, smoothing: float, trained: bool
) -> tuple[mx.array, mx.array]:
    """The sums of `loss.cross_entropy(hidden @ weight.T, …)` with gradients for `hidden`, and `weight` if `trained`.

    hidden [P, D] and weight [V, D] float32, targets and weights [P].
    """

    @mx.custom_function
    def sums(hidden: mx.array, *trained_weight: mx.array) -> tuple[mx.array, ...]:
        head = trained_weight[0] if trained_weight else weight
        span = _Spans(head, smoothing, trained)
        rows = min(ROWS, max(64, KEPT // weight.shape[0])) if trained else ROWS
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            span.add(hidden[part], targets[part], weights[part])
        return span.results(hidden, targets, weights)

    @sums.vjp
    def pull(primals: Any, cotangents: Any, outputs: Any) -> Any:
        pulled = tuple(gradient * cotangents[0] for gradient in outputs[2:])
        return pulled if trained else pulled[0]

    outputs: Any = sums(hidden, weight) if trained else sums(hidden)
    return outputs[0], outputs[1]


class _Spans:
    """The sums over spans of positions, one after another."""

    def __init__(self, head: mx.array, smoothing: float, trained: bool) -> None:
        self._head = head
        self._smoothing = smoothing
        self._bounds = [(start, min(start + WORDS, head.shape[0])) for start in range(0, head.shape[0], WORDS)]
        self._mean_row = mx.mean(head, axis=0, keepdims=True) if smoothing else None
        self._loss, self._correct = mx.zeros(()), mx.zeros(())
        self._d_hidden: list[mx.array] = []
        self._d_head: list[Any] = [None] * len(self._bounds) if trained else []

    def add(self, hidden: mx.array, targets: mx.array, weights: mx.array) -> None:
        """Take in a span: hidden [R, D], targets and weights [R]."""
        if self._d_hidden:
            # Without this, the blocks of all spans would be made before the first is used up.
            hidden = mx.depends(hidden, [self._d_hidden[-1], self._loss, *self._d_head])
        asked = hidden * LOG2_E
        top: Any = None
        total: Any = None
        pulled: Any = None
        best: Any = None
        kept: list[tuple[mx.array, mx.array]] = []
        for start, end in self._bounds:
            rows = self._head[start:end]
            if pulled is not None:
                # All of the block before: MLX would put its sums off, and keep its powers for them until the last one.
                asked = mx.depends(asked, [pulled, total, best])
                if start % (NOTED * WORDS) == 0:
                    note(asked)
            scores = asked @ rows.T
            guess = mx.argmax(scores, axis=-1, keepdims=True)
            highest = mx.take_along_axis(scores, guess, axis=-1)
            if top is None:
                top, best = highest, guess
                powers = exp2(scores - top)
                total, pulled = row_sums(powers), powers @ rows
            else:
                best = mx.where(highest > top, guess + start, best)
                before, top = top, mx.maximum(top, highest)
                powers = exp2(scores - top)
                shrink = mx.exp((before - top) * LN_2)
                total = total * shrink + row_sums(powers)
                pulled = pulled * shrink + powers @ rows
            if self._d_head:
                kept.append((powers, top))
        share = weights[:, None] / total
        own = self._head[targets]
        chosen = mx.sum(hidden * own, axis=-1, keepdims=True)
        losses = mx.log(total) + top * LN_2 - (1 - self._smoothing) * chosen
        gradient = pulled * share - own * ((1 - self._smoothing) * weights[:, None])
        if self._mean_row is not None:
            losses = losses - self._smoothing * mx.sum(hidden * self._mean_row, axis=-1, keepdims=True)
            gradient = gradient - self._mean_row * (self._smoothing * weights[:, None])
        # The target's score comes from a sum of its own, which may round to more than the whole.
        self._loss = self._loss + mx.sum(mx.maximum(losses[:, 0], 0.0) * weights)
        self._correct = self._correct + mx.sum((best[:, 0] == targets) * weights)
        self._d_hidden.append(gradient)
        for index, (powers, then) in enumerate(kept):
            more = powers.T @ (hidden * (share * mx.exp((then - top) * LN_2)))
            self._d_head[index] = more if self._d_head[index] is None else self._d_head[index] + more

    def results(self, hidden: mx.array, targets: mx.array, weights: mx.array) -> tuple[mx.array, ...]:
        """Loss, right guesses, the hidden gradient [P, D] and, of a trained head, its own [V, D]."""
        d_hidden = mx.concatenate(self._d_hidden)
        if not self._d_head:
            return self._loss, self._correct, d_hidden
        d_head = mx.concatenate(self._d_head).at[targets].subtract(hidden * ((1 - self._smoothing) * weights)[:, None])
        if self._smoothing:
            d_head = d_head - (self._smoothing / self._head.shape[0]) * (weights[None] @ hidden)
        return self._loss, self._correct, d_hidden, d_head
