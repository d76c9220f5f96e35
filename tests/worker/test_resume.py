"""The run folder: lock, log repair, resume in each of its ways, and what is refused without a trace."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from worker_driver import Spawn, Worker, base_config, is_gone, killed_at_the_end, read_log, wait_until, write_toml

from trainwire_worker.options import Options, parse
from trainwire_worker.request import request_from_arguments

LONG = {"max_steps": 100_000}


HANGING = {"acts": [{"do": "log", "step": 3, "message": "hanging"}, {"do": "hang", "step": 3}]}
"""A script whose engine says that it hangs, and looks at its channel no more."""
UNTIL_AN_ORDER = {"acts": [{"do": "await_order", "at": "boundary", "step": 7, "attempt": 1}]}
"""A script whose first engine goes no further than update 7 without an order."""


def refused(worker: Worker, code: str, status: int = 3) -> dict[str, Any]:
    """Check a run that was refused, and give the error."""
    end = worker.finish()
    error = worker.of("error")[0]
    assert (error["code"], end["reason"], end["exit_code"], end["outcome"]) == (code, code, status, "failed")
    assert error["message"].endswith(".")
    assert error["hint"]
    return error


def stopped_at_ten(run: Spawn) -> Worker:
    """Leave a run with checkpoints 5 and 10 behind, killed at its update 12."""
    worker = run(script={"acts": [{"do": "exit", "step": 12}]}, config={"max_steps": 20})
    worker.finish()
    return worker


def snapshot(folder: Path) -> dict[str, bytes]:
    """Give every file below a folder, but for the lock, with its content."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "run.lock"
    }


def test_a_second_worker_gets_busy_with_pid_since_and_phase(run: Spawn) -> None:
    first = run(config=LONG)
    first.wait("step")
    second = run(config=LONG)
    error = refused(second, "busy")
    assert (error["details"]["pid"], error["details"]["phase"]) == (first.pid, "running")
    assert error["details"]["since"] > 1_600_000_000_000
    assert str(first.pid) in error["message"]
    assert all("seq" not in line for line in second.lines)
    first.process.terminate()
    first.finish()


