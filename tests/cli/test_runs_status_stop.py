"""`trainwire runs`, `status` and `stop`: what another shell sees of a run, and how it ends it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainwire_client import NoWorker, attach
from trainwire_protocol.rundir import LockInfo

ENVIRONMENT = {**os.environ, "PYTHONSAFEPATH": "1"}


def trainwire(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainwire_cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=240)


def start(folder: Path, script: dict[str, object]) -> subprocess.Popen[bytes]:
    """Start a scripted run in `folder/runs/c`."""
    (folder / "c.toml").write_text('model = "m/m"\ndata = "d/d"\n')
    (folder / "script.json").write_text(json.dumps(script))
    command = [sys.executable, "-m", "trainwire_cli", "run", str(folder / "c.toml"), "--engine", "fake"]
    command += ["--script", str(folder / "script.json")]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=ENVIRONMENT
    )


def read_until(process: subprocess.Popen[bytes], kind: str, **fields: object) -> None:
    """Read lines until an event with these fields."""
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["type"] == kind and all(event[k] == v for k, v in fields.items()):
            return
    pytest.fail(f"no {kind} event with {fields}")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run that stands at step 2 until it is stopped."""
    process = start(tmp_path, {"acts": [{"do": "hang", "step": 3}]})
    read_until(process, "step", step=2)
    yield process
    process.kill()
    process.communicate()


def test_a_living_run_is_seen_and_stopped_from_another_shell(running: subprocess.Popen[bytes], tmp_path: Path) -> None:
    seen = json.loads(trainwire("status", tmp_path / "runs/c", "--json").stdout)
    assert (seen["alive"], seen["state"], seen["pid"], seen["step"]) == (True, "running", running.pid, 2)
    listed = trainwire("runs", tmp_path / "runs").stdout.splitlines()
    assert listed[1].split()[:4] == ["c", "running", f"({running.pid})", "2/20"]


def test_stop_waits_for_the_checkpoint_and_names_it(tmp_path: Path) -> None:
    process = start(tmp_path, {"acts": [{"do": "await_order", "step": 3}]})
    read_until(process, "step", step=2)
    stopped = trainwire("stop", tmp_path / "runs/c")
    assert stopped.returncode == 0, stopped.stderr
    step = int(stopped.stdout.split()[3].rstrip(":"))
    checkpoint = tmp_path / f"runs/c/checkpoint-{step:06d}"
    assert str(checkpoint) in stopped.stdout
    assert (checkpoint / "manifest.json").is_file()
    process.communicate(timeout=90)
    assert process.returncode == 0
    again = trainwire("stop", tmp_path / "runs/c")
    assert again.returncode == 3
    assert "no living worker: it is stopped" in again.stderr
    text = trainwire("status", tmp_path / "runs/c")
    assert text.returncode == 0
    assert f"step        {step} of 20" in text.stdout


def test_a_worker_that_was_killed_is_shown_as_dead(running: subprocess.Popen[bytes], tmp_path: Path) -> None:
    lock = json.loads((tmp_path / "runs/c/run.lock").read_bytes())
    os.kill(lock["engine_pid"], 9)
    read_until(running, "end", outcome="failed")
    running.wait(90)
    seen = trainwire("status", tmp_path / "runs/c")
    assert seen.returncode == 1
    assert "state       failed" in seen.stdout
    assert "SIGKILL" in seen.stdout
    log = tmp_path / "runs/c/events.jsonl"
    log.write_bytes(b"".join(x for x in log.read_bytes().splitlines(keepends=True) if b'"type":"end"' not in x))
    dead = json.loads(trainwire("status", tmp_path / "runs/c", "--json").stdout)
    assert (dead["alive"], dead["state"]) == (False, "died")


