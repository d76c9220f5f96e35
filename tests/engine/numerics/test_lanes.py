"""Lanes: the work of several threads, its order and its errors."""

from __future__ import annotations

import threading

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import RandomRows

from trainwire_engine import native
from trainwire_engine.batches import MicroBatch, plan
from trainwire_engine.lanes import Lanes, together
from trainwire_engine.shapes import CPU


def lanes_of(count: int, weights: int) -> Lanes:
    lanes = Lanes(weights)
    lanes.count = count
    return lanes


def targets(batches: list[MicroBatch]) -> list[int]:
    return sorted(np.concatenate([batch.targets[batch.weights > 0] for batch in batches]).tolist())


def loads(batches: list[MicroBatch], lane_of: list[int]) -> list[int]:
    """Padded tokens of each lane, its passes included."""
    sizes = [batch.tokens.size + CPU.pass_cost for batch in batches]
    return [sum(size for size, of in zip(sizes, lane_of) if of == lane) for lane in range(max(lane_of) + 1)]


@given(count=st.integers(2, 5), rows=st.integers(1, 12), budget=st.sampled_from([128, 512, 2048]), seed=st.integers(0))
def test_micro_batches_are_cut_only_to_end_sooner(count: int, rows: int, budget: int, seed: int) -> None:
    whole = plan(RandomRows(rows, shortest=2, longest=90, seed=seed % 2**32), range(rows), budget)
    spread, lane_of = lanes_of(count, 10**9).spread(whole)
    assert targets(spread) == targets(whole)
    assert set(lane_of) <= set(range(count))
    falling = sorted(whole, key=lambda batch: -batch.tokens.size)
    dealt: list[int] = []
    for at in range(len(falling)):
        so_far = [*loads(falling, [*dealt, *[count] * (len(falling) - at)])[:count]]
        dealt.append(so_far.index(min(so_far)))
    assert max(loads(spread, lane_of)) <= max(loads(falling, dealt))


def test_two_unequal_micro_batches_keep_both_lanes_busy() -> None:
    rows = RandomRows(9, shortest=64, longest=64)
    uneven = plan(rows, range(6), 384) + plan(rows, range(6, 9), 192)
    assert [batch.tokens.shape[0] for batch in uneven] == [6, 3]
    spread, lane_of = lanes_of(2, 10**9).spread(uneven)
    first, second = loads(spread, lane_of)
    assert abs(first - second) <= 64


def test_a_small_update_stays_on_one_lane_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr(native, "use_threads", threads.append)
    batches = plan(RandomRows(4), range(4), 2048)
    spread, lane_of = lanes_of(2, 10**3).spread(batches)
    assert len(spread) == len(batches)
    assert set(lane_of) == {0}
    assert threads == [1]


def test_lanes_work_at_the_same_time_and_answer_in_order() -> None:
    meeting = threading.Barrier(3, timeout=60)

    def work(lane: int) -> tuple[int, float]:
        meeting.wait()
        total = mx.sum(mx.arange(10) + lane)
        mx.eval(total)
        return lane, total.item()

    assert together(work, 3) == [(0, 45), (1, 55), (2, 65)]


def test_one_lane_works_in_the_thread_that_asks() -> None:
    assert together(lambda lane: (lane, threading.current_thread()), 1) == [(0, threading.current_thread())]


@pytest.mark.parametrize("faulty", [0, 1])
def test_the_error_of_a_lane_is_raised_when_all_have_ended(faulty: int) -> None:
    failed, ended = threading.Event(), []

    def work(lane: int) -> None:
        if lane == faulty:
            failed.set()
            raise ValueError(f"lane {lane}")
        assert failed.wait(60)
        ended.append(lane)

    with pytest.raises(ValueError, match=f"lane {faulty}"):
        together(work, 2)
    assert ended == [1 - faulty]
