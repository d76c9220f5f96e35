"""Updates that are put together keep their sums and means: nothing that a log line says is lost."""

import functools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwire_protocol.coalesce import merge_steps, perplexity
from trainwire_protocol.events import Step

PLAIN = {
    "total_steps": 100,
    "epoch": 1,
    "epoch_progress": 0.5,
    "grad_norm": 1.0,
    "trained_tokens": 0,
    "tokens_per_second": 0.0,
    "active_bytes": 1,
    "cache_bytes": 2,
    "eta_ms": 5,
}


@st.composite
def updates(draw: Any) -> list[Step]:
    steps = []
    for number in range(1, draw(st.integers(2, 12)) + 1):
        skipped = draw(st.integers(0, 3)) == 0
        loss = math.nan if skipped else draw(st.floats(0.01, 20))
        steps.append(
            Step(
                **PLAIN,
                seq=number,
                ts=1000 + number,
                step=number,
                loss=loss,
                total_tokens=0 if skipped else draw(st.integers(1, 10_000)),
                training_time_ms=draw(st.floats(0.1, 1000)),
                updates=1,
                learning_rate=number / 100,
                token_accuracy=None if skipped else draw(st.floats(0, 1)),
                perplexity=perplexity(loss),
                padding_fraction=draw(st.floats(0, 0.9)),
                micro_batches=draw(st.integers(1, 8)),
                data_time_ms=draw(st.floats(0, 10)),
                peak_bytes=draw(st.integers(0, 1000)),
                skipped=int(skipped),
            )
        )
    return steps


@given(steps=updates(), cut=st.integers(1, 11))
@settings(derandomize=True, deadline=None, max_examples=200)
def test_sums_are_conserved_and_means_weighted_however_updates_are_put_together(steps: list[Step], cut: int) -> None:
    merged = functools.reduce(merge_steps, steps)
    halves = [part for part in (steps[:cut], steps[cut:]) if part]
    for one in (merged, functools.reduce(merge_steps, [functools.reduce(merge_steps, half) for half in halves])):
        tokens = sum(step.total_tokens for step in steps)
        assert (one.seq, one.ts, one.step, one.updates) == (steps[-1].seq, steps[-1].ts, steps[-1].step, len(steps))
        assert one.total_tokens == tokens
        assert one.skipped == sum(step.skipped for step in steps)
        assert one.micro_batches == sum(step.micro_batches for step in steps)
        assert one.peak_bytes == max(step.peak_bytes for step in steps)
        assert one.training_time_ms == pytest.approx(sum(step.training_time_ms for step in steps))
        assert one.data_time_ms == pytest.approx(sum(step.data_time_ms for step in steps))
        assert one.learning_rate == steps[-1].learning_rate
        positions = sum(step.padding_fraction * step.micro_batches for step in steps)
        assert one.padding_fraction == pytest.approx(positions / one.micro_batches)
        if tokens:
            mean = sum(step.loss * step.total_tokens for step in steps if step.total_tokens) / tokens
            assert one.loss == pytest.approx(mean)
            assert one.perplexity == pytest.approx(math.exp(mean))
            assert one.tokens_per_second == pytest.approx(1000 * tokens / one.training_time_ms)
        else:
            assert math.isnan(one.loss or 0.0)


def test_a_skipped_update_has_no_say_in_the_loss() -> None:
    good = dict(PLAIN, total_tokens=10, training_time_ms=1.0, updates=1, learning_rate=0.1, token_accuracy=0.5)
    rest = {"padding_fraction": 0.0, "micro_batches": 1, "data_time_ms": 0.0, "peak_bytes": 0}
    a = Step(**good, **rest, step=1, loss=2.0, perplexity=None, skipped=0)
    b = Step(**{**good, "total_tokens": 0}, **rest, step=2, loss=math.nan, perplexity=None, skipped=1)
    for merged in (merge_steps(a, b), merge_steps(b, a)):
        assert (merged.loss, merged.token_accuracy, merged.skipped) == (2.0, 0.5, 1)


@pytest.mark.parametrize(("loss", "wanted"), [(None, None), (0.0, 1.0), (1000.0, math.inf), (math.inf, math.inf)])
def test_perplexity_is_infinite_where_it_overflows(loss: float | None, wanted: float | None) -> None:
    assert perplexity(loss) == wanted


def test_the_events_that_are_put_together_stay_as_they_are() -> None:
    a = Step(**PLAIN, step=1, loss=1.0, total_tokens=1, training_time_ms=1.0, updates=1, learning_rate=0.1,
             token_accuracy=None, perplexity=None, padding_fraction=0.0, micro_batches=1, data_time_ms=0.0,
             peak_bytes=0, skipped=0)  # fmt: skip
    before = repr(a)
    merge_steps(a, a)
    assert repr(a) == before
