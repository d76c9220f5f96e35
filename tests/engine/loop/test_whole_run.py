"""A run from its first order to its last report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from drive import Engine
from scripted import Result, play, write_rows
from tiny import tiny_model

from trainwire_protocol import channel as ch
from trainwire_protocol import events as ev
from trainwire_protocol.config import FIELDS, computed_default
from trainwire_protocol.rundir import defect, list_checkpoints, read_manifest


def kinds(result: Result) -> list[str]:
    """The reports' types in order, without signs of life; equal neighbours once."""
    names = [type(r).__name__ for r in result.reports if not isinstance(r, ch.Alive | ev.Progress)]
    return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]


def test_a_real_process_trains_reports_and_leaves(config: dict[str, Any], base: Path, tmp_path: Path) -> None:
    with Engine(tmp_path / "stderr") as engine:
        begin = engine.begin({**config, "num_epochs": 2, "valid_data": str(base / "valid.jsonl")}, base)
        assert engine.finish() == 0, engine.printed()
        answer = engine.answer(begin)
    result = Result(engine.reports, 0)
    assert answer.result is not None
    assert answer.result == {
        "run_id": "test",
        "run_dir": config["run_dir"],
        "total_steps": 12,
        "resumed_from": None,
    }
    assert kinds(result) == [
        "Data",
        "Init",
        "Answer",
        "EpochStart",
        "Step",
        "EpochEnd",
        "EpochStart",
        "Step",
        "EvalEnd",
        "EpochEnd",
        "Checkpoint",
        "Complete",
        "Finished",
    ]
    assert [step.step for step in result.of(ev.Step)] == list(range(1, 13))
    finished = result.one(ch.Finished)
    assert (finished.outcome, finished.step) == ("completed", 12)
    assert finished.checkpoint == str(Path(config["run_dir"]) / "final")
    assert defect(Path(finished.checkpoint)) is None


def test_progress_is_closed_and_precedes_the_data_event(config: dict[str, Any], base: Path, tmp_path: Path) -> None:
    result = play({**config, "cache_dir": str(tmp_path / "cache"), "max_steps": 1}, base)
    progress = result.of(ev.Progress)
    assert progress
    assert progress[-1].done == progress[-1].total
    data = result.reports.index(result.one(ev.Data))
    assert all(result.reports.index(p) < data for p in progress)


def test_the_first_updates_lower_the_loss(config: dict[str, Any], base: Path) -> None:
    losses = list(play({**config, "num_epochs": 4, "warmup_steps": 0}, base).losses.values())
    assert losses[-1] < losses[0] / 2


def test_the_resolved_config_has_no_default_left_open(config: dict[str, Any], base: Path) -> None:
    init = play(config, base).one(ev.Init)
    open_keys = {key for key, value in init.config.items() if value is None}
    assert open_keys <= {
        "revision",
        "start_from",
        "valid_data",
        "max_grad_value",
        "chat_template",
        "lora_keys",
        "lora_layers",
        "train_on",
    }
    assert init.examples == 22
    assert init.total_steps == 6
    assert init.config["warmup_steps"] == 0


def test_a_data_set_smaller_than_a_batch_is_one_update(config: dict[str, Any], base: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "few.jsonl", 3)
    result = play({**config, "data": str(rows), "batch_size": 64}, base)
    assert result.status == 0
    assert list(result.losses) == [1]
    assert result.one(ev.EpochStart).num_batches == 1


def test_without_validation_data_evaluation_is_off_with_one_notice(config: dict[str, Any], base: Path) -> None:
    result = play({**config, "eval_every": 2}, base)
    assert len(result.logged("no_validation")) == 1
    assert not result.of(ev.EvalEnd)