def test_a_holder_that_says_nothing_of_itself_is_busy_too(run: Spawn, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / "run.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        error = refused(run(config=LONG), "busy")
    assert error["message"] == f"Another process holds the run folder {tmp_path / 'run'}."


def test_busy_answers_start(serve: Spawn) -> None:
    first = serve(config=LONG)
    first.begin()
    second = serve(config=LONG)
    assert second.start()["error"]["code"] == "busy"
    assert second.finish()["exit_code"] == 3
    first.send("stop")
    first.finish()


def test_an_orphan_that_still_saves_is_waited_for(run: Spawn) -> None:
    first = run(config=LONG | {"save_every": 0})
    first.wait("step")
    engine = first.engine_pid()
    with killed_at_the_end(lambda: engine):
        first.hold_engine()
        first.process.kill()
        second = run(config=LONG)
        log = second.wait("log")
        assert "still saving" in log["message"]
        os.kill(engine, signal.SIGCONT)
        attempt = second.wait("attempt")
        assert attempt["resumed_from_step"] >= 1
        assert is_gone(engine)
        second.process.terminate()
        second.finish()


def test_an_orphan_that_does_not_leave_makes_the_folder_busy(run: Spawn) -> None:
    first = run(script=HANGING, config=LONG)
    first.wait("log", message="hanging")
    engine = first.engine_pid()
    with killed_at_the_end(lambda: engine):
        first.process.kill()
        second = run("--lock-wait", "0.2", config=LONG)
        error = refused(second, "busy")
        assert str(engine) in error["hint"]


def test_a_signal_ends_the_wait_for_an_orphan(run: Spawn) -> None:
    first = run(script=HANGING, config=LONG)
    first.wait("log", message="hanging")
    engine = first.engine_pid()
    with killed_at_the_end(lambda: engine):
        first.process.kill()
        second = run(config=LONG)
        second.wait("log")
        second.process.terminate()
        assert second.finish()["exit_code"] == 21


def test_auto_goes_on_from_the_newest_checkpoint_in_the_same_log(run: Spawn) -> None:
    first = stopped_at_ten(run)
    second = run(config={"max_steps": 20})
    end = second.finish()
    assert (end["outcome"], end["step"]) == ("completed", 20)
    attempt = second.of("attempt")[0]
    assert (attempt["attempt"], attempt["resumed_from_step"]) == (2, 10)
    assert attempt["resumed_from"] == str(first.run_dir / "checkpoint-000010")
    assert attempt["run_id"] == first.of("attempt")[0]["run_id"]
    assert second.of("init")[0]["start_step"] == 10
    assert attempt["seq"] == first.lines[-1]["seq"] + 1
    assert len(second.log()) == second.lines[-1]["seq"]


def test_auto_without_a_checkpoint_begins_again_in_the_same_log(run: Spawn) -> None:
    first = run(script={"acts": [{"do": "exit", "step": 3}]}, config={"max_steps": 20})
    first.finish()
    second = run(config={"max_steps": 20})
    assert second.finish()["outcome"] == "completed"
    attempt = second.of("attempt")[0]
    assert attempt["attempt"] == 2
    assert "resumed_from" not in attempt


def test_latest_refuses_a_folder_without_a_checkpoint(run: Spawn) -> None:
    refused(run("--resume", "latest", config={"max_steps": 20}), "resume_refused")


def test_never_refuses_a_folder_that_holds_a_run_and_writes_nothing(run: Spawn) -> None:
    first = stopped_at_ten(run)
    before = snapshot(first.run_dir)
    error = refused(run("resume=never", config={"max_steps": 20}), "resume_refused")
    assert "--overwrite" in error["hint"]
    assert snapshot(first.run_dir) == before


def test_overwrite_with_never_removes_the_run_and_nothing_else(run: Spawn) -> None:
    first = stopped_at_ten(run)
    (first.run_dir / "notes.txt").write_text("mine")
    (first.run_dir / "folder").mkdir()
    second = run("--resume", "never", "--overwrite", config={"max_steps": 3, "save_every": 0})
    assert second.finish()["outcome"] == "completed"
    assert second.of("attempt")[0]["attempt"] == 1
    assert second.of("attempt")[0]["run_id"] != first.of("attempt")[0]["run_id"]
    names = {path.name for path in first.run_dir.iterdir()}
    assert names == {"notes.txt", "folder", "events.jsonl", "run.lock", "config.json", "final"}
    assert read_log(first.run_dir)[0]["type"] == "attempt"


def test_overwrite_alone_changes_nothing(run: Spawn) -> None:
    stopped_at_ten(run)
    second = run("--overwrite", config={"max_steps": 20})
    second.finish()
    assert second.of("attempt")[0]["resumed_from_step"] == 10


def test_a_path_names_the_checkpoint_to_go_on_from_and_the_abandoned_ones_move_aside(run: Spawn) -> None:
    first = stopped_at_ten(run)
    second = run("--resume", str(first.run_dir / "checkpoint-000005"), config={"max_steps": 20})
    second.finish()
    assert second.of("attempt")[0]["resumed_from_step"] == 5
    moved = [path.name for path in (first.run_dir / "abandoned").iterdir()]
    assert any(name.startswith("checkpoint-000010") for name in moved)


@pytest.mark.parametrize("what", ["missing", "not whole", "a file"])
def test_a_path_that_is_no_whole_checkpoint_is_refused(run: Spawn, what: str) -> None:
    first = stopped_at_ten(run)
    folder = first.run_dir / "checkpoint-000005"
    if what == "missing":
        folder = first.run_dir / "checkpoint-000007"
    elif what == "a file":
        folder = first.run_dir / "config.json"
    else:
        (folder / "adapters.safetensors").write_bytes(b"")
    refused(run("--resume", str(folder), config={"max_steps": 20}), "resume_refused")


@pytest.mark.parametrize("damage", ["hash", "size", "missing file", "manifest"])
def test_a_broken_checkpoint_is_passed_over_by_name(run: Spawn, damage: str) -> None:
    first = stopped_at_ten(run)
    newest = first.run_dir / "checkpoint-000010"
    weights = newest / "adapters.safetensors"
    if damage == "hash":
        weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    elif damage == "size":
        weights.write_bytes(weights.read_bytes() + b"x")
    elif damage == "missing file":
        weights.unlink()
    else:
        (newest / "manifest.json").write_text("{")
    second = run(config={"max_steps": 20})
    assert second.finish()["outcome"] == "completed"
    assert second.of("attempt")[0]["resumed_from_step"] == 5
    named = [line for line in second.of("log") if line.get("code") == "checkpoint_broken"]
    if damage == "manifest":
        assert not named, "a folder without a manifest was never whole"
    else:
        assert [line["details"]["path"] for line in named] == [str(newest)]


def test_a_finished_run_is_refused_until_its_end_is_moved(run: Spawn) -> None:
    first = run(config={"max_steps": 10})
    first.finish()
    before = snapshot(first.run_dir)
    error = refused(run(config={"max_steps": 10}), "resume_refused")
    assert "max_steps" in error["hint"]
    assert snapshot(first.run_dir) == before
    more = run(config={"max_steps": 15})
    assert more.finish()["step"] == 15
    assert more.of("attempt")[0]["resumed_from_step"] == 10


def test_a_folder_that_holds_something_else_is_refused_untouched(run: Spawn, tmp_path: Path) -> None:
    folder = tmp_path / "holiday"
    folder.mkdir()
    (folder / "photo.jpg").write_bytes(b"x")
    error = refused(run(config={"run_dir": str(folder)}), "resume_refused")
    assert "photo.jpg" in error["message"]
    assert [path.name for path in folder.iterdir()] == ["photo.jpg"]


def test_a_run_dir_that_is_a_file_or_lies_below_one_is_refused(run: Spawn, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    refused(run(config={"run_dir": str(tmp_path / "file")}), "resume_refused")
    worker = run(config={"run_dir": str(tmp_path / "file" / "below")})
    end = worker.finish()
    assert (worker.of("error")[0]["code"], end["exit_code"]) == ("io_error", 7)


def test_the_folder_of_another_run_is_refused_even_without_a_checkpoint(run: Spawn) -> None:
    first = run(script={"acts": [{"do": "exit", "step": 2}]}, config={"max_steps": 20})
    first.finish()
    error = refused(run(config={"max_steps": 20, "lora_rank": 7}), "resume_refused")
    assert "lora_rank" in error["message"]


def test_resume_arguments_go_on_with_the_run_whatever_its_config_says(run: Spawn) -> None:
    worker = run("max_steps=30", "--offline", script=UNTIL_AN_ORDER, config={"max_steps": 20, "resume": "never"})
    worker.wait("checkpoint")
    worker.process.terminate()
    arguments = worker.finish()["resume_args"]
    assert arguments[:2] == ["run", str(worker.folder / "config.toml")]
    assert {"max_steps=30", "--offline", "resume=auto"} <= set(arguments)
    done = subprocess.run(
        [sys.executable, "-m", "trainwire_worker", *arguments],
        capture_output=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    assert read_log(worker.run_dir)[-1]["step"] == 30


@pytest.mark.parametrize(
    ("raised", "end"),
    [
        ({"early_stopping_patience": 2}, ("early_stopping", 6)),
        ({"early_stopping_patience": 0}, ("finished", 20)),
        ({"max_steps": 30}, ("early_stopping", 6)),
    ],
)
def test_a_run_that_was_stopped_early_goes_on_once_its_patience_or_its_end_is_raised(
    run: Spawn, raised: dict[str, int], end: tuple[str, int]
) -> None:
    script = {"valid_examples": 4, "valid_loss": [1.0, 2.0, 3.0, 4.0]}
    config = {"max_steps": 20, "eval_every": 2, "early_stopping_patience": 1}
    first = run(script=script, config=config).finish()
    assert (first["reason"], first["step"]) == ("early_stopping", 4)
    again = run(script=script, config=config)
    error = refused(again, "resume_refused")
    assert "was stopped early" in error["message"]
    assert "early_stopping_patience (it is 1)" in error["hint"]
    last = run(script=script, config=config | raised).finish()
    assert (last["reason"], last["step"]) == end


SAME = {
    "--engine": "fake",
    "--script": "{folder}/script.json",
    "--blas": "none",
    "--profile": "3",
    "--restarts": "2",
    "--tracker": "json:JSONEncoder",
    "--ranks": "2",
    "--hostfile": "{folder}/hosts.json",
    "--backend": "ring",
    "--rank-timeout": "7.5",
    "--root": "{folder}",
    "--offline": None,
    "--trust-remote-code": None,
    "--linger": None,
    "--on-eof": "stop",
    "--on-detach": "continue",
    "--signal-grace": "3",
    "--stop-grace": "4",
    "--exit-grace": "20",
    "--lock-wait": "0",
    "--max-line": "30000",
}
OF_ONE_PROCESS = {
    "--overwrite": None,
    "--resume": "never",
    "--parent-pid": "1",
    "--parent-poll": "0.1",
    "--heartbeat": "1",
    "--backpressure": "block",
    "--dialect": "mlx-tui",
    "--progress": "off",
    "--clock": "scripted",
    "--flush-grace": "1",
}


def test_a_key_behind_the_word_resume_is_a_key() -> None:
    options = parse(["run", "c.toml", "a=1", "--resume", "max_steps=40", "b=2"], {})
    assert (options.resume, sorted(options.assignments)) == ("auto", ["a=1", "b=2", "max_steps=40"])
    assert parse(["run", "c.toml", "--resume", "runs/a=1/checkpoint-000004"], {}).resume == "runs/a=1/checkpoint-000004"


def test_each_option_of_the_run_is_in_its_resume_arguments_and_none_of_its_process(tmp_path: Path) -> None:
    for name in ("script.json", "hosts.json"):
        (tmp_path / name).write_text("{}")
    config = write_toml(tmp_path / "config.toml", base_config(tmp_path))
    every = {f"--{name.replace('_', '-')}" for name in Options.__struct_fields__}
    assert every - {"--mode", "--config", "--assignments"} == SAME.keys() | OF_ONE_PROCESS.keys()
    scripted = {"--engine", "--script"}
    for left_out in (scripted | {"--hostfile"}, scripted | {"--ranks"}, {"--ranks", "--hostfile", "--backend"}):
        chosen = {name: value for name, value in SAME.items() if name not in left_out}
        same = [word.format(folder=tmp_path) for pair in chosen.items() for word in pair if word]
        words = ["run", str(config), *same, *(word for pair in OF_ONE_PROCESS.items() for word in pair if word)]
        again = request_from_arguments(parse(words, {})).resume_args
        assert again[:3] == ["run", str(config), "resume=auto"]
        first, second = parse(["run", str(config), "resume=auto", *same], {}), parse(again, {})
        assert first == second


def test_resume_arguments_of_a_served_run_name_the_copy_of_its_config(serve: Spawn) -> None:
    worker = serve(script=UNTIL_AN_ORDER, config={"max_steps": 30})
    worker.begin()
    worker.send("stop")
    arguments = worker.finish()["resume_args"]
    assert arguments[:2] == ["run", str(worker.run_dir / "config.json")]
    shutil.move(worker.folder / "train.jsonl", worker.folder / "elsewhere")
    command = [sys.executable, "-m", "trainwire_worker", *arguments]
    done = subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr


def test_a_torn_last_line_is_cut_and_told(run: Spawn) -> None:
    first = stopped_at_ten(run)
    last = len(read_log(first.run_dir))
    with (first.run_dir / "events.jsonl").open("ab") as log:
        log.write(b'{"type":"step","seq":99,"los')
    second = run(config={"max_steps": 20})
    second.finish()
    told = [line for line in second.of("log") if line.get("code") == "log_repaired"]
    assert [line["details"]["bytes"] for line in told] == [28]
    assert second.of("attempt")[0]["seq"] == last + 1
    second.log()


def test_a_log_that_cannot_be_opened_ends_the_start(run: Spawn, tmp_path: Path) -> None:
    (tmp_path / "run" / "events.jsonl").mkdir(parents=True)
    worker = run(config={"max_steps": 20})
    end = worker.finish()
    assert (worker.of("error")[0]["code"], end["exit_code"]) == ("log_unavailable", 7)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_degrades_the_log_and_the_run_goes_on_until_there_is_room(serve: Spawn, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        config = LONG | {"run_dir": str(disk / "run"), "save_every": 0}
        worker = serve(config=config, script={"acts": [{"do": "flood", "step": 3, "events": 6000}]})
        worker.begin()
        worker.wait("log", code="log_degraded")
        worker.wait("step")
        assert worker.result("replay", types=["attempt"])["count"] == 1
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        recovered = worker.wait("log", code="log_recovered")
        assert recovered["level"] == "info"
        worker.send("stop")
        worker.finish()
        logged = worker.log()
        assert sum(line["type"] == "log" for line in logged) >= 6000
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_step_is_in_the_log_before_it_is_on_the_wire(run: Spawn) -> None:
    worker = run(config={"max_steps": 30})
    for _ in range(10):
        seq = worker.wait("step")["seq"]
        raw = (worker.run_dir / "events.jsonl").read_bytes()
        assert f'"seq":{seq},'.encode() in raw
    worker.finish()


def test_the_history_of_a_checkpoint_completes_a_log_that_a_killed_worker_left(run: Spawn) -> None:
    first = run(script={"step_ms": 1}, config=LONG | {"save_every": 0})
    first.wait("step", step=20)
    engine = first.engine_pid()
    with killed_at_the_end(lambda: engine):
        os.kill(engine, signal.SIGSTOP)
        first.process.kill()
        first.process.wait()
        path = first.run_dir / "events.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        ninth = next(n for n, line in enumerate(lines) if b'"step":9,' in line)
        path.write_bytes(b"".join(lines[:ninth]))
        os.kill(engine, signal.SIGCONT)
        wait_until(lambda: is_gone(engine), "the engine saves and leaves")
    second = run(config=LONG)
    start = second.wait("attempt")["resumed_from_step"]
    assert start >= 20
    second.wait("step", step=start + 1)
    second.process.terminate()
    second.finish()
    steps = [line["step"] for line in second.log() if line["type"] == "step"]
    assert steps[: start + 1] == list(range(1, start + 2))
