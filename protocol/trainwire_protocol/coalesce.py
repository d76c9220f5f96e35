"""Puts several `step` events into one: the same arithmetic for `log_every` and for slow readers."""

import math

from .events import Step


def _mean(a: float | None, b: float | None, tokens_a: int, tokens_b: int) -> float | None:
    """Weigh two means by their tokens; a side without tokens (a skipped update) has no say."""
    if tokens_a and tokens_b and a is not None and b is not None:
        return (a * tokens_a + b * tokens_b) / (tokens_a + tokens_b)
    return b if tokens_b or not tokens_a else a


def perplexity(loss: float | None) -> float | None:
    """Give exp(loss), infinite where that overflows."""
    if loss is None:
        return None
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def merge_steps(older: Step, newer: Step) -> Step:
    """Give one event for both: sums are conserved, means weighted by tokens, the rest is the newer's."""
    tokens = older.total_tokens + newer.total_tokens
    milliseconds = older.training_time_ms + newer.training_time_ms
    loss = _mean(older.loss, newer.loss, older.total_tokens, newer.total_tokens)
    micro_batches = older.micro_batches + newer.micro_batches
    padding = older.padding_fraction * older.micro_batches + newer.padding_fraction * newer.micro_batches
    return Step(
        seq=newer.seq,
        ts=newer.ts,
        cause=newer.cause,
        step=newer.step,
        loss=loss,
        total_tokens=tokens,
        training_time_ms=milliseconds,
        updates=older.updates + newer.updates,
        total_steps=newer.total_steps,
        epoch=newer.epoch,
        epoch_progress=newer.epoch_progress,
        learning_rate=newer.learning_rate,
        grad_norm=newer.grad_norm,
        token_accuracy=_mean(older.token_accuracy, newer.token_accuracy, older.total_tokens, newer.total_tokens),
        perplexity=perplexity(loss),
        trained_tokens=newer.trained_tokens,
        tokens_per_second=1000.0 * tokens / milliseconds if milliseconds else 0.0,
        padding_fraction=padding / micro_batches if micro_batches else 0.0,
        micro_batches=micro_batches,
        data_time_ms=older.data_time_ms + newer.data_time_ms,
        active_bytes=newer.active_bytes,
        cache_bytes=newer.cache_bytes,
        peak_bytes=max(older.peak_bytes, newer.peak_bytes),
        eta_ms=newer.eta_ms,
        skipped=older.skipped + newer.skipped,
    )
