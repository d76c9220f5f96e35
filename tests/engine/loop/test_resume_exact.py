"""A run that was interrupted ends with the same model as one that was not, bit for bit."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from drive import Engine
from scripted import Result, at_step, play, write_rows
from tiny import tiny_model

from trainwire_engine import lanes, native
from trainwire_engine.state import decode_saved
from trainwire_protocol import channel as ch
from trainwire_protocol import events as ev
from trainwire_protocol.rundir import STATE_NAME, newest_whole_checkpoint

OPTIMIZERS = ("adamw", "adafactor", "lion", "muon", "sgd")
METHODS = ("lora", "dora", "full", "quantized")
UPDATES = 4
"""Updates of an epoch."""
INTERRUPTED_AT = (1, 2, UPDATES, UPDATES + 1)
"""The first, a middle, the last update of an epoch, and the first of the next one."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain, a half-precision and a quantized model, and rows for four updates an epoch, the last one smaller."""
    folder = tmp_path_factory.mktemp("exact")
    tiny_model(folder / "plain", num_hidden_layers=1)
    tiny_model(folder / "half", num_hidden_layers=1, dtype=mx.bfloat16)
    tiny_model(folder / "quantized", num_hidden_layers=1, bits=4)
    write_rows(folder / "train.jsonl", 14)
    write_rows(folder / "valid.jsonl", 3)
    return folder


def settings(models: Path, run_dir: Path, optimizer: str, method: str) -> dict[str, Any]:
    """Everything that could disturb a resume: dropout, micro-batches, warm-up, evaluations, generations."""
    values: dict[str, Any] = {
        "model": str(models / {"full": "half", "quantized": "quantized"}.get(method, "plain")),
        "data": str(models / "train.jsonl"),
        "valid_data": str(models / "valid.jsonl"),
        "run_dir": str(run_dir),
        "cache_dir": str(models / "cache"),
        "method": "lora" if method == "quantized" else method,
        "optimizer": optimizer,
        "learning_rate": 3e-3,
        "weight_decay": 0.01,
        "batch_size": 4,
        "micro_batch_tokens": 96,
        "num_epochs": 2,
        "warmup_steps": 3,
        "eval_every": 3,
        "prompts": ["what is step 3"],
        "generate_every": 5,
        "generate_max_tokens": 2,
        "save_every": 1,
        "max_checkpoints": 0,
    }
    if method != "full":
        values |= {"lora_rank": 2, "lora_dropout": 0.2}
    return values


def tensors(folder: Path) -> dict[str, bytes]:
    """The files of a checkpoint that hold arrays: their layout depends on nothing but the arrays."""
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


def assert_same_end(whole: Path, resumed: Path) -> None:
    """Compare two final checkpoints: every tensor, and where the run stands, times left out."""
    one, other = tensors(whole), tensors(resumed)
    assert "optimizer.safetensors" in one
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == []
    states = [decode_saved((folder / STATE_NAME).read_bytes()).state for folder in (whole, resumed)]
    assert len({msgspec.json.encode(msgspec.structs.replace(s, elapsed_ms=0, epoch_ms=0)) for s in states}) == 1


def numbers(result: Result, after: int) -> list[tuple[Any, ...]]:
    """What was reported about the updates above a step, times left out."""
    found: list[tuple[Any, ...]] = []
    for report in result.reports:
        if isinstance(report, ev.Step) and report.step > after:
            found.append((report.step, report.loss, report.grad_norm, report.learning_rate, report.trained_tokens))
        elif isinstance(report, ev.EvalEnd) and report.step > after:
            found.append((report.step, report.valid_loss, report.token_accuracy, report.best))
        elif isinstance(report, ev.Generation) and report.step > after:
            found.append((report.step, report.completion))
        elif isinstance(report, ev.EpochEnd) and report.epoch * UPDATES > after:
            found.append((report.epoch, report.avg_loss, report.updates))
    return found


@pytest.mark.parametrize(("optimizer", "method"), list(product(OPTIMIZERS, METHODS)))
def test_a_resumed_run_equals_an_uninterrupted_one(models: Path, tmp_path: Path, optimizer: str, method: str) -> None:
    # Pairs of an optimizer and a method are interrupted at different places; every optimizer and method at all.
    place = INTERRUPTED_AT[(OPTIMIZERS.index(optimizer) + METHODS.index(method)) % len(INTERRUPTED_AT)]
    whole = play({**settings(models, tmp_path / "whole", optimizer, method), "save_every": place}, models)
    assert whole.status == 0, whole.of(ch.Failed)
    checkpoint = tmp_path / "whole" / f"checkpoint-{place:06d}"
    resumed = play(settings(models, tmp_path / "resumed", optimizer, method), models, resume_from=str(checkpoint))
    assert resumed.status == 0, resumed.of(ch.Failed)
    assert resumed.one(ev.Init).start_step == place
    assert numbers(resumed, place) == numbers(whole, place)
    assert len(resumed.losses) == 2 * UPDATES - place
    assert_same_end(tmp_path / "whole" / "final", tmp_path / "resumed" / "final")


