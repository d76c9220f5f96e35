"""The validation loss: over all rows, weighted by tokens, and what follows from it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from scripted import Result, play, write_rows

from trainwire_engine import boundary
from trainwire_engine.batches import plan
from trainwire_engine.data import load_dataset
from trainwire_engine.evaluate import EvalResult, evaluate
from trainwire_engine.model import load_model
from trainwire_engine.passes import EvaluateSums
from trainwire_engine.state import TrainState
from trainwire_engine.tokenizer import Tokenizer
from trainwire_protocol import channel as ch
from trainwire_protocol import events as ev
from trainwire_protocol.config import Config
from trainwire_protocol.config_load import build_config
from trainwire_protocol.rundir import read_manifest


@pytest.fixture
def with_valid(config: dict[str, Any], base: Path) -> dict[str, Any]:
    return {**config, "valid_data": str(base / "valid.jsonl")}


def parts(values: dict[str, Any], base: Path) -> tuple[Config, EvaluateSums, Any]:
    config = build_config({**values, "micro_batch_tokens": 128}, base)
    model = load_model(config)
    tokenizer = Tokenizer.from_folder(model.folder)
    dataset = load_dataset(config, tokenizer, "valid", lambda *_: None, model.vocab_size)
    return config, EvaluateSums(model), dataset


def test_the_loss_is_that_of_all_rows_one_by_one(with_valid: dict[str, Any], base: Path) -> None:
    config, sums, dataset = parts(with_valid, base)
    result = evaluate(sums, dataset, config, 0, lambda: False)
    assert result is not None
    one_by_one = [sums(batch) for row in range(len(dataset)) for batch in plan(dataset, [row], 4096)]
    assert result.tokens == int(dataset.trained.sum())
    assert result.loss == pytest.approx(sum(float(loss) for loss, _ in one_by_one) / result.tokens, rel=1e-6)
    assert result.correct == round(sum(float(correct) for _, correct in one_by_one))


@pytest.mark.parametrize(("batches", "rows"), [(1, 4), (2, 7), (9, 7)])
def test_eval_batches_takes_the_first_rows(with_valid: dict[str, Any], base: Path, batches: int, rows: int) -> None:
    config, sums, dataset = parts(with_valid, base)
    result = evaluate(sums, dataset, config, batches, lambda: False)
    assert result is not None
    assert result.tokens == int(dataset.trained[:rows].sum())


def test_an_interrupted_evaluation_gives_nothing(with_valid: dict[str, Any], base: Path) -> None:
    config, sums, dataset = parts(with_valid, base)
    assert evaluate(sums, dataset, config, 0, lambda: True) is None


def test_evaluations_come_at_their_interval_and_at_the_end(with_valid: dict[str, Any], base: Path) -> None:
    result = play({**with_valid, "eval_every": 4}, base)
    assert [e.step for e in result.of(ev.EvalEnd)] == [4, 6]
    start = play({**with_valid, "eval_every": 4, "eval_at_start": True, "max_steps": 2}, base)
    assert [e.step for e in start.of(ev.EvalEnd)] == [0, 2]


def test_dropout_is_off(with_valid: dict[str, Any], base: Path, tmp_path: Path) -> None:
    once = {**with_valid, "eval_at_start": True, "max_steps": 1}
    plain = play(once, base).of(ev.EvalEnd)[0]
    dropped = play({**once, "lora_dropout": 0.5, "run_dir": str(tmp_path / "other")}, base).of(ev.EvalEnd)[0]
    assert plain.valid_loss == dropped.valid_loss


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The validation losses that the run's evaluations are told to have had."""
    told: list[float] = []

    def evaluated(*_: Any) -> EvalResult:
        return EvalResult(told.pop(0), 10, 5, 1.0)

    monkeypatch.setattr(boundary, "evaluate", evaluated)
    return told


def best_step(config: dict[str, Any]) -> int | None:
    manifest = read_manifest(Path(config["run_dir"]) / "best")
    return manifest.step if manifest else None


