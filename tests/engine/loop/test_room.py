"""Memory that runs out beside what recorded passes keep: it is given back, and what failed is done once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from scripted import Result, at_step, play
from tiny import RandomRows

from trainwire_engine import boundary, prepare
from trainwire_engine.batches import plan
from trainwire_engine.failures import with_room
from trainwire_engine.model import Model, load_model
from trainwire_engine.optimizer import Optimizer
from trainwire_engine.snapshot import Contents
from trainwire_engine.step import UpdateResult, UpdateStep
from trainwire_protocol import channel as ch
from trainwire_protocol import events as ev
from trainwire_protocol.config_load import build_config

OUT_OF_MEMORY = "cudaMallocAsync(&data, size, stream) failed: out of memory"
ROWS = RandomRows(8)


class Short:
    """Lets a function run out of memory at some of its calls, counted from 1, after what it does before."""

    def __init__(self, function: Callable[..., Any], *at: int) -> None:
        self._function = function
        self._at = at
        self.calls = 0

    def __call__(self, *args: Any, **more: Any) -> Any:
        self.calls += 1
        if self.calls in self._at:
            raise RuntimeError(OUT_OF_MEMORY)
        return self._function(*args, **more)


def test_what_runs_out_of_memory_is_done_once_more_if_some_was_given_back() -> None:
    work = Short(lambda: "done", 1)
    assert with_room(work, lambda: True) == "done"
    assert work.calls == 2


def test_without_memory_to_give_back_and_at_the_second_time_it_fails() -> None:
    for at, given, calls in (((1,), False, 1), ((1, 2), True, 2)):
        work = Short(lambda: "done", *at)
        with pytest.raises(RuntimeError, match="out of memory"):
            with_room(work, lambda given=given: given)  # type: ignore[misc]
        assert work.calls == calls


def test_other_errors_cost_nobody_memory() -> None:
    def work() -> None:
        raise ValueError("The shapes do not fit.")

    with pytest.raises(ValueError, match="shapes"):
        with_room(work, lambda: pytest.fail("memory was given back"))


def test_what_the_first_attempt_made_is_gone_before_the_second() -> None:
    alive: set[str] = set()

    class Array:
        def __init__(self) -> None:
            alive.add("first")

        def __del__(self) -> None:
            alive.clear()

    def attempt() -> str:
        if not tries:
            tries.append(1)
            made = Array()
            raise RuntimeError(f"{OUT_OF_MEMORY} beside {len([made])}")
        return "done"

    def make_room() -> bool:
        assert not alive
        return True

    tries: list[int] = []
    assert with_room(attempt, make_room) == "done"


class Kept:
    """In place of recordings: passes made as without them, and how often memory was given back."""

    def __init__(self, step: UpdateStep) -> None:
        self._step = step
        self.forgotten = 0

    def sums(self, params: Any, passes: Sequence[tuple[Any, ...]], meanwhile: Callable[[], None]) -> Any:
        (inputs,) = passes
        arrays = tuple(mx.array(array) for array in inputs)
        meanwhile()
        return self._step._sums(self._step.model.trainable, arrays[:-1], arrays[-1])

    def forget(self) -> None:
        self.forgotten += 1


def made(config: dict[str, Any], base: Path) -> tuple[Model, UpdateStep, Kept]:
    built = build_config(config, base)
    model = load_model(built)
    step = UpdateStep(model, Optimizer(built), built)
    kept = Kept(step)
    step._recordings = kept  # type: ignore[assignment]
    return model, step, kept


def update(step: UpdateStep, number: int) -> UpdateResult:
    return step(plan(ROWS, list(range(4)), 4096), step=number, learning_rate=0.05, max_grad_norm=1.0)


def halfway(evaluate: Callable[..., None], *at: int) -> Callable[..., None]:
    """`mx.eval` that computes a part of what an update ends with, and then runs out of memory."""
    short = Short(lambda: None, *at)

    def partly(*arrays: Any) -> None:
        if len(arrays) == 3:
            evaluate(*list(arrays[0].values())[:3])
            short()
        evaluate(*arrays)

    return partly


@pytest.fixture(params=["passes", "end"])
def short_in(request: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets an update run out of memory in its passes or at its end."""

    def break_at(kept: Kept, *at: int) -> None:
        if request.param == "passes":
            monkeypatch.setattr(kept, "sums", Short(kept.sums, *at))
        else:
            monkeypatch.setattr(mx, "eval", halfway(mx.eval, *at))

    return break_at


def test_an_update_that_finds_room_the_second_time_is_the_same(
    config: dict[str, Any], base: Path, short_in: Callable[..., None]
) -> None:
    outcomes = []
    for broken in (False, True):
        model, step, kept = made(config, base)
        if broken:
            short_in(kept, 2)
        results = [update(step, number) for number in range(3)]
        assert kept.forgotten == int(broken)
        assert [result.room_made for result in results] == [False, broken, False]
        assert not any(result.not_recorded for result in results)
        outcomes.append({**model.trainable, **step.state})
    plain, again = outcomes
    for name, value in plain.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)
    assert int(again["count"]) == 3