@pytest.fixture(scope="module")
def uninterrupted(models: Path) -> Result:
    """One run without any interruption, in the folder `whole`."""
    return play(settings(models, models / "whole", "adamw", "lora"), models)


@pytest.mark.parametrize("place", [1, 3, UPDATES, 5, 2 * UPDATES - 1])
def test_a_run_stopped_anywhere_and_resumed_in_its_folder_equals_an_uninterrupted_one(
    models: Path, tmp_path: Path, uninterrupted: Result, place: int
) -> None:
    config = {**settings(models, tmp_path / "parts", "adamw", "lora"), "save_every": 0}
    stopped = play(config, models, at_step(place, ch.StopOrder(order=2)))
    resumed = play(config, models, resume_from=stopped.one(ch.Finished).checkpoint, attempt=2)
    both = Result([*stopped.reports, *resumed.reports], 0)
    assert sorted(numbers(both, 0), key=str) == sorted(numbers(uninterrupted, 0), key=str)
    assert_same_end(models / "whole" / "final", tmp_path / "parts" / "final")
    assert resumed.one(ev.Complete).total_time_secs > stopped.of(ev.Step)[-1].training_time_ms / 1000


@pytest.mark.parametrize(("before", "now"), [(3, 1), (1, 3)])
def test_a_run_goes_on_with_the_lanes_it_had_whatever_the_number_of_cores(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, now: int
) -> None:
    monkeypatch.setattr(lanes, "WORTH", 1)
    monkeypatch.setattr(native, "cores", lambda: before)
    whole = play({**settings(models, tmp_path / "whole", "adamw", "lora"), "save_every": 2}, models)
    monkeypatch.setattr(native, "cores", lambda: now)
    config = settings(models, tmp_path / "resumed", "adamw", "lora")
    once = play(
        config,
        models,
        at_step(3, ch.StopOrder(order=2)),
        resume_from=str(tmp_path / "whole" / "checkpoint-000002"),
    )
    twice = play(config, models, resume_from=once.one(ch.Finished).checkpoint, attempt=2)
    assert {**once.losses, **twice.losses} == {step: loss for step, loss in whole.losses.items() if step > 2}
    assert_same_end(tmp_path / "whole" / "final", tmp_path / "resumed" / "final")


@pytest.mark.parametrize("size", [1, 2**40])
def test_an_evaluation_and_a_generation_do_not_depend_on_the_threads_of_the_update_before(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    threads: list[int] = []
    seen: dict[str, set[int]] = {"eval": set(), "generate": set()}
    monkeypatch.setattr(lanes, "THREADS", size)
    monkeypatch.setattr(native, "cores", lambda: 4)
    monkeypatch.setattr(native, "use_threads", threads.append)

    def watch(report: Any) -> None:
        if isinstance(report, ev.EvalEnd | ev.Generation):
            seen["eval" if isinstance(report, ev.EvalEnd) else "generate"].add(threads[-1])

    config = {**settings(models, tmp_path / "run", "adamw", "lora"), "eval_at_start": True}
    assert play({**config, "eval_every": 1, "generate_every": 1}, models, watch).status == 0
    expected = {4 if size == 1 else 1}
    assert seen == {"eval": expected, "generate": expected}


def test_shuffled_and_grouped_orders_resume_too(models: Path, tmp_path: Path) -> None:
    change = {"group_by_length": True, "batch_size": 2, "save_every": 3}
    whole = play({**settings(models, tmp_path / "whole", "adamw", "lora"), **change}, models)
    resumed = play(
        {**settings(models, tmp_path / "resumed", "adamw", "lora"), **change},
        models,
        resume_from=str(tmp_path / "whole" / "checkpoint-000003"),
    )
    assert resumed.losses == {step: loss for step, loss in whole.losses.items() if step > 3}
    assert_same_end(tmp_path / "whole" / "final", tmp_path / "resumed" / "final")


def test_a_process_killed_between_micro_batches_loses_nothing_but_the_update(models: Path, tmp_path: Path) -> None:
    config = settings(models, tmp_path / "run", "adamw", "lora")
    with Engine(tmp_path / "stderr") as engine:
        engine.begin({**config, "num_epochs": 5}, models)
        engine.wait_for(lambda report: isinstance(report, ev.Step) and report.step == 5)
        engine.kill()
    found, _ = newest_whole_checkpoint(tmp_path / "run")
    assert found is not None
    assert 3 <= found.step < 5 * UPDATES
    with Engine(tmp_path / "stderr") as engine:
        engine.begin({**config, "num_epochs": 5}, models, resume_from=str(found.path), attempt=2)
        assert engine.finish() == 0, engine.printed()
    whole = play({**settings(models, tmp_path / "whole", "adamw", "lora"), "num_epochs": 5}, models)
    resumed = Result(engine.reports, 0)
    assert resumed.losses == {step: loss for step, loss in whole.losses.items() if step > found.step}
    assert_same_end(tmp_path / "whole" / "final", tmp_path / "run" / "final")