def test_best_is_the_lowest_and_nan_never_is(with_valid: dict[str, Any], base: Path, losses: list[float]) -> None:
    losses += [math.nan, 3.0, 3.0, 2.0, math.inf, 2.5]
    result = play({**with_valid, "eval_every": 1}, base)
    assert [e.best for e in result.of(ev.EvalEnd)] == [False, True, False, True, False, False]
    assert best_step(with_valid) == 4
    assert [c.step for c in result.of(ev.Checkpoint) if c.kind == "best"] == [2, 4]


def test_keep_best_off_keeps_none(with_valid: dict[str, Any], base: Path, losses: list[float]) -> None:
    losses += [3.0, 2.0]
    result = play({**with_valid, "eval_every": 3, "keep_best": False}, base)
    assert [e.best for e in result.of(ev.EvalEnd)] == [True, True]
    assert best_step(with_valid) is None


def test_patience_ends_the_run_early(with_valid: dict[str, Any], base: Path, losses: list[float]) -> None:
    losses += [3.0, 2.0, 2.0, math.nan, 1.0]
    result = play({**with_valid, "eval_every": 1, "early_stopping_patience": 2}, base)
    complete = result.one(ev.Complete)
    assert (complete.reason, complete.total_steps) == ("early_stopping", 4)
    assert [(e.epoch, e.updates) for e in result.of(ev.EpochEnd)] == [(1, 4)]
    assert result.one(ch.Finished).checkpoint == str(Path(with_valid["run_dir"]) / "final")
    named = {**with_valid, "eval_every": 1, "early_stopping_patience": 2, "resume": final(result)}
    again = play(named, base, resume_from=final(result))
    assert again.one(ch.Failed).code == "resume_refused"


@pytest.mark.parametrize(("patience", "steps"), [(3, [5]), (0, [5, 6])])
def test_a_run_that_was_stopped_early_goes_on_with_more_patience(
    with_valid: dict[str, Any], base: Path, losses: list[float], patience: int, steps: list[int]
) -> None:
    settings = {**with_valid, "eval_every": 1, "early_stopping_patience": 2, "max_steps": 6}
    losses += [3.0, 2.0, 2.0, 2.0]
    first = play(settings, base)
    losses += [2.0, 2.0]
    again = play({**settings, "early_stopping_patience": patience}, base, resume_from=final(first), attempt=2)
    assert list(again.losses) == steps
    assert again.one(ev.Complete).reason == ("early_stopping" if patience else "finished")


def final(result: Result) -> str:
    path: str = result.one(ch.Finished).checkpoint
    return path


def test_patience_and_best_hold_over_a_resume(with_valid: dict[str, Any], base: Path, losses: list[float]) -> None:
    settings = {**with_valid, "eval_every": 1, "early_stopping_patience": 2, "save_every": 1, "max_checkpoints": 0}
    losses += [2.0, 3.0, 3.0]
    play(settings, base)
    losses += [3.0]
    again = play(settings, base, resume_from=str(Path(with_valid["run_dir"]) / "checkpoint-000002"))
    assert [e.best for e in again.of(ev.EvalEnd)] == [False]
    assert again.one(ev.Complete).reason == "early_stopping"


def test_a_missing_or_empty_validation_file_is_a_notice(config: dict[str, Any], base: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    for path in (tmp_path / "empty.jsonl", tmp_path / "missing.jsonl"):
        result = play({**config, "valid_data": str(path), "max_steps": 1}, base)
        assert result.status == 0
        assert len(result.logged("no_validation")) == 1


def test_one_row_is_enough(config: dict[str, Any], base: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "one.jsonl", 1)
    result = play({**config, "valid_data": str(rows), "max_steps": 1}, base)
    assert math.isfinite(result.one(ev.EvalEnd).valid_loss)


def test_the_state_counts_evaluations_that_were_not_better() -> None:
    state = TrainState()
    judged = [state.judge(loss) for loss in (math.nan, 2.0, 2.0, 1.5, math.inf)]
    assert judged == [False, True, False, True, False]
    assert (state.best_loss, state.worse_evaluations) == (1.5, 1)
