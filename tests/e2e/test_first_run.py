"""The main path through real processes: config in, events out, a fine-tuned model on disk."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import FAMILIES, tiny_model
from whole import ENVIRONMENT, Session, trainwire, write_chat, write_config


def train(base: Path, folder: Path, *words: str, **values: object) -> Session:
    """Train for a few updates in a folder of its own."""
    config = {
        "model": str(base / "model"),
        "data": str(base / "chat.jsonl"),
        "cache_dir": str(base / "cache"),
        "learning_rate": 1e-2,
        "max_steps": 5,
        "warmup_steps": 1,
        **values,
    }
    folder.mkdir(parents=True, exist_ok=True)
    return trainwire("run", write_config(folder / "chat.toml", **config), *words)


def test_a_run_says_everything_in_order_and_the_log_holds_the_same_lines(base: Path, tmp_path: Path) -> None:
    session = train(base, tmp_path, valid_data=str(base / "valid.jsonl"), eval_every=3, save_every=2)
    assert session.exit_code == 0, session.stderr
    kinds = [k for k in session.types if k not in ("status", "progress", "log")]
    first = list(dict.fromkeys(kinds))
    assert first[:6] == ["hello", "attempt", "data", "init", "epoch_start", "step"]
    assert kinds[-4:] == ["epoch_end", "checkpoint", "complete", "end"]
    assert [line["split"] for line in session.of("data")] == ["train", "valid"]
    assert [line["step"] for line in session.of("step")] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in session.of("eval_end")] == [3, 5]
    kinds_of_saves = {(line["kind"], line["step"]) for line in session.of("checkpoint")}
    assert {("periodic", 2), ("periodic", 4), ("best", 3), ("best", 5), ("final", 5)} == kinds_of_saves
    logged = [json.loads(line) for line in (tmp_path / "runs/chat/events.jsonl").read_bytes().splitlines()]
    assert logged == [line for line in session.lines if "seq" in line]
    assert [line["seq"] for line in logged] == list(range(1, len(logged) + 1))
    end = session.one("end")
    assert end["outcome"] == "completed"
    assert Path(end["checkpoint"]) == tmp_path / "runs/chat/final"
    assert session.losses[5] < session.losses[1]


def test_words_on_the_command_line_win_over_the_file(base: Path, tmp_path: Path) -> None:
    session = train(base, tmp_path, "max_steps=2", "method=dora", "shuffle=no", "--progress", "off")
    init = session.one("init")
    assert session.exit_code == 0, session.stderr
    assert (init["total_steps"], init["config"]["method"], init["config"]["shuffle"]) == (2, "dora", False)


@pytest.mark.parametrize("method", ["lora", "dora", "full"])
def test_mlx_lm_generates_with_what_was_trained(base: Path, tmp_path: Path, method: str) -> None:
    session = train(base, tmp_path, method=method)
    assert session.exit_code == 0, session.stderr
    final = session.one("end")["checkpoint"]
    model = ["--model", final] if method == "full" else ["--model", str(base / "model"), "--adapter-path", final]
    command = [sys.executable, "-m", "mlx_lm", "generate", *model, "--prompt", "say 3", "--max-tokens", "4"]
    done = subprocess.run(command, capture_output=True, env=ENVIRONMENT, timeout=240, text=True)
    assert done.returncode == 0, done.stderr
    assert "Generation: 4 tokens" in done.stdout


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains(base: Path, tmp_path: Path, family: str) -> None:
    session = train(base, tmp_path, model=str(tiny_model(tmp_path / "model", family)), max_steps=3)
    assert session.exit_code == 0, session.stderr
    assert session.losses[3] < session.losses[1]


def test_a_quantized_base_takes_adapters(base: Path, tmp_path: Path) -> None:
    packed = tiny_model(tmp_path / "packed", bits=4, hidden_size=64, intermediate_size=128)
    session = train(base, tmp_path, model=str(packed))
    assert session.exit_code == 0, session.stderr
    assert session.losses[5] < session.losses[1]
    refused = train(base, tmp_path / "full", model=str(packed), method="full")
    assert refused.exit_code == 3
    assert refused.one("error")["code"] == "unsupported"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c d"}]},
        {"prompt": "a question", "completion": "an answer"},
        {"text": "just a text to learn"},
    ],
    ids=["messages", "prompt-completion", "text"],
)
def test_every_shape_of_row_trains_also_in_a_data_set_smaller_than_a_batch(
    base: Path, tmp_path: Path, row: dict[str, object]
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text((json.dumps(row) + "\n") * 3)
    session = train(base, tmp_path, data=str(data), max_steps=0, num_epochs=2)
    assert session.exit_code == 0, session.stderr
    assert [line["step"] for line in session.of("step")] == [1, 2]
    assert session.one("init")["examples"] == 3


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(base: Path, tmp_path: Path) -> None:
    whole = train(base, tmp_path / "whole", max_steps=6, lora_dropout=0.1)
    first = train(base, tmp_path / "parts", max_steps=3, lora_dropout=0.1, warmup_steps=1)
    assert first.exit_code == 0, first.stderr
    stopped = tmp_path / "stopped"
    half = train(base, stopped, "resume=auto", max_steps=6, lora_dropout=0.1, save_every=3)
    shutil.rmtree(stopped / "runs/chat/final")
    log = (stopped / "runs/chat/events.jsonl").read_bytes().splitlines(keepends=True)
    cut = next(i for i, line in enumerate(log) if b'"type":"step"' in line and json.loads(line)["step"] == 5)
    (stopped / "runs/chat/events.jsonl").write_bytes(b"".join(log[:cut]) + log[cut][:20])
    shutil.rmtree(stopped / "runs/chat/checkpoint-000006", ignore_errors=True)
    rest = train(base, stopped, max_steps=6, lora_dropout=0.1, save_every=3)
    assert rest.exit_code == 0, rest.stderr
    assert rest.one("attempt")["resumed_from_step"] == 3
    assert "log_repaired" in [line.get("code") for line in rest.of("log")]
    assert {**half.losses, **rest.losses} == whole.losses
    for name in ("adapters.safetensors", "optimizer.safetensors"):
        assert (stopped / "runs/chat/final" / name).read_bytes() == (
            tmp_path / "whole/runs/chat/final" / name
        ).read_bytes()


def test_a_finished_run_goes_on_only_if_its_end_was_moved(base: Path, tmp_path: Path) -> None:
    assert train(base, tmp_path, max_steps=2).exit_code == 0
    before = (tmp_path / "runs/chat/events.jsonl").read_bytes()
    again = train(base, tmp_path, max_steps=2)
    assert again.exit_code == 3
    assert again.one("error")["code"] == "resume_refused"
    assert "max_steps" in again.one("error")["hint"]
    assert (tmp_path / "runs/chat/events.jsonl").read_bytes() == before
    more = train(base, tmp_path, max_steps=4)
    assert more.exit_code == 0, more.stderr
    assert [line["step"] for line in more.of("step")] == [3, 4]


def test_the_pipe_into_jq_works_as_the_readme_shows_it(base: Path, tmp_path: Path) -> None:
    if shutil.which("jq") is None:
        pytest.skip("jq is not installed")
    config = write_config(tmp_path / "c.toml", model=str(base / "model"), data=str(base / "chat.jsonl"), max_steps=3)
    script = 'select(.type=="step") | {step, loss}'
    pipe = f"{sys.executable} -m trainwire_cli run {config} | jq --unbuffered -c '{script}'"
    done = subprocess.run(["bash", "-c", pipe], capture_output=True, env=ENVIRONMENT, timeout=240, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(set(line) == {"step", "loss"} for line in lines)


BAD = {
    "no model folder": ({"model": "nowhere"}, 4, "model_load_failed", "nowhere"),
    "no config.json": ({"model": "empty"}, 4, "model_load_failed", "config.json"),
    "no data file": ({"data": "nowhere.jsonl"}, 3, "dataset_invalid", "nowhere.jsonl"),
    "a pattern of names": ({"data": "*.jsonl"}, 3, "dataset_invalid", "Patterns are not expanded"),
    "an empty data file": ({"data": "empty.jsonl"}, 3, "dataset_invalid", "empty"),
    "a broken line": ({"data": "broken.jsonl"}, 3, "dataset_invalid", "broken.jsonl:2"),
    "a row of no format": ({"data": "odd.jsonl"}, 3, "dataset_invalid", "odd.jsonl:1"),
    "a typo": ({"batch_sise": 4}, 3, "config_invalid", "batch_size"),
    "a key of another trainer": ({"iters": 4}, 3, "config_invalid", "max_steps"),
    "a value out of range": ({"batch_size": 0}, 3, "config_invalid", "batch_size = 0"),
    "a wrong type": ({"learning_rate": "fast"}, 3, "config_invalid", "learning_rate = 'fast'"),
    "weights that are no weights": ({"model": "torn"}, 4, "model_load_failed", "torn"),
}


@pytest.mark.parametrize("case", BAD, ids=list(BAD))
def test_bad_input_is_refused_with_a_sentence_and_the_right_code(base: Path, tmp_path: Path, case: str) -> None:
    values, exit_code, code, named = BAD[case]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.jsonl").touch()
    good = (base / "chat.jsonl").read_text().splitlines()[0]
    (tmp_path / "broken.jsonl").write_text(good + "\n{'not': json}\n")
    (tmp_path / "odd.jsonl").write_text('{"question": "?", "reply": "!"}\n')
    shutil.copytree(base / "model", tmp_path / "torn")
    (tmp_path / "torn/model.safetensors").write_bytes(b"junk")
    session = train(base, tmp_path, **values)
    assert session.exit_code == exit_code, session.stderr
    error, end = session.one("error"), session.one("end")
    assert error["code"] == code
    assert named in f"{error['message']} {error.get('hint')}"
    assert (end["outcome"], end["exit_code"]) == ("failed", exit_code)
    assert session.lines[-1] == end
    assert error["message"] in session.stderr


def test_a_missing_or_empty_validation_file_turns_evaluation_off_with_one_notice(base: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    for number, name in enumerate(("nowhere.jsonl", "empty.jsonl")):
        session = train(base, tmp_path / str(number), valid_data=str(tmp_path / name), max_steps=2, eval_every=1)
        assert session.exit_code == 0, session.stderr
        assert [line["code"] for line in session.of("log")] == ["no_validation"]
        assert not session.of("eval_end")


def test_a_folder_that_holds_something_else_or_another_run_is_left_as_it_is(base: Path, tmp_path: Path) -> None:
    write_chat(tmp_path / "other.jsonl", 12)
    (tmp_path / "runs/chat").mkdir(parents=True)
    (tmp_path / "runs/chat/thesis.txt").write_text("mine")
    refused = train(base, tmp_path)
    assert (refused.exit_code, refused.one("error")["code"]) == (3, "resume_refused")
    assert [p.name for p in (tmp_path / "runs/chat").iterdir()] == ["thesis.txt"]
    (tmp_path / "runs/chat/thesis.txt").unlink()
    assert train(base, tmp_path).exit_code == 0
    for values in ({"data": str(tmp_path / "other.jsonl")}, {"method": "full"}, {"lora_rank": 4}):
        before = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs/chat/final").iterdir()}
        refused = train(base, tmp_path, max_steps=9, **values)
        assert (refused.exit_code, refused.one("error")["code"]) == (3, "resume_refused"), values
        assert {p: p.stat().st_mtime_ns for p in (tmp_path / "runs/chat/final").iterdir()} == before
    never = train(base, tmp_path, resume="never")
    assert (never.exit_code, never.one("error")["code"]) == (3, "resume_refused")
    fresh = train(base, tmp_path, "--overwrite", resume="never", max_steps=2)
    assert fresh.exit_code == 0, fresh.stderr
    assert fresh.one("attempt")["attempt"] == 1


def test_an_engine_that_is_not_installed_gives_one_sentence(base: Path, tmp_path: Path) -> None:
    # A worker without site-packages' MLX: the dependencies of the wire alone on the path.
    venv = tmp_path / "site"
    venv.mkdir()
    import msgspec
    import orjson

    for module in (msgspec, orjson):
        source = Path(module.__file__ or "").parent
        shutil.copytree(source, venv / source.name)
    root = Path(__file__).parents[2]
    config = write_config(tmp_path / "c.toml", model=str(base / "model"), data=str(base / "chat.jsonl"))
    path = ":".join(str(p) for p in (venv, root / "protocol", root / "worker"))
    command = [sys.executable, "-S", "-m", "trainwire_worker", "run", str(config)]
    done = subprocess.run(command, capture_output=True, env={"PYTHONPATH": path, "PATH": "/usr/bin"}, timeout=240)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    error = next(line for line in lines if line["type"] == "error")
    assert error["code"] == "engine_unavailable"
    assert "pip install" in error["hint"]
    assert done.returncode == 4
    assert lines[-1]["exit_code"] == 4
