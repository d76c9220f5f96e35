"""Lanes: the work of several threads, its order and its errors."""

from __future__ import annotations

import threading

import mlx.core as mx
import pytest

from trainwire_engine.lanes import together


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
