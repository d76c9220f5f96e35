"""Puts several `step` events into one: the same arithmetic for `log_every` and for slow readers."""

import copy
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
    merged = copy.copy(newer)
    merged.updates = older.updates + newer.updates
    merged.total_tokens = tokens = older.total_tokens + newer.total_tokens
    merged.training_time_ms = milliseconds = older.training_time_ms + newer.training_time_ms
    merged.data_time_ms = older.data_time_ms + newer.data_time_ms
    merged.skipped = older.skipped + newer.skipped
    merged.micro_batches = micro_batches = older.micro_batches + newer.micro_batches
    merged.peak_bytes = max(older.peak_bytes, newer.peak_bytes)
    merged.loss = loss = _mean(older.loss, newer.loss, older.total_tokens, newer.total_tokens)
    merged.perplexity = perplexity(loss)
    merged.token_accuracy = _mean(older.token_accuracy, newer.token_accuracy, older.total_tokens, newer.total_tokens)
    merged.tokens_per_second = 1000.0 * tokens / milliseconds if milliseconds else 0.0
    padding = older.padding_fraction * older.micro_batches + newer.padding_fraction * newer.micro_batches
    merged.padding_fraction = padding / micro_batches if micro_batches else 0.0
    return merged
