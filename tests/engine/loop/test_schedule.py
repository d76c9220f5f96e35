"""What is due when, and how long a run is."""

from __future__ import annotations

from typing import Any

import pytest

from trainwire_engine.schedule import Course, due, total_steps, warmup_steps
from trainwire_engine.state import TrainState
from trainwire_protocol.config import Config


def config(**values: Any) -> Config:
    return Config(model="m", data="d", **values)


def kinds(step: int, *, last: bool = False, **values: Any) -> str:
    what = due(step, config(**values), last=last)
    return "".join(name[0] for name in ("evaluate", "generate", "save") if getattr(what, name))


@pytest.mark.parametrize(
    ("step", "last", "expected"),
    [
        (0, False, ""),
        (1, False, ""),
        (2, False, "e"),
        (3, False, "g"),
        (4, False, "es"),
        (6, False, "eg"),
        (7, True, "eg"),
    ],
)
def test_each_thing_is_due_at_its_interval_and_evaluations_at_the_end(step: int, last: bool, expected: str) -> None:
    assert kinds(step, last=last, eval_every=2, generate_every=3, save_every=4) == expected


def test_an_interval_of_zero_is_never_due() -> None:
    assert kinds(10, last=True, eval_every=0, generate_every=0, save_every=0) == ""


def test_before_the_first_update_only_eval_at_start_makes_something_due() -> None:
    assert kinds(0, eval_at_start=True, eval_every=2, generate_every=2, save_every=2) == "eg"
    assert kinds(0, eval_at_start=True, eval_every=0) == ""


@pytest.mark.parametrize(
    ("values", "state", "total"),
    [
        ({"num_epochs": 3}, TrainState(), 30),
        ({"num_epochs": 3}, TrainState(step=14, epoch=2, epoch_update=4), 30),
        # An accepted change of the batch size: what is left of the epochs counts, not what they had been.
        ({"num_epochs": 3}, TrainState(step=7, epoch=2, epoch_update=4), 23),
        ({"num_epochs": 1}, TrainState(step=14, epoch=2, epoch_update=4), 14),
        ({"max_steps": 12, "num_epochs": 9}, TrainState(), 12),
        ({"max_steps": 12}, TrainState(step=20, epoch=3), 20),
    ],
)
def test_the_length_of_a_run_follows_from_where_it_stands(
    values: dict[str, int], state: TrainState, total: int
) -> None:
    assert total_steps(config(**values), state, 10) == total


def test_a_run_by_steps_counts_the_epochs_it_begins() -> None:
    assert Course(TrainState(), config(max_steps=21), 10).total_epochs == 3
    assert Course(TrainState(), config(num_epochs=4), 10).total_epochs == 4


def test_the_end_of_the_run_comes_before_patience() -> None:
    state = TrainState(step=10, epoch=2, worse_evaluations=3)
    course = Course(state, config(early_stopping_patience=3), 10)
    assert course.ended == "finished"
    course.config = config(early_stopping_patience=3, num_epochs=2)
    assert course.ended == "early_stopping"


def test_update_reports_go_out_at_multiples_of_log_every_and_at_the_end() -> None:
    steps = range(1, 11)
    course = [Course(TrainState(step=step, epoch_update=step), config(log_every=4), 10) for step in steps]
    assert [c.state.step for c in course if c.reports_now] == [4, 8, 10]


def test_times_make_no_other_checkpoint_and_everything_else_does() -> None:
    course = Course(TrainState(step=3), config(), 10)
    mark = course.mark()
    course.state.elapsed_ms += 5
    course.state.epoch_ms += 5
    assert course.mark() == mark
    course.state.evaluated_step = 3
    assert course.mark() != mark
    mark = course.mark()
    course.config = config(learning_rate=0.5)
    assert course.mark() != mark


def test_the_warmup_is_three_percent_where_none_is_named() -> None:
    assert [warmup_steps(total) for total in (0, 10, 100, 1000)] == [0, 0, 3, 30]