def test_an_engine_that_a_killed_worker_left_behind_is_named_with_what_to_do(
    running: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    run_dir = tmp_path / "runs/c"
    engine = json.loads((run_dir / "run.lock").read_bytes())["engine_pid"]
    running.kill()
    running.wait(90)
    try:
        seen = json.loads(trainwire("status", run_dir, "--json").stdout)
        assert (seen["alive"], seen["state"], seen["pid"], seen["orphan_pid"]) == (False, "died", None, engine)
        assert f"kill -9 {engine}" in trainwire("status", run_dir).stdout
        assert f"died (engine {engine} saves)" in trainwire("runs", tmp_path / "runs").stdout
        stopped = trainwire("stop", run_dir)
        assert (stopped.returncode, stopped.stdout) == (3, "")
        assert f"process {engine}, saves and leaves by itself" in stopped.stderr
        with attach(run_dir) as run, pytest.raises(NoWorker, match=rf"left behind \(pid {engine}\) saves"):
            run.stop()
    finally:
        os.kill(engine, signal.SIGKILL)
    with (run_dir / "run.lock").open() as lock:
        # It is free once the engine is gone.
        fcntl.flock(lock, fcntl.LOCK_SH)
    assert "it is dead." in trainwire("stop", run_dir).stderr
    assert json.loads(trainwire("status", run_dir, "--json").stdout)["orphan_pid"] is None


def test_a_living_worker_that_cannot_be_reached_is_ended_by_a_signal(
    running: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    Path(json.loads((tmp_path / "runs/c/run.lock").read_bytes())["socket"]).unlink()
    refused = trainwire("stop", tmp_path / "runs/c")
    assert refused.returncode == 1
    assert f"`kill {running.pid}` stops the run" in refused.stderr


def test_a_process_of_another_machine_is_not_taken_for_dead() -> None:
    assert not LockInfo(pid=2**22 + 1, since_ms=0, host="elsewhere").orphan
    assert LockInfo(pid=2**22 + 1, since_ms=0, host=os.uname().nodename).orphan
    assert not LockInfo(pid=os.getpid(), since_ms=0).orphan


def test_a_run_that_goes_on_from_an_earlier_step_shows_no_loss_of_what_is_void(tmp_path: Path) -> None:
    attempt = {"type": "attempt", "run_id": "r", "attempt": 1, "protocol": 1, "worker": "0", "pid": 1}
    events = [
        attempt,
        {"type": "init", "total_steps": 9},
        {"type": "step", "step": 1, "loss": 3.0},
        {"type": "eval_end", "step": 1, "valid_loss": 2.5},
        {"type": "eval_end", "step": 1, "valid_loss": 0.5, "cause": 7},
        {"type": "step", "step": 2, "loss": 9.0},
        {"type": "eval_end", "step": 2, "valid_loss": 8.5},
        {**attempt, "attempt": 2, "resumed_from_step": 1},
    ]
    numbered = ({"type": e["type"], "seq": i, "ts": 1, **e} for i, e in enumerate(events, 1))
    lines = [json.dumps(event, separators=(",", ":")) for event in numbered]
    (tmp_path / "events.jsonl").write_text("".join(line + "\n" for line in lines))
    seen = json.loads(trainwire("status", tmp_path, "--json").stdout)
    assert (seen["step"], seen["loss"], seen["valid_loss"]) == (1, 3.0, 2.5)


def test_a_list_of_runs_stands_in_columns_whatever_their_names(tmp_path: Path) -> None:
    for name in ("日本", "plain", "evil\x1b[2J"):
        (tmp_path / name).mkdir()
        attempt = '{"type":"attempt","seq":1,"ts":1,"run_id":"r","attempt":1,"protocol":1,"worker":"0","pid":1}'
        (tmp_path / name / "events.jsonl").write_text(attempt + "\n")
    lines = trainwire("runs", tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["evil\ufffd[2J", "plain", "日本"]
    before = [line[: line.index("died")] for line in lines[1:]]
    assert [len(text) + text.count("日") + text.count("本") for text in before] == [lines[0].index("STATE")] * 3


def test_a_folder_without_a_run_says_so(tmp_path: Path) -> None:
    assert trainwire("status", tmp_path).returncode == 3
    assert trainwire("stop", tmp_path).returncode == 3
    assert "no runs" in trainwire("runs", tmp_path).stdout
    assert trainwire("runs", tmp_path / "nowhere").returncode == 3


@pytest.mark.parametrize(
    "command", [["status"], ["stop"], ["report"], ["plot", "-o", "x.svg"], ["track", "--tracker", "x"]]
)
@pytest.mark.parametrize("kind", ["missing", "a file", "foreign", "not a log", "half a line"])
def test_a_place_without_a_run_is_refused_in_a_sentence(tmp_path: Path, command: list[str], kind: str) -> None:
    place = tmp_path / "place"
    if kind == "a file":
        place.write_text("text")
    elif kind != "missing":
        place.mkdir()
        log = {"not a log": b"\x00\xff{\n[1]\nnull\n", "half a line": b'{"type":"attempt","seq":1,"run_i'}
        (place / ("notes.txt" if kind == "foreign" else "events.jsonl")).write_bytes(log.get(kind, b""))
    done = trainwire(command[0], place, *command[1:])
    # A tracker may come before the first line is whole; this one does not exist.
    has_log = kind in ("not a log", "half a line")
    assert done.returncode == (4 if command[0] == "track" and has_log else 3)
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("trainwire: ")
