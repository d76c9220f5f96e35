"""`trainwire demo` as a person and as a pipe see it."""

import json
import os
import pty
import shutil
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

DEMO = [sys.executable, "-m", "trainwire_cli", "demo"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Give the demo a cache folder of its own."""
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path)}


def demo(words: list[str], folder: Path, environment: dict[str, str]) -> tuple[list[dict[str, Any]], str, int]:
    """Run the demo with stdout and stderr in pipes: its events, its human text and its exit status."""
    done = subprocess.run(
        [*DEMO, *words], cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr, done.returncode


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == kind]


def test_in_a_pipe_stdout_is_the_workers_lines_and_stderr_the_story(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    events, told, status = demo(["--steps", "3"], tmp_path, environment)
    assert status == 0, told
    assert (events[0]["type"], events[-1]["type"]) == ("hello", "end")
    assert [event["step"] for event in of(events, "generation")] == [0, 0, 0, 3, 3, 3]
    assert told.index("before  ") < told.index("after   ")
    assert "mlx_lm" in told
    assert (tmp_path / "runs" / "demo" / "final" / "model.safetensors").is_file()

    again, told, status = demo(["--steps", "2"], tmp_path, environment)
    assert (status, of(again, "end")[0]["step"]) == (0, 2), told
    assert "in place of the demo before" in told
    assert of(again, "init")[0]["run_id"] != of(events, "init")[0]["run_id"]


@pytest.mark.parametrize("active", [True, False], ids=["active", "not active"])
def test_what_it_says_to_do_next_can_be_typed_there(tmp_path: Path, environment: dict[str, str], active: bool) -> None:
    here = str(Path(sys.executable).parent)
    own = {**environment, "PATH": f"{here}:/usr/bin:/bin" if active else "/usr/bin:/bin"}
    _, told, status = demo(["--steps", "1"], tmp_path, own)
    assert status == 0, told
    commands = told[told.index("Next:") :].splitlines()[1:]
    assert len(commands) == 3
    for command in commands:
        words = command.split()
        assert shutil.which(words[0], path=own["PATH"]), command
        assert words[0].startswith("/") is not active
    config = commands[2].partition(" > ")[0]
    shown = subprocess.run(config, shell=True, cwd=tmp_path, env=own, capture_output=True, text=True)
    assert "batch_size = 8" in shown.stdout, shown.stderr


def test_on_a_terminal_there_is_no_json(tmp_path: Path, environment: dict[str, str]) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 100))
    process = subprocess.Popen(
        [*DEMO, "--steps", "2", "--out", tmp_path / "here"],
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path, env=environment,
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    while True:
        try:
            piece = os.read(ours, 1 << 16)
        except OSError:  # Linux says EIO where the other end is gone.
            break
        if not piece:
            break
        seen += piece
    os.close(ours)
    assert process.wait() == 0, seen
    assert b'{"type"' not in seen
    assert b"type PAUSE" in seen
    assert b"100%" in seen
    assert (tmp_path / "here" / "events.jsonl").is_file()


def test_a_run_of_somebody_else_is_not_replaced(tmp_path: Path, environment: dict[str, str]) -> None:
    _, told, status = demo(["--steps", "1", "--out", "a"], tmp_path, environment)
    assert status == 0, told
    (tmp_path / "a.toml").unlink()
    before = (tmp_path / "a" / "events.jsonl").read_bytes()
    events, told, status = demo(["--steps", "1", "--out", "a"], tmp_path, environment)
    assert (status, events[-1]["outcome"]) == (3, "failed"), told
    assert (tmp_path / "a" / "events.jsonl").read_bytes() == before
    assert "before  " not in told


@pytest.mark.slow
def test_the_model_learns_what_it_is_asked(tmp_path: Path, environment: dict[str, str]) -> None:
    events, told, status = demo([], tmp_path, environment)
    assert status == 0, told
    losses = [event["avg_loss"] for event in of(events, "epoch_end")]
    assert losses[0] > 4
    assert losses[-1] < 0.5
    valid = [event["valid_loss"] for event in of(events, "eval_end")]
    assert valid[0] > 6.5
    assert valid[-1] < 1.5
    last = of(events, "complete")[0]["total_steps"]
    answers = [event["completion"] for event in of(events, "generation") if event["step"] == last]
    assert "Type PAUSE and press enter." in answers
    assert "Exit code 0: the run completed, or a client stopped it." in answers
    assert all(f"after   {answer}" in told for answer in answers)
