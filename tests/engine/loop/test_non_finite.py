"""Updates whose loss or gradient is not finite: skipped, named, counted, and too many of them end the run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from scripted import Result, at_step, play

from trainwire_engine import prepare
from trainwire_engine.step import UpdateStep
from trainwire_protocol import channel as ch
from trainwire_protocol import events as ev
from trainwire_protocol.rundir import STATE_NAME, defect, read_manifest

Poison = dict[tuple[int, int], tuple[str, float]]
"""By update and micro-batch: what is spoilt, `loss` or `gradient`, and with what."""


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Poison:
    """Spoils what the micro-batches of chosen updates give; the guard behind them is the real one."""
    plan: Poison = {}

    class Poisoned(UpdateStep):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            clean = self._sums

            def sums(*arguments: Any) -> Any:
                (loss, correct), grads = clean(*arguments)
                what, value = plan.get((self.update, self.micro_batch), ("", 0.0))
                self.micro_batch += 1
                if what == "loss":
                    loss = loss + value
                elif what == "gradient":
                    name = list(grads)[len(grads) // 2]
                    grads = {**grads, name: grads[name] + mx.array(value)}
                return (loss, correct), grads

            self._sums = sums

        def __call__(self, micro_batches: Any, *, step: int, **more: Any) -> Any:
            self.update, self.micro_batch = step, 0
            return super().__call__(micro_batches, step=step, **more)

    monkeypatch.setattr(prepare, "UpdateStep", Poisoned)
    return plan


def arrays(run_dir: str, step: int) -> list[bytes]:
    folder = Path(run_dir) / f"checkpoint-{step:06d}"
    return [(folder / name).read_bytes() for name in ("adapters.safetensors", "optimizer.safetensors")]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("micro_batch", [0, 1])
def test_a_skipped_update_leaves_weights_and_optimizer_state_untouched(
    config: dict[str, Any], base: Path, poison: Poison, value: float, what: str, micro_batch: int
) -> None:
    poison[3, micro_batch] = (what, value)
    settings = {**config, "micro_batch_tokens": 96, "save_every": 1, "max_checkpoints": 0, "max_steps": 4}
    result = play(settings, base)
    steps = result.of(ev.Step)
    assert steps[2].micro_batches > micro_batch
    assert [step.skipped for step in steps] == [0, 0, 1, 0]
    assert arrays(config["run_dir"], 2) == arrays(config["run_dir"], 3)
    assert arrays(config["run_dir"], 3) != arrays(config["run_dir"], 1)
    final = mx.load(str(Path(config["run_dir"]) / "final" / "optimizer.safetensors"))
    assert final["count"].item() == 3
    skipped = steps[2]
    assert (skipped.total_tokens, skipped.trained_tokens) == (0, steps[1].trained_tokens)
    if what == "loss":
        assert not math.isfinite(skipped.loss)
    else:
        assert math.isfinite(skipped.loss)
        assert not math.isfinite(skipped.grad_norm)


def test_the_rows_of_a_skipped_update_are_named_and_the_position_is_right_afterwards(
    config: dict[str, Any], base: Path, tmp_path: Path, poison: Poison
) -> None:
    plain = play({**config, "shuffle": False}, base)
    poison[2, 0] = ("loss", math.nan)
    result = play({**config, "shuffle": False, "run_dir": str(tmp_path / "other")}, base)
    (log,) = result.logged("non_finite")
    # The second update of four rows, in the file's order.
    assert log.details is not None
    assert log.details["rows"] == [f"{base / 'train.jsonl'}:{line}" for line in (5, 6, 7, 8)]
    assert (log.details["step"], log.level) == (2, "warn")
    tokens, plain_tokens = ([s.total_tokens for s in r.of(ev.Step)] for r in (result, plain))
    assert [tokens[0], *tokens[2:]] == [plain_tokens[0], *plain_tokens[2:]]
    assert result.one(ev.Complete).total_steps == 6


def failure(result: Result) -> tuple[ch.Failed, Path]:
    failed = result.one(ch.Failed)
    assert (failed.code, result.status) == ("non_finite", 6)
    return failed, Path(failed.checkpoint)


def test_too_many_in_a_row_end_the_run_with_the_last_good_state_saved(
    config: dict[str, Any], base: Path, poison: Poison
) -> None:
    for step in (3, 4, 5):
        poison[step, 0] = ("gradient", math.inf)
    settings = {**config, "max_consecutive_non_finite": 3, "save_every": 2, "num_epochs": 2}
    failed, path = failure(play(settings, base))
    assert path.name == "emergency-checkpoint-000005"
    manifest = read_manifest(path)
    assert manifest is not None
    assert (manifest.kind, manifest.step, defect(path)) == ("emergency", 5, None)
    good = Path(config["run_dir"]) / "checkpoint-000002"
    assert (path / "adapters.safetensors").read_bytes() == (good / "adapters.safetensors").read_bytes()
    assert failed.details is not None
    assert (failed.details["key"], failed.details["step"], len(failed.details["rows"])) == (
        "max_consecutive_non_finite",
        5,
        4,
    )
    poison.clear()
    again = play(settings, base, resume_from=str(path))
    assert list(again.losses) == list(range(6, 13))
    assert again.one(ch.Finished).outcome == "completed"


def test_too_many_in_all_end_the_run_too(config: dict[str, Any], base: Path, poison: Poison) -> None:
    for step in (1, 3, 5):
        poison[step, 0] = ("loss", math.nan)
    result = play({**config, "max_non_finite": 3}, base)
    failed, path = failure(result)
    assert failed.details is not None
    assert failed.details["key"] == "max_non_finite"
    assert [step.skipped for step in result.of(ev.Step)] == [1, 0, 1, 0, 1]
    assert defect(path) is None


def test_the_row_of_skipped_updates_is_counted_over_a_resume(
    config: dict[str, Any], base: Path, poison: Poison
) -> None:
    for step in (2, 3, 4):
        poison[step, 0] = ("loss", math.nan)
    settings = {**config, "max_consecutive_non_finite": 3}
    stopped = play(settings, base, at_step(3, ch.StopOrder(order=2)))
    failure(play(settings, base, resume_from=stopped.one(ch.Finished).checkpoint))


def test_a_good_update_ends_the_row(config: dict[str, Any], base: Path, poison: Poison) -> None:
    for step in (1, 2, 4, 5):
        poison[step, 0] = ("loss", math.nan)
    result = play({**config, "max_consecutive_non_finite": 3}, base)
    assert result.one(ch.Finished).outcome == "completed"


def test_a_skipped_update_is_told_again_with_its_number_named(
    config: dict[str, Any], base: Path, poison: Poison
) -> None:
    poison[2, 0] = ("loss", -math.inf)
    stopped = play(config, base, at_step(3, ch.StopOrder(order=2)))
    path = stopped.one(ch.Finished).checkpoint
    assert "Infinity" not in (Path(path) / STATE_NAME).read_text()
    history = play(config, base, resume_from=path).one(ch.StepHistory).steps
    assert (history[1].loss, history[1].non_finite["loss"]) == (None, "-inf")