def test_log_every_merges_updates_and_keeps_their_sums(config: dict[str, Any], base: Path, tmp_path: Path) -> None:
    single = play(config, base).of(ev.Step)
    merged = play({**config, "log_every": 4, "run_dir": str(tmp_path / "other")}, base).of(ev.Step)
    assert [(step.step, step.updates) for step in merged] == [(4, 4), (6, 2)]
    assert sum(step.total_tokens for step in merged) == sum(step.total_tokens for step in single)
    weighted = sum(s.loss * s.total_tokens for s in single[:4]) / sum(s.total_tokens for s in single[:4])
    assert merged[0].loss == pytest.approx(weighted, rel=1e-12)


def test_max_steps_ends_inside_an_epoch_with_an_epoch_end(config: dict[str, Any], base: Path) -> None:
    result = play({**config, "max_steps": 8}, base)
    assert [(end.epoch, end.updates) for end in result.of(ev.EpochEnd)] == [(1, 6), (2, 2)]
    assert result.one(ev.Complete).total_steps == 8
    assert {start.total_epochs for start in result.of(ev.EpochStart)} == {2}


def test_the_epochs_average_is_weighted_by_tokens(config: dict[str, Any], base: Path) -> None:
    result = play(config, base)
    steps = result.of(ev.Step)
    mean = sum(s.loss * s.total_tokens for s in steps) / sum(s.total_tokens for s in steps)
    assert result.one(ev.EpochEnd).avg_loss == pytest.approx(mean, rel=1e-12)


def test_the_eta_comes_from_measured_updates(config: dict[str, Any], base: Path) -> None:
    steps = play({**config, "num_epochs": 3}, base).of(ev.Step)
    assert steps[0].eta_ms is None
    assert all(step.eta_ms is not None and step.eta_ms >= 0 for step in steps[1:])
    assert steps[-1].eta_ms == 0


def test_mlx_lm_loads_the_adapter_as_it_is(config: dict[str, Any], base: Path) -> None:
    from mlx_lm import load

    play({**config, "num_epochs": 2}, base)
    final = Path(config["run_dir"]) / "final"
    plain, _ = load(str(base / "model"))
    adapted, tokenizer = load(str(base / "model"), adapter_path=str(final))
    ids = mx.array([tokenizer.encode("what is step 3")])
    assert not mx.allclose(plain(ids), adapted(ids))
    saved = mx.load(str(final / "adapters.safetensors"))
    assert all("lora_" in name for name in saved)


def test_mlx_lm_loads_a_full_model_as_it_is(config: dict[str, Any], base: Path, tmp_path: Path) -> None:
    from mlx_lm import load

    tiny_model(tmp_path / "half", dtype=mx.bfloat16)
    del config["lora_rank"]
    play({**config, "method": "full", "model": str(tmp_path / "half"), "max_steps": 2}, base)
    final = Path(config["run_dir"]) / "final"
    model, tokenizer = load(str(final))
    assert tokenizer.chat_template
    saved = mx.load(str(final / "model.safetensors"))
    assert {array.dtype for array in saved.values()} == {mx.bfloat16}
    assert model(mx.array([tokenizer.encode("what")])).shape[0] == 1
    assert (final / "masters.safetensors").exists()


def test_checkpoints_come_by_save_every_and_the_older_ones_go(config: dict[str, Any], base: Path) -> None:
    result = play({**config, "num_epochs": 2, "save_every": 2, "max_checkpoints": 2}, base)
    periodic = [c for c in result.of(ev.Checkpoint) if c.kind == "periodic"]
    assert [c.step for c in periodic] == [2, 4, 6, 8, 10]
    names = sorted(path.name for path in Path(config["run_dir"]).iterdir())
    assert names == ["checkpoint-000008", "checkpoint-000010", "final"]
    assert all(defect(c.path) is None for c in list_checkpoints(Path(config["run_dir"])))


def test_a_checkpoints_manifest_names_every_file(config: dict[str, Any], base: Path) -> None:
    play({**config, "max_steps": 1}, base)
    final = Path(config["run_dir"]) / "final"
    manifest = read_manifest(final)
    assert manifest is not None
    assert set(manifest.files) == {path.name for path in final.iterdir()} - {"manifest.json"}
    assert (manifest.kind, manifest.step, manifest.format) == ("final", 1, 1)


