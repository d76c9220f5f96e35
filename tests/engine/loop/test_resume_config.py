"""What may differ on a resume: every key by its class, the data by its rows, the model by its files."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from scripted import Result, at_step, both, on, play, write_rows
from tiny import tiny_model

from trainwire_engine import native
from trainwire_engine.native import Native
from trainwire_engine.resume import JUDGED_BY_CONTENT, Past, open_past
from trainwire_engine.state import FORMAT, DataMark, ModelMark, Saved, TrainState, encode_saved
from trainwire_protocol import channel as ch
from trainwire_protocol import events as ev
from trainwire_protocol.config import FIELDS, ON_RESUME, Config, OnResume
from trainwire_protocol.config_load import build_config
from trainwire_protocol.errors import ResumeRefused
from trainwire_protocol.rundir import STATE_NAME, Manifest, defect

OTHER_VALUES: dict[str, Any] = {
    "model": "/models/other",
    "revision": "v2",
    "run_dir": "/runs/other",
    "run_name": "other",
    "resume": "latest",
    "resume_override": ["seed"],
    "start_from": "/adapters/other",
    "data": "/data/other.jsonl",
    "valid_data": "/data/other-valid.jsonl",
    "train_on": "all",
    "chat_template": "{{ messages }}",
    "chat_template_args": {"enable_thinking": False},
    "max_seq_length": 64,
    "on_overlong": "truncate",
    "max_train_samples": 5,
    "shuffle": False,
    "seed": 7,
    "method": "dora",
    "lora_rank": 4,
    "lora_alpha": 8.0,
    "lora_dropout": 0.5,
    "lora_layers": 1,
    "lora_keys": ["self_attn.q_proj"],
    "batch_size": 2,
    "micro_batch_tokens": 512,
    "group_by_length": True,
    "packing": True,
    "num_epochs": 5,
    "max_steps": 50,
    "optimizer": "lion",
    "optimizer_args": {"eps": 1e-6},
    "learning_rate": 0.5,
    "schedule": "linear",
    "warmup_steps": 9,
    "min_learning_rate": 1e-7,
    "weight_decay": 0.1,
    "max_grad_norm": 2.0,
    "max_grad_value": 1.0,
    "label_smoothing": 0.1,
    "trainable_dtype": "model",
    "gradient_checkpointing": True,
    "max_consecutive_non_finite": 9,
    "max_non_finite": 9,
    "log_every": 3,
    "save_every": 3,
    "eval_every": 3,
    "generate_every": 3,
    "max_checkpoints": 9,
    "keep_best": False,
    "early_stopping_patience": 3,
    "eval_batches": 3,
    "eval_at_start": True,
    "prompts": ["a"],
    "generate_max_tokens": 3,
    "sample_display": "best_worst",
    "cache_dir": "/caches/other",
}


def given(**values: Any) -> Config:
    return build_config(
        {"model": "/models/one", "data": "/data/rows.jsonl", "run_dir": "/runs/one", **values}, Path("/")
    )


def checkpoint(folder: Path, config: Config, *, kind: Any = "periodic", **in_force: Any) -> Path:
    """A checkpoint of step 3 whose run was started with `config`, and whose values in force may differ from it."""
    folder.mkdir()
    resolved = {**msgspec.to_builtins(config), "micro_batch_tokens": 2048, "warmup_steps": 1, **in_force}
    saved = Saved(
        format=FORMAT,
        training_type="sft",
        run_id="test",
        attempt=1,
        created_ms=0,
        state=TrainState(step=3, epoch_update=3, horizon=6),
        given=msgspec.to_builtins(config),
        config=resolved,
        model=ModelMark(config.model, "qwen3", "f" * 64),
        tokenizer="t",
        data_time="2026-01-01T00:00:00",
        train=DataMark("d" * 40, 24),
        valid=None,
        versions={},
        native=Native("MLX's own"),
        steps=[],
    )
    (folder / STATE_NAME).write_bytes(encode_saved(saved))
    (folder / "optimizer.safetensors").write_bytes(b"")
    (folder / "manifest.json").write_bytes(msgspec.json.encode(Manifest(1, 3, kind, {})))
    return folder


def test_the_table_of_other_values_names_every_key() -> None:
    assert set(OTHER_VALUES) == set(FIELDS)


@pytest.mark.parametrize("key", FIELDS)
def test_a_changed_key_is_treated_by_its_class(tmp_path: Path, key: str) -> None:
    hub = {"model": "org/one"} if key == "revision" else {}
    folder = checkpoint(tmp_path / "checkpoint-000003", given(**hub))
    change = {**hub, key: OTHER_VALUES[key]}
    kind = ON_RESUME[key]
    if key in JUDGED_BY_CONTENT:
        # The folder may be called anything: what it holds is compared once it is loaded.
        assert getattr(open_past(folder, given(**change)).config, key) == OTHER_VALUES[key]
        return
    if kind is OnResume.FREE:
        past = open_past(folder, given(**change))
        assert getattr(past.config, key) == OTHER_VALUES[key]
        return
    with pytest.raises(ResumeRefused) as refused:
        open_past(folder, given(**change))
    old = msgspec.json.decode((folder / STATE_NAME).read_bytes())["config"][key]
    for part in (key, repr(old), repr(OTHER_VALUES[key])):
        assert part in refused.value.message
    assert refused.value.details["changes"][key]["on_resume"] == kind.value
    accept = given(**change, resume_override=[key])
    if kind is OnResume.FIXED:
        assert "start_from" in (refused.value.hint or "")
        with pytest.raises(ResumeRefused):
            open_past(folder, accept)
    else:
        assert f'resume_override = ["{key}"]' in (refused.value.hint or "")
        past = open_past(folder, accept)
        assert getattr(past.config, key) == OTHER_VALUES[key]
        assert [change.key for change in past.changes] == [key]


def test_a_key_that_the_config_says_as_before_keeps_the_value_that_set_gave_it(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint-000003", given(), learning_rate=0.25, log_every=7)
    past = open_past(folder, given())
    assert (past.config.learning_rate, past.config.log_every) == (0.25, 7)
    assert past.changes == []


def test_a_key_that_was_changed_in_the_config_wins_over_set(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint-000003", given(), log_every=7)
    assert open_past(folder, given(log_every=2)).config.log_every == 2


def test_writing_down_what_set_had_given_is_no_change(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint-000003", given(), learning_rate=0.25)
    past = open_past(folder, given(learning_rate=0.25))
    assert past.changes == []


def test_values_that_were_computed_are_kept(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint-000003", given(num_epochs=1))
    past = open_past(folder, given(num_epochs=9))
    assert (past.config.micro_batch_tokens, past.config.warmup_steps) == (2048, 1)


def test_every_refused_key_is_named_at_once(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint-000003", given())
    with pytest.raises(ResumeRefused) as refused:
        open_past(folder, given(seed=7, method="dora", batch_size=2))
    assert set(refused.value.details["changes"]) == {"seed", "method", "batch_size"}
    assert 'resume_override = ["seed", "batch_size"]' in (refused.value.hint or "")


def test_a_checkpoint_of_another_format_names_both(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint-000003", given())
    state = json.loads((folder / STATE_NAME).read_bytes())
    (folder / STATE_NAME).write_text(json.dumps({**state, "format": 99, "new_field": 1}))
    with pytest.raises(ResumeRefused, match=r"format 99.*format 1"):
        open_past(folder, given())


@pytest.mark.parametrize("name", ["optimizer.safetensors", STATE_NAME])
def test_a_checkpoint_that_lacks_what_a_resume_needs_is_refused_with_start_from(tmp_path: Path, name: str) -> None:
    folder = checkpoint(tmp_path / "checkpoint-000003", given())
    (folder / name).unlink()
    with pytest.raises(ResumeRefused, match=name) as refused:
        open_past(folder, given())
    assert "start_from" in (refused.value.hint or "")


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"format": 1}'])
def test_a_broken_state_is_refused(tmp_path: Path, raw: bytes) -> None:
    folder = checkpoint(tmp_path / "checkpoint-000003", given())
    (folder / STATE_NAME).write_bytes(raw)
    with pytest.raises(ResumeRefused):
        open_past(folder, given())


@pytest.mark.parametrize(
    ("before", "after", "goes_on"),
    [
        ({"num_epochs": 1}, {"num_epochs": 1}, False),
        ({"num_epochs": 1}, {"num_epochs": 2}, True),
        ({"max_steps": 3}, {"max_steps": 3}, False),
        ({"max_steps": 3}, {"max_steps": 2}, False),
        ({"max_steps": 3}, {"max_steps": 4}, True),
        ({"num_epochs": 1}, {"max_steps": 3}, False),
        ({"num_epochs": 1}, {"max_steps": 4}, True),
        ({"max_steps": 3}, {"num_epochs": 2}, True),
    ],
)
def test_a_finished_run_goes_on_only_if_its_end_was_moved(
    tmp_path: Path, before: dict[str, int], after: dict[str, int], goes_on: bool
) -> None:
    folder = checkpoint(tmp_path / "final", given(**before), kind="final")
    if goes_on:
        open_past(folder, given(**after))
        return
    with pytest.raises(ResumeRefused, match="finished"):
        open_past(folder, given(**after))


def past_of(tmp_path: Path, **values: Any) -> Past:
    return open_past(checkpoint(tmp_path / "checkpoint-000003", given()), given(**values))


@pytest.mark.parametrize("key", ["data", "valid_data"])
def test_other_rows_are_refused_unless_the_key_is_overridden(tmp_path: Path, key: str) -> None:
    past = past_of(tmp_path)
    with pytest.raises(ResumeRefused, match=r"20 examples") as refused:
        past.check_data(key, DataMark("e" * 40, 20))
    assert f'resume_override = ["{key}"]' in (refused.value.hint or "")
    accepting = open_past(tmp_path / "checkpoint-000003", given(resume_override=[key]))
    accepting.check_data(key, DataMark("e" * 40, 20))
    assert accepting.changes[-1].key == key


def test_the_same_rows_in_another_file_are_no_change(tmp_path: Path) -> None:
    past = past_of(tmp_path, data="/elsewhere/rows.jsonl")
    past.check_data("data", DataMark("d" * 40, 24))
    past.check_data("valid_data", None)
    assert past.changes == []


def test_rows_that_an_accepted_change_makes_others_need_no_second_acceptance(tmp_path: Path) -> None:
    past = past_of(tmp_path, max_seq_length=64, resume_override=["max_seq_length"])
    past.check_data("data", DataMark("e" * 40, 20))
    past.check_data("valid_data", DataMark("e" * 40, 20))


def test_fewer_training_rows_do_not_explain_other_validation_rows(tmp_path: Path) -> None:
    past = past_of(tmp_path, max_train_samples=5, resume_override=["max_train_samples"])
    past.check_data("data", DataMark("e" * 40, 5))
    with pytest.raises(ResumeRefused, match="valid_data"):
        past.check_data("valid_data", DataMark("e" * 40, 20))


def test_what_belongs_to_an_attempt_is_no_change_of_the_run(tmp_path: Path) -> None:
    past = past_of(tmp_path, resume="latest", resume_override=["seed"], run_dir="/runs/other", run_name="other")
    assert past.changes == []
    assert past.config.run_dir == "/runs/other"


def test_another_model_is_refused_with_both_named(tmp_path: Path) -> None:
    past = past_of(tmp_path, model="/models/two")
    with pytest.raises(ResumeRefused) as refused:
        past.check_model(ModelMark("/models/two", "llama", "e" * 64))
    for part in ("/models/one", "qwen3", "/models/two", "llama"):
        assert part in refused.value.message


def test_the_same_model_in_another_folder_is_no_change(tmp_path: Path) -> None:
    past_of(tmp_path, model="/models/two").check_model(ModelMark("/models/two", "qwen3", "f" * 64))


def test_a_changed_batch_size_goes_on_at_the_same_rows(tmp_path: Path) -> None:
    past = past_of(tmp_path, batch_size=4, resume_override=["batch_size"])
    past.adapt_position()
    # Three updates of eight rows were done: 24 rows, six updates of four.
    assert past.saved.state.epoch_update == 6
    assert past.moves_horizon


# Whole runs


def stopped_at(config: dict[str, Any], base: Path, step: int = 3) -> str:
    result = play(config, base, at_step(step, ch.StopOrder(order=2)))
    checkpoint: str = result.one(ch.Finished).checkpoint
    return checkpoint


def refused(result: Result) -> ch.Failed:
    failed: ch.Failed = result.one(ch.Failed)
    assert (failed.code, result.status) == ("resume_refused", 3)
    return failed


@pytest.mark.parametrize("change", ["other content", "other order", "fewer rows"])
def test_changed_data_is_detected(config: dict[str, Any], base: Path, tmp_path: Path, change: str) -> None:
    path = stopped_at(config, base)
    lines = (base / "train.jsonl").read_text().splitlines()
    if change == "other content":
        lines[3] = lines[3].replace("update", "updates")
    elif change == "other order":
        lines[3], lines[4] = lines[4], lines[3]
    else:
        lines = lines[:-1]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    changed = {**config, "data": str(tmp_path / "train.jsonl")}
    assert "data has other rows" in refused(play(changed, base, resume_from=path)).message
    accepted = play({**changed, "resume_override": ["data"]}, base, resume_from=path)
    assert accepted.one(ch.Finished).outcome == "completed"
    assert accepted.logged("resume_changed")


def test_moved_data_and_a_moved_model_go_on(config: dict[str, Any], base: Path, tmp_path: Path) -> None:
    path = stopped_at(config, base)
    shutil.copytree(base / "model", tmp_path / "model")
    shutil.copy(base / "train.jsonl", tmp_path / "rows.jsonl")
    moved = {**config, "model": str(tmp_path / "model"), "data": str(tmp_path / "rows.jsonl")}
    assert play(moved, base, resume_from=path).one(ch.Finished).outcome == "completed"


def test_another_models_checkpoint_is_refused(config: dict[str, Any], base: Path, tmp_path: Path) -> None:
    path = stopped_at(config, base)
    tiny_model(tmp_path / "model", seed=1)
    failed = refused(play({**config, "model": str(tmp_path / "model")}, base, resume_from=path))
    assert str(tmp_path / "model") in failed.message
    assert str(base / "model") in failed.message


def test_a_refused_resume_writes_nothing(config: dict[str, Any], base: Path) -> None:
    path = stopped_at(config, base)
    before = {p: p.stat().st_mtime_ns for p in Path(config["run_dir"]).rglob("*")}
    refused(play({**config, "seed": 7}, base, resume_from=path))
    assert {p: p.stat().st_mtime_ns for p in Path(config["run_dir"]).rglob("*")} == before


@pytest.mark.parametrize("how", ["epochs", "steps", "early stopping", "early stopping before max_steps"])
def test_a_run_that_died_before_it_said_that_it_is_complete_says_so(
    config: dict[str, Any], base: Path, how: str
) -> None:
    stopping = {"valid_data": str(base / "valid.jsonl"), "eval_every": 2, "early_stopping_patience": 1}
    ends = {"epochs": {}, "steps": {"max_steps": 4}, "early stopping": {**stopping, "learning_rate": 1.0}}
    ends["early stopping before max_steps"] = ends["early stopping"] | {"max_steps": 50}
    settings = {**config, **ends[how]}
    first = play(settings, base)
    final = Path(first.one(ch.Finished).checkpoint)
    before = {file.name: file.read_bytes() for file in final.glob("*.safetensors")}
    again = play(settings, base, resume_from=str(final), attempt=2)
    assert again.status == 0, again.of(ch.Failed)
    assert not again.of(ev.Step)
    assert again.one(ev.Complete).reason == first.one(ev.Complete).reason
    assert again.one(ev.Complete).total_steps == first.one(ev.Complete).total_steps
    assert {file.name: file.read_bytes() for file in final.glob("*.safetensors")} == before
    assert defect(final) is None
    named = play({**settings, "resume": str(final)}, base, resume_from=str(final))
    assert (named.one(ch.Failed).code, named.status) == ("resume_refused", 3)


def test_a_finished_run_with_more_epochs_goes_on_from_its_final_checkpoint(config: dict[str, Any], base: Path) -> None:
    play(config, base)
    final = Path(config["run_dir"]) / "final"
    refused(play({**config, "resume": str(final)}, base, resume_from=str(final)))
    result = play({**config, "num_epochs": 2}, base, resume_from=str(final))
    assert list(result.losses) == [7, 8, 9, 10, 11, 12]
    assert [start.epoch for start in result.of(ev.EpochStart)] == [2]
    assert result.of(ev.Step)[0].learning_rate > 1e-4
    assert defect(final) is None


def test_set_values_hold_after_a_resume(config: dict[str, Any], base: Path) -> None:
    settings = {**config, "schedule": "constant"}
    values = {"learning_rate": 0.02, "save_every": 2}
    rule = both(at_step(3, ch.SetOrder(order=2, values=values)), on(ev.ConfigChanged, ch.StopOrder(order=3)))
    path = play(settings, base, rule).one(ch.Finished).checkpoint
    result = play(settings, base, resume_from=path)
    assert {step.learning_rate for step in result.of(ev.Step)} == {0.02}
    assert [c.step for c in result.of(ev.Checkpoint) if c.kind == "periodic"] == [4]
    assert result.one(ev.Init).config["learning_rate"] == 0.02


def test_a_resume_under_another_version_of_what_computes_is_told(config: dict[str, Any], base: Path) -> None:
    path = Path(stopped_at(config, base))
    assert not play(config, base, resume_from=str(path)).logged("environment_changed")
    state = json.loads((path / STATE_NAME).read_bytes())
    state["versions"]["mlx"] = "0.1"
    state["native"]["blas"] = "SlowBLAS 1"
    (path / STATE_NAME).write_text(json.dumps(state))
    (log,) = play(config, base, resume_from=str(path)).logged("environment_changed")
    assert log.details is not None
    assert log.details["mlx"]["from"] == "0.1"
    assert log.details["blas"]["from"] == "SlowBLAS 1"
    assert set(log.details) == {"mlx", "blas"}


@pytest.mark.skipif(sys.platform != "linux", reason="macOS computes with Accelerate")
def test_a_resume_on_fewer_cores_than_its_blas_had_is_told(
    config: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "cores", lambda: 3)
    first = play(config, base, at_step(2, ch.StopOrder(order=2)))
    monkeypatch.setattr(native, "cores", lambda: 1)
    result = play(config, base, resume_from=first.one(ch.Finished).checkpoint)
    if first.one(ev.Init).blas == "MLX's own":
        assert not result.logged("environment_changed")
        return
    assert result.one(ev.Init).blas.endswith(", 3 of 1 core")
    (log,) = result.logged("environment_changed")
    assert log.details == {"cores": {"from": 3, "to": 1}}


def test_the_steps_that_a_log_may_lack_are_told_again_also_by_later_attempts(
    config: dict[str, Any], base: Path
) -> None:
    settings = {**config, "save_every": 2}
    first = play(settings, base, at_step(3, ch.StopOrder(order=2)))
    path = first.one(ch.Finished).checkpoint
    second = play(settings, base, at_step(5, ch.StopOrder(order=2)), resume_from=path)
    third = play(settings, base, resume_from=second.one(ch.Finished).checkpoint)
    assert [step.step for step in second.one(ch.StepHistory).steps] == [1, 2, 3]
    history = {step.step: step.loss for step in third.one(ch.StepHistory).steps}
    assert history == {**first.losses, **second.losses}


@pytest.mark.parametrize("name", ["adapters.safetensors", "optimizer.safetensors"])
def test_a_checkpoint_whose_arrays_do_not_fit_is_refused_with_the_name(
    config: dict[str, Any], base: Path, name: str
) -> None:
    path = Path(stopped_at(config, base))
    arrays = mx.load(str(path / name))
    lost = sorted(arrays)[0]
    del arrays[lost]
    mx.save_safetensors(str(path / name), arrays)
    failed = refused(play(config, base, resume_from=str(path)))
    assert lost in failed.message


def test_a_new_run_starts_from_an_adapter(config: dict[str, Any], base: Path, tmp_path: Path) -> None:
    first = play({**config, "num_epochs": 3}, base)
    final = Path(config["run_dir"]) / "final"
    (final / "optimizer.safetensors").unlink()
    start = {**config, "start_from": str(final), "run_dir": str(tmp_path / "second")}
    second = play(start, base)
    assert second.one(ev.Init).start_step == 0
    assert second.losses[1] < first.losses[1] / 2
    shutil.rmtree(final)
    # A resume takes its weights from its own checkpoint.
    stopped = play({**start, "run_dir": str(tmp_path / "third")}, base)
    assert stopped.one(ch.Failed).code == "model_load_failed"


def test_a_resume_does_not_need_what_the_run_started_from(config: dict[str, Any], base: Path, tmp_path: Path) -> None:
    play(config, base)
    final = Path(config["run_dir"]) / "final"
    start = {**config, "start_from": str(final), "run_dir": str(tmp_path / "second")}
    path = stopped_at(start, base)
    shutil.rmtree(final)
    assert play(start, base, resume_from=path).one(ch.Finished).outcome == "completed"


def test_fewer_rows_that_end_before_the_position_begin_the_next_epoch(
    config: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    path = stopped_at({**config, "num_epochs": 2}, base, 5)
    rows = write_rows(tmp_path / "few.jsonl", 8)
    change = {**config, "num_epochs": 2, "data": str(rows), "resume_override": ["data"]}
    result = play(change, base, resume_from=path)
    assert list(result.losses) == [6, 7]
    assert [(e.epoch, e.num_batches) for e in result.of(ev.EpochStart)] == [(2, 2)]


def test_the_size_of_micro_batches_is_found_once_and_kept_on_another_machine(
    config: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**config, "max_steps": 2, "micro_batch_tokens": None}
    monkeypatch.setattr("trainwire_engine.memory.default_micro_batch_tokens", lambda *_: 256)
    first = play(settings, base)
    monkeypatch.setattr("trainwire_engine.memory.default_micro_batch_tokens", lambda *_: 32)
    again = play({**settings, "max_steps": 3}, base, resume_from=first.of(ev.Checkpoint)[-1].path)
    inits = [result.one(ev.Init).config["micro_batch_tokens"] for result in (first, again)]
    assert inits == [256, 256]
    assert list(again.losses) == [3]
