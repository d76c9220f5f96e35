"""`trainwire validate`: what a person sees of a config before it is trained, and what a program gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from trainwire_cli.validate_view import CLOSE, OPEN, TRAINED, show

ROOT = Path(__file__).parents[2]


def validate(folder: Path, *words: str, **keys: Any) -> subprocess.CompletedProcess[str]:
    """Run it on a config with these keys, with the scripted engine."""
    values = {"model": "m/m", "data": "d/d", **keys}
    (folder / "c.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    command = [sys.executable, "-m", "trainwire_cli", "validate", str(folder / "c.toml"), "--engine", "fake", *words]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)


def test_a_valid_config_gives_tables_and_rows_and_exit_code_0(tmp_path: Path) -> None:
    done = validate(tmp_path, batch_size=4, max_steps=7)
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert "lora, 10,000 of 1,000,000 parameters" in words
    assert "rows read 80 rows used 80 rows dropped 0 tokens 5,120 trained tokens 2,560" in words
    assert "updates 7 of 4 rows peak memory 2.1 MB of 1.07 GB time per update 10 ms time in all 70 ms" in words
    assert f"A question.\n{OPEN}An answer.{CLOSE}" in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stdout.endswith("The run can begin.\n")


def test_what_is_wrong_is_listed_and_the_exit_code_is_3(tmp_path: Path) -> None:
    done = validate(tmp_path, batchsize=4)
    assert done.returncode == 3
    assert "batchsize: There is no key 'batchsize'. Did you mean batch_size?" in done.stdout
    assert done.stdout.count("trainwire config") == 1


@pytest.mark.parametrize("keys", [{}, {"batch_size": 0}], ids=["valid", "invalid"])
def test_json_is_the_result_of_the_validate_command(tmp_path: Path, keys: dict[str, Any]) -> None:
    done = validate(tmp_path, "--json", **keys)
    schema = json.loads((ROOT / "protocol" / "schema.json").read_bytes())
    result = json.loads(done.stdout)
    jsonschema.validate(result, {"$ref": "#/$defs/ValidateResult", "$defs": schema["$defs"]})
    assert result["valid"] is (done.returncode == 0) is (not keys)


def test_words_behind_the_file_win_over_it(tmp_path: Path) -> None:
    done = validate(tmp_path, "--json", "max_steps=5", max_steps=9)
    assert json.loads(done.stdout)["total_steps"] == 5


def test_a_finished_run_in_the_folder_is_a_note(tmp_path: Path) -> None:
    validate(tmp_path, max_steps=3)
    command = [sys.executable, "-m", "trainwire_worker", "run", str(tmp_path / "c.toml"), "--engine", "fake"]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=240)
    done = validate(tmp_path, max_steps=3)
    assert done.returncode == 0
    assert f"note: {tmp_path}/runs/c holds a finished run of 3 updates" in done.stdout


def test_a_run_that_is_under_way_in_the_folder_is_a_note(tmp_path: Path) -> None:
    validate(tmp_path, max_steps=10**6)
    command = [sys.executable, "-m", "trainwire_worker", "run", str(tmp_path / "c.toml"), "--engine", "fake"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert any(b'"type":"step"' in line for line in other.stdout)
        shown, told = validate(tmp_path, max_steps=10**6), validate(tmp_path, "--json", max_steps=10**6)
        other.communicate(b"STOP\n")
    assert (shown.returncode, told.returncode) == (0, 0)
    assert f"note: {tmp_path}/runs/c is busy: process {other.pid} trains there" in shown.stdout
    assert shown.stdout.endswith("The run can begin.\n")
    assert json.loads(told.stdout)["valid"]


def test_a_folder_that_holds_something_else_is_no_note(tmp_path: Path) -> None:
    (tmp_path / "novel.txt").write_text("It was a dark and stormy night.")
    done = validate(tmp_path, run_dir=str(tmp_path))
    assert done.returncode == 3
    assert "holds something else" in done.stdout


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainwire_cli", "validate", str(tmp_path / "none.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert done.stderr.startswith("trainwire: ")


RESULT: dict[str, Any] = {
    "valid": True,
    "issues": [],
    "config": {"model": "m", "method": "lora", "batch_size": 8, "micro_batch_tokens": 2048},
    "data": [
        {
            "split": "train",
            "rows_read": 12,
            "rows_used": 7,
            "rows_dropped": {"too_long": {"count": 5, "lines": ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3", "a.jsonl:4"]}},
            "tokens": 99,
            "trained_tokens": 42,
            "length_histogram": {"16": 1, "32": 6},
            "padding_fraction": 0.125,
        }
    ],
    "total_steps": 1,
    "trainable_parameters": 1,
    "total_parameters": 2,
    "estimate": {
        "peak_bytes": 3_000_000_000,
        "available_bytes": 2_000_000_000,
        "update_seconds": 1.5,
        "total_seconds": 4000.0,
        "largest_micro_batch_tokens": None,
    },
    "samples": [
        {
            "row": "a.jsonl:6",
            "tokens": 3,
            "trained_tokens": 1,
            "segments": [{"text": "Q \x1b[2J\n", "trained": False}, {"text": "A", "trained": True}],
        }
    ],
}


def test_dropped_rows_and_a_lack_of_memory_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    show(RESULT, ["a note"], colour=False)
    out = capsys.readouterr().out
    assert "train: 5 dropped, too long: a.jsonl:1, a.jsonl:2, a.jsonl:3, …" in out
    assert "3.00 GB of 2.00 GB: more than there is" in out
    assert "not even the longest row fits" in out
    assert "time in all          1:06:40" in out
    assert "note: a note\nThe run can begin, but is likely to run out of memory." in out


def test_trained_text_is_coloured_on_a_terminal_and_a_row_cannot_steer_it(capsys: pytest.CaptureFixture[str]) -> None:
    show(RESULT, [], colour=True)
    out = capsys.readouterr().out
    assert f"{TRAINED}A\x1b[0m" in out
    assert OPEN not in out
    assert "\x1b[2J" not in out