def test_a_prompts_answer_comes_at_its_interval_and_at_the_end(config: dict[str, Any], base: Path) -> None:
    prompts = {"prompts": ["what is step 3", "what is step 4"], "generate_every": 4, "generate_max_tokens": 3}
    result = play({**config, **prompts}, base)
    answers = result.of(ev.Generation)
    assert [(a.step, a.index) for a in answers] == [(4, 0), (4, 1), (6, 0), (6, 1)]
    assert all(a.tokens <= 3 and a.prompt.startswith("what is step") for a in answers)


def test_best_worst_shows_the_two_extremes_of_the_references(
    config: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    answers = ["the step 3 is an update of the model", "qqq zzz xxx", "the step"]
    lines = [json.dumps({"prompt": "what is step 3", "completion": answer}) for answer in answers]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    result = play(
        {
            **config,
            "prompts": str(tmp_path / "prompts.jsonl"),
            "generate_every": 24,
            "num_epochs": 4,
            "generate_max_tokens": 2,
            "sample_display": "best_worst",
        },
        base,
    )
    shown = result.of(ev.Generation)
    assert [g.index for g in shown][1] == 1
    assert shown[0].loss < shown[1].loss


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer_args": {"beta": 1}},
        {"optimizer_args": {"eps": -1}},
        {"prompts": "missing.txt"},
        {"generate_every": 3},
        {"prompts": ["a"], "sample_display": "best_worst"},
        {"chat_template": "missing.jinja"},
        {"chat_template": "{{ messages"},
    ],
    ids=str,
)
def test_a_wrong_value_is_told_before_the_model_is_loaded_and_the_data_is_read(
    config: dict[str, Any], base: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    bare = shutil.copytree(base / "model", tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    wrong = {**config, "model": str(bare), "data": "missing.jsonl"}
    assert play(wrong, base).one(ch.Failed).code == "model_load_failed"
    failed = play({**wrong, **change}, base).one(ch.Failed)
    assert failed.code == "config_invalid"


@pytest.mark.parametrize(
    ("change", "told"),
    [({}, "assistant"), ({"train_on": "last"}, "last"), ({"data": "text.jsonl"}, "all"), ({"data": "both"}, None)],
)
def test_init_tells_what_is_trained(
    config: dict[str, Any], base: Path, tmp_path: Path, change: dict[str, Any], told: str | None
) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "a text"}\n')
    data = {"text.jsonl": str(text), "both": [config["data"], str(text)]}
    result = play({**config, **change, "data": data.get(change.get("data", ""), config["data"])}, base)
    init = result.one(ev.Init)
    assert init.config["train_on"] == told
    computed = {key for key in FIELDS if computed_default(key)} - {"train_on", "lora_layers", "lora_keys"}
    assert [key for key in computed if init.config[key] is None] == []


@pytest.mark.parametrize(
    ("change", "code", "status"),
    [
        ({"model": "missing-model-folder/here"}, "model_load_failed", 4),
        ({"data": "missing.jsonl"}, "dataset_invalid", 3),
        ({"prompts": "missing.txt"}, "config_invalid", 3),
        ({"generate_every": 3}, "config_invalid", 3),
        ({"prompts": ["a"], "sample_display": "best_worst"}, "config_invalid", 3),
        ({"optimizer_args": {"beta": 1}}, "config_invalid", 3),
    ],
)
def test_what_cannot_be_run_fails_with_its_code_and_a_hint(
    config: dict[str, Any], base: Path, change: dict[str, Any], code: str, status: int
) -> None:
    result = play({**config, **change}, base)
    failed = result.one(ch.Failed)
    assert (failed.code, result.status) == (code, status)
    assert failed.hint
    assert not Path(config["run_dir"]).exists()
