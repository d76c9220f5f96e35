"""What a run computes with, as asked for by the worker's options, and the profile of its updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scripted import at_step, play
from tiny import tiny_model

from trainwire_engine import native, prepare
from trainwire_engine.batches import blank
from trainwire_engine.shapes import CUDA
from trainwire_engine.step import UpdateStep
from trainwire_protocol import channel as ch
from trainwire_protocol import events as ev

STOP = ch.StopOrder(order=9, save=True)


def test_the_run_computes_with_the_blas_that_was_asked_for(base: Path, config: dict[str, Any]) -> None:
    found = native.prepare()
    own = play(config, base, at_step(2, STOP), blas="none")
    assert own.one(ev.Init).blas == ("Accelerate" if found.blas == "Accelerate" else "MLX's own")
    if found.path is None:
        pytest.skip("there is no other BLAS here")
    # Asked for by name, it also wins over the checkpoint's.
    resumed = play(config, base, resume_from=own.of(ev.Checkpoint)[-1].path, blas=found.path)
    assert resumed.status == 0
    assert resumed.one(ev.Init).blas == found.words
    assert resumed.logged("environment_changed")[0].details["blas"]["to"] == found.blas


def test_a_blas_that_is_none_is_refused(base: Path, config: dict[str, Any]) -> None:
    result = play(config, base, blas="/nowhere/libblas.so")
    failed = result.one(ch.Failed)
    assert failed.code == "unsupported"
    assert "/nowhere/libblas.so" in failed.message
    assert "--blas auto" in failed.hint
    assert not result.of(ev.Init)


def test_a_profile_says_where_the_time_goes_and_changes_nothing(
    base: Path, config: dict[str, Any], tmp_path: Path
) -> None:
    plain = play(config, base)
    profiled = play({**config, "run_dir": str(tmp_path / "profiled")}, base, profile=2)
    assert profiled.losses == plain.losses
    (log,) = profiled.logged("profile")
    steps = [report for report in profiled.reports if isinstance(report, ev.Step | ev.Log)]
    assert [type(report) for report in steps[steps.index(log) - 1 : steps.index(log) + 2]] == [ev.Step, ev.Log, ev.Step]
    parts = ("forward_ms", "head_ms", "backward_ms", "optimizer_ms", "outside_ms")
    assert log.details["updates"] == 2
    assert all(log.details[part] > 0 for part in ("forward_ms", "head_ms", "optimizer_ms"))
    assert sum(log.details[part] for part in parts) > 0
    assert all(part[:-3] in log.message for part in parts)


@pytest.mark.parametrize(("updates", "measured"), [(3, 2), (1, 0)])
def test_a_run_that_ends_before_its_profile_is_whole_tells_of_the_updates_that_were_measured(
    base: Path, config: dict[str, Any], updates: int, measured: int
) -> None:
    result = play({**config, "max_steps": updates}, base, profile=50)
    assert result.status == 0
    (log,) = result.logged("profile")
    assert log.details["updates"] == measured
    assert ("forward" in log.message) == bool(measured)


def test_a_packed_run_has_the_losses_of_one_with_rows_apart(base: Path, config: dict[str, Any], tmp_path: Path) -> None:
    config = {**config, "valid_data": str(base / "valid.jsonl"), "eval_every": 3}
    apart = play(config, base)
    packed = play({**config, "packing": True, "run_dir": str(tmp_path / "packed")}, base)
    assert packed.status == 0
    assert packed.losses == pytest.approx(apart.losses, rel=2e-5)
    losses = [[report.valid_loss for report in run.of(ev.EvalEnd)] for run in (apart, packed)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-5)


def test_packing_is_refused_for_a_model_of_which_it_is_not_proved(
    base: Path, config: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_model(tmp_path / "lfm2", family="lfm2")
    result = play({**config, "model": str(model), "packing": True}, base)
    assert (result.one(ch.Failed).code, result.status) == ("unsupported", 3)
    assert "qwen3" in result.one(ch.Failed).hint


def test_a_run_whose_shapes_are_chosen_expects_the_largest_of_them(
    base: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[Any] = []
    expected: list[Any] = []
    original = prepare.shapes_of_run

    def as_on_a_card(*args: Any) -> Any:
        chosen.append(original(*args, device=CUDA))
        return chosen[-1]

    monkeypatch.setattr(prepare, "shapes_of_run", as_on_a_card)
    monkeypatch.setattr(UpdateStep, "expect", lambda _, batch: expected.append(batch.shape))
    assert play(config, base).status == 0
    assert expected == [blank(chosen[0].largest).shape]