def test_an_update_that_finds_none_fails(config: dict[str, Any], base: Path, short_in: Callable[..., None]) -> None:
    _, step, kept = made(config, base)
    short_in(kept, 1, 2)
    with pytest.raises(RuntimeError, match="out of memory"):
        update(step, 1)
    assert kept.forgotten == 1


@pytest.fixture
def given_back(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Runs keep memory between updates here; the steps after which it was given back."""
    calls: list[int] = []

    class Keeping(UpdateStep):
        def give_back(self) -> bool:
            calls.append(int(self.state["count"]))
            return True

    monkeypatch.setattr(prepare, "UpdateStep", Keeping)
    return calls


def told(result: Result) -> list[tuple[str, int]]:
    """What ran out of memory, by the log, and after which update."""
    logs = result.logged("memory_given_back")
    assert all(log.level == "warn" for log in logs)
    return [(log.message.partition(" ran ")[0], (log.details or {})["step"]) for log in logs]


@pytest.fixture
def watched(config: dict[str, Any], base: Path) -> dict[str, Any]:
    """A run of four updates that evaluates and answers prompts after every other."""
    prompts = {"prompts": ["what is step 3", "a", "what is"], "generate_every": 2, "generate_max_tokens": 3}
    return {**config, **prompts, "valid_data": str(base / "valid.jsonl"), "eval_every": 2, "max_steps": 4}


def results(result: Result) -> list[Any]:
    """What a run gave, without its times."""
    evaluated = [(e.step, e.valid_loss, e.tokens) for e in result.of(ev.EvalEnd)]
    answered = [(g.step, g.index, g.completion) for g in result.of(ev.Generation)]
    return [evaluated, answered, result.losses]


def test_an_evaluation_is_made_once_more(
    watched: dict[str, Any], base: Path, given_back: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = play(watched, base)
    monkeypatch.setattr(boundary, "evaluate", Short(boundary.evaluate, 1))
    result = play({**watched, "run_dir": watched["run_dir"] + "-2"}, base)
    assert (result.status, given_back, told(result)) == (0, [2], [("An evaluation", 2)])
    assert results(result) == results(undisturbed)


def test_samples_go_on_where_memory_ran_out_and_none_is_told_twice(
    watched: dict[str, Any], base: Path, given_back: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = play(watched, base)
    generate_all = boundary.generate_all

    def first_two(model: Model, *args: Any, **more: Any) -> Iterator[Any]:
        for number, answer in enumerate(generate_all(model, *args, **more)):
            yield answer
            if number == 1 and not given_back:
                # Weights that were being computed when it failed are not to be used.
                model.bind({name: mx.ones_like(weight) for name, weight in model.trainable.items()})
                raise RuntimeError(OUT_OF_MEMORY)

    monkeypatch.setattr(boundary, "generate_all", first_two)
    result = play({**watched, "run_dir": watched["run_dir"] + "-2"}, base)
    assert (result.status, given_back, told(result)) == (0, [2], [("A sample", 2)])
    assert results(result) == results(undisturbed)


def test_the_losses_that_samples_are_chosen_by_are_computed_once_more(
    watched: dict[str, Any], base: Path, tmp_path: Path, given_back: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a", "completion": "the step"}\n{"prompt": "what", "completion": "run"}\n')
    chosen = {**watched, "prompts": str(prompts), "sample_display": "best_worst"}
    undisturbed = play(chosen, base)
    monkeypatch.setattr(boundary, "reference_losses", Short(boundary.reference_losses, 2))
    result = play({**chosen, "run_dir": watched["run_dir"] + "-2"}, base)
    assert (result.status, given_back, told(result)) == (0, [4], [("The choice of samples", 4)])
    assert results(result) == results(undisturbed)
    assert len(result.of(ev.Generation)) == 4


def test_a_snapshot_is_taken_once_more(
    config: dict[str, Any], base: Path, given_back: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    take, calls = Contents.take, Short(lambda: None, 1)

    def short(self: Contents, *args: Any) -> Any:
        calls()
        return take(self, *args)

    monkeypatch.setattr(Contents, "take", short)
    result = play({**config, "save_every": 2, "max_steps": 3}, base)
    assert (result.status, given_back, told(result)) == (0, [2], [("A snapshot", 2)])
    assert [Path(c.path).name for c in result.of(ev.Checkpoint)] == ["checkpoint-000002", "final"]


def test_an_order_is_refused_only_at_the_second_time(
    config: dict[str, Any], base: Path, given_back: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boundary, "generate", Short(boundary.generate, 1, 3, 4))
    asked = [ch.GenerateOrder(order=number, prompt="a", max_tokens=2) for number in (5, 6)]
    result = play(config, base, at_step(2, *asked))
    assert (result.answer(5).code, result.answer(6).code) == (None, "out_of_memory")
    assert (result.status, given_back) == (0, [2, 2])


def test_a_run_ends_where_memory_runs_out_twice(
    watched: dict[str, Any], base: Path, given_back: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boundary, "evaluate", Short(boundary.evaluate, 1, 2))
    result = play(watched, base)
    assert (result.one(ch.Failed).code, result.status, given_back) == ("out_of_memory", 5, [2])
    assert Path(result.one(ch.Failed).checkpoint).name == "emergency-checkpoint-000002"
