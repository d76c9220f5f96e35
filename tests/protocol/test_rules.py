"""Rules of PROTOCOL.md that only a whole worker can show, with the scripted engine."""

import hashlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trainwire_protocol import rundir
from trainwire_protocol.conformance import violations

PATIENCE = 90.0
Line = dict[str, Any]
AT_3 = {"do": "await_order", "at": "boundary", "step": 3}
LONG = {"examples": 80_000_000, "step_ms": 5, "clock": "real"}


@pytest.fixture
def shop(recorder: ModuleType, tmp_path: Path) -> Any:
    """A folder with a config, in which workers run; the config's run folder is `run_dir`."""
    shop = recorder.Workshop(tmp_path)
    shop.run_dir = tmp_path / "runs" / "config"
    return shop


@pytest.fixture
def run(shop: Any) -> Iterator[Callable[..., Any]]:
    """Start `trainwire run`: `run(*words, script=…)`."""
    yield from _starter(shop, "run", "config.toml")


@pytest.fixture
def serve(shop: Any) -> Iterator[Callable[..., Any]]:
    """Start `trainwire serve`: `serve(*words, script=…)`."""
    yield from _starter(shop, "serve")


def _starter(shop: Any, *mode: str) -> Iterator[Callable[..., Any]]:
    open_ones = []

    def start(*words: str, **options: Any) -> Any:
        manager = shop.worker(*mode, *words, **options)
        open_ones.append(manager)
        return manager.__enter__()

    yield start
    for manager in open_ones:
        manager.__exit__(None, None, None)


def lines_of(session: Any) -> list[Line]:
    """Read to the end: every line of the session, checked against the rules."""
    code = session.end()
    assert violations(line + b"\n" for line in session.raw) == []
    lines = [json.loads(line) for line in session.raw]
    assert lines[-1]["exit_code"] == code
    return lines


def begin(session: Any, recorder: ModuleType, **config: Any) -> None:
    session.send({"id": "begin", "cmd": "start", "config": {**recorder.CONFIG, "run_dir": "runs/config", **config}})


def log_of(shop: Any) -> list[Line]:
    return [json.loads(line) for line in (shop.run_dir / rundir.LOG_NAME).read_bytes().splitlines()]


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@contextmanager
def engine_held(shop: Any) -> Iterator[None]:
    """Keep the engine from doing anything, as in a very long update."""
    holder = rundir.lock_holder(shop.run_dir)
    assert holder is not None
    assert holder.engine_pid is not None
    os.kill(holder.engine_pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(holder.engine_pid, signal.SIGCONT)


def only(lines: list[Line], kind: str) -> list[Line]:
    return [line for line in lines if line["type"] == kind]


# Framing and life


@pytest.mark.skipif(not hasattr(socket, "SOCK_SEQPACKET") or sys.platform == "darwin", reason="no packets here")
def test_each_line_is_one_write(shop: Any) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "trainwire_worker", "run", "config.toml", "--engine", "fake"]
    with ours, subprocess.Popen(command, cwd=shop.folder, stdin=subprocess.DEVNULL, stdout=theirs) as process:
        theirs.close()
        packets = list(iter(lambda: ours.recv(1 << 17), b""))
        assert process.wait(PATIENCE) == 0
    assert len(packets) > 40
    assert all(packet.count(b"\n") == 1 and packet.endswith(b"\n") for packet in packets)


def test_nothing_but_lines_reaches_stdout(run: Any) -> None:
    acts = [{"do": "print", "step": n, "by": by, "text": "{}"} for n, by in enumerate(("python", "c", "child"), 1)]
    assert only(lines_of(run(script={"acts": acts})), "complete")


def test_wrong_arguments_leave_with_2_and_print_nothing(shop: Any) -> None:
    for words in ([], ["run"], ["serve", "--nothing"], ["run", "config.toml", "--heartbeat", "soon"]):
        command = [sys.executable, "-m", "trainwire_worker", *words]
        done = subprocess.run(command, cwd=shop.folder, capture_output=True, stdin=subprocess.DEVNULL, check=False)
        assert (done.returncode, done.stdout) == (2, b"")
        assert b"usage" in done.stderr


def test_a_validation_names_every_issue_and_writes_nothing(serve: Any, shop: Any, recorder: ModuleType) -> None:
    session = serve()
    refused = session.ask(1, "validate", config={**recorder.CONFIG, "batchsize": 1, "seed": -1})
    assert [issue["path"] for issue in refused["result"]["issues"]] == ["batchsize", "seed"]
    assert session.ask(2, "validate", config=recorder.CONFIG)["result"]["valid"] is True
    assert session.ask(3, "status")["result"]["phase"] == "idle"
    session.close_input()
    assert lines_of(session)[-1]["outcome"] == "stopped"
    assert not (shop.folder / "runs").exists()


def test_a_start_that_fails_is_answered_with_the_error_that_ends_the_process(serve: Any, recorder: ModuleType) -> None:
    session = serve()
    begin(session, recorder, batchsize=3)
    lines = lines_of(session)
    response = only(lines, "response")[0]
    assert (response["id"], response["ok"]) == ("begin", False)
    assert response["error"]["code"] == only(lines, "error")[0]["code"] == lines[-1]["reason"] == "config_invalid"


@pytest.mark.parametrize("moment", [{"at": "load"}, {"step": 2}])
def test_questions_are_answered_at_once_also_while_the_engine_is_busy(moment: Line, run: Any) -> None:
    session = run(script={"acts": [{"do": "log", "message": "hanging", **moment}, {"do": "hang", **moment}]})
    session.until("log", message="hanging")
    session.send({"id": 0, "cmd": "pause"})
    for number, cmd in enumerate(("ping", "status", "replay", "detach"), 1):
        assert session.ask(number, cmd)["ok"] is True
    assert 0 in session.ask(9, "status")["result"]["open_ids"]


def test_a_lingering_run_ends_with_the_end_of_input(run: Any) -> None:
    session = run("--linger")
    session.until("complete")
    assert session.ask(1, "generate", prompt="p")["ok"] is True
    session.close_input()
    end = lines_of(session)[-1]
    assert (end["outcome"], end["exit_code"]) == ("completed", 0)


def test_a_checkpoint_that_is_said_is_whole(run: Any) -> None:
    session = run(script={"valid_examples": 8})
    for line in session.lines():
        if line["type"] == "checkpoint":
            assert rundir.defect(Path(line["path"])) is None
    assert session.process.wait(PATIENCE) == 0
    last = json.loads(session.raw[-1])
    assert Path(last["checkpoint"]).name == "final"


def test_an_end_inside_an_epoch_is_the_epoch_s_end_too(shop: Any, run: Any) -> None:
    shop.write(max_steps=8)
    lines = lines_of(run())
    assert [(line["epoch"], line["updates"]) for line in only(lines, "epoch_end")] == [(1, 6), (2, 2)]


# The log


def test_a_line_is_in_the_log_before_it_is_printed(shop: Any, run: Any) -> None:
    session = run(script={"step_ms": 0, "clock": "real", "examples": 400})
    log = shop.run_dir / rundir.LOG_NAME
    for line in session.lines():
        if "seq" in line:
            assert session.raw[-1] + b"\n" in log.read_bytes()


def test_seq_has_no_hole_and_goes_on_when_the_run_is_resumed(shop: Any, run: Any) -> None:
    first = run(script={"acts": [AT_3]})
    first.until("step", step=3)
    first.send("STOP")
    lines_of(first)
    second = lines_of(run())
    attempt = only(second, "attempt")[0]
    assert (attempt["attempt"], attempt["resumed_from_step"]) == (2, 3)
    assert only(second, "step")[0]["step"] == 4
    assert [line["seq"] for line in log_of(shop)] == list(range(1, len(log_of(shop)) + 1))


def test_a_torn_last_line_of_the_log_is_cut_and_reported(shop: Any, run: Any) -> None:
    lines_of(run())
    shop.write(num_epochs=3)
    with (shop.run_dir / rundir.LOG_NAME).open("ab") as log:
        log.write(b'{"type":"step","seq":99')
    repaired = next(line for line in lines_of(run()) if line.get("code") == "log_repaired")
    assert repaired["details"]["bytes"] == 23
    assert log_of(shop)[-1]["type"] == "end"


def test_a_resumed_run_adds_the_updates_that_its_log_lacks(shop: Any, run: Any) -> None:
    session = run(script={"acts": [AT_3]})
    session.until("step", step=3)
    session.send("STOP")
    lines_of(session)
    log = shop.run_dir / rundir.LOG_NAME
    kept = [line for line in log.read_bytes().splitlines(keepends=True) if b'"step":2,' not in line]
    cut = next(n for n, line in enumerate(kept) if b'"step":3,' in line)
    log.write_bytes(b"".join(kept[:cut]))
    lines = lines_of(run())
    assert [line["step"] for line in only(lines, "step")][:3] == [2, 3, 4]


def test_a_second_worker_is_told_who_holds_the_run(shop: Any, run: Any) -> None:
    first = run(script=LONG)
    first.until("step", step=1)
    lines = lines_of(run())
    error = only(lines, "error")[0]
    assert (error["code"], lines[-1]["exit_code"]) == ("busy", 3)
    assert error["details"]["pid"] == first.process.pid
    first.send("STOP")
    lines_of(first)


def test_the_lock_file_says_who_holds_the_run_and_where_it_listens(shop: Any, run: Any) -> None:
    session = run(script=LONG)
    attempt = session.until("attempt")
    session.until("step", step=1)
    told = json.loads((shop.run_dir / rundir.LOCK_NAME).read_bytes())
    assert (told["pid"], told["run_id"], told["phase"]) == (session.process.pid, attempt["run_id"], "running")
    assert stat.S_ISSOCK(Path(told["socket"]).stat().st_mode)
    os.kill(told["engine_pid"], 0)
    assert isinstance(told["since_ms"], int)
    assert told["host"] == os.uname().nodename
    session.send("STOP")
    lines_of(session)


def test_a_checkpoint_lists_its_files_with_their_sizes_and_hashes(run: Any) -> None:
    folder = Path(lines_of(run())[-1]["checkpoint"])
    told = json.loads((folder / rundir.MANIFEST_NAME).read_bytes())
    assert (told["step"], told["kind"]) == (12, "final")
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != rundir.MANIFEST_NAME}
    assert told["files"] == {
        name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()
    }


def test_a_folder_that_holds_something_else_or_a_finished_run_is_left_alone(shop: Any, run: Any) -> None:
    shop.run_dir.mkdir(parents=True)
    (shop.run_dir / "thesis.txt").write_text("precious")
    lines = lines_of(run())
    assert (only(lines, "error")[0]["code"], lines[-1]["exit_code"]) == ("resume_refused", 3)
    assert [entry.name for entry in shop.run_dir.iterdir()] == ["thesis.txt"]
    (shop.run_dir / "thesis.txt").unlink()
    lines_of(run())
    before = {p: p.read_bytes() for p in shop.run_dir.rglob("*") if p.is_file() and p.name != rundir.LOCK_NAME}
    assert only(lines_of(run()), "error")[0]["code"] == "resume_refused"
    assert {p: p.read_bytes() for p in shop.run_dir.rglob("*") if p.is_file() and p.name != rundir.LOCK_NAME} == before


def test_a_checkpoint_that_is_not_whole_is_passed_over_and_named(shop: Any, run: Any) -> None:
    session = run(script={"acts": [{"do": "await_order", "at": "boundary", "step": 7}]})
    session.until("step", step=7)
    session.send("STOP")
    broken = Path(lines_of(session)[-1]["checkpoint"])
    (broken / "adapters.safetensors").write_bytes(b"")
    lines = lines_of(run())
    assert only(lines, "attempt")[0]["resumed_from_step"] == 5
    assert any(broken.name in line["message"] for line in only(lines, "log"))


# Slow readers


def test_a_run_that_nobody_reads_ends_and_its_log_is_complete(shop: Any, run: Any) -> None:
    session = run("--flush-grace", "0.1", script={"step_ms": 0, "clock": "real", "examples": 16_000}, pipe_size=4096)
    assert session.process.wait(PATIENCE) == 0
    steps = only(log_of(shop), "step")
    assert [line["step"] for line in steps] == list(range(1, 4001))


def test_with_backpressure_every_line_is_printed_as_it_is(shop: Any, run: Any) -> None:
    session = run("--backpressure", "block", script={"step_ms": 0, "examples": 8000}, pipe_size=4096)
    session.until("step", step=1)
    log = shop.run_dir / rundir.LOG_NAME
    sizes = [log.stat().st_size]
    wait_for(lambda: sizes.append(log.stat().st_size) or (sizes[-1] == sizes[-20:][0] and len(sizes) > 20))
    assert only(log_of(shop), "complete") == []
    lines = lines_of(session)
    assert [line["step"] for line in only(lines, "step")] == list(range(1, 2001))
    assert all(line["updates"] == 1 for line in only(lines, "step"))


# Going away


def test_the_end_of_input_under_run_changes_nothing(run: Any) -> None:
    session = run()
    session.close_input()
    assert lines_of(session)[-1]["outcome"] == "completed"


def test_the_end_of_input_under_serve_stops_with_a_checkpoint(serve: Any, recorder: ModuleType) -> None:
    session = serve(script=LONG)
    begin(session, recorder)
    session.until("step", step=3)
    session.close_input()
    end = lines_of(session)[-1]
    assert (end["outcome"], end["exit_code"]) == ("interrupted", 20)
    assert rundir.defect(Path(end["checkpoint"])) is None


def test_on_eof_overrides_what_each_mode_does(shop: Any, run: Any, serve: Any, recorder: ModuleType) -> None:
    stopped = run("--on-eof", "stop", script=LONG)
    stopped.until("step", step=3)
    stopped.close_input()
    assert lines_of(stopped)[-1]["exit_code"] == 20
    goes_on = serve("--on-eof", "continue")
    begin(goes_on, recorder, run_dir="runs/other")
    goes_on.close_input()
    assert lines_of(goes_on)[-1]["outcome"] == "completed"


@pytest.mark.parametrize(("policy", "code"), [("stop", 20), ("continue", 0)])
def test_a_broken_pipe_keeps_the_log_and_detaches(policy: str, code: int, shop: Any, run: Any) -> None:
    session = run("--on-detach", policy, script={"acts": [AT_3]})
    session.until("step", step=3)
    session.process.stdout.close()
    session.send("SAVE_CHECKPOINT")
    assert session.process.wait(PATIENCE) == code
    log = log_of(shop)
    assert log[-1]["type"] == "end"
    assert (log[-1]["outcome"] == "completed") is (policy == "continue")
    assert any(line.get("code") == "uncontrolled" for line in log) is (policy == "continue")


def test_a_parent_that_is_gone_is_noticed(run: Any, shop: Any) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as parent:
        session = run("--parent-pid", str(parent.pid), "--parent-poll", "0.02", script=LONG)
        session.until("step", step=3)
    end = lines_of(session)[-1]
    assert (end["outcome"], end["exit_code"]) == ("interrupted", 20)
    assert "parent" in end["reason"]


def test_detach_lets_the_run_outlive_its_front_end(serve: Any, shop: Any, recorder: ModuleType) -> None:
    session = serve(script={"acts": [AT_3]})
    begin(session, recorder)
    session.until("step", step=3)
    assert session.ask(1, "detach")["result"] == {"changed": True}
    session.send("SAVE_CHECKPOINT")
    session.close_input()
    lines = lines_of(session)
    assert lines[-1]["outcome"] == "completed"
    assert any(line.get("code") == "uncontrolled" for line in log_of(shop))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_the_first_signal_stops_with_a_checkpoint_and_is_announced_at_once(name: str, run: Any, shop: Any) -> None:
    session = run(script={"acts": [AT_3]})
    session.until("step", step=3)
    with engine_held(shop):
        session.process.send_signal(signal.Signals[name])
        session.until("status", phase="stopping")
    lines = lines_of(session)
    assert (lines[-1]["outcome"], lines[-1]["exit_code"]) == ("interrupted", 21)
    assert only(lines, "command")[-1]["source"] == "signal"
    assert rundir.defect(Path(lines[-1]["checkpoint"])) is None


def test_a_second_signal_counts_only_after_the_grace(run: Any, shop: Any) -> None:
    patient = run("--signal-grace", f"{10 * PATIENCE:g}", script={"acts": [AT_3]})
    patient.until("step", step=3)
    with engine_held(shop):
        patient.process.send_signal(signal.SIGINT)
        patient.until("status", phase="stopping")
        patient.process.send_signal(signal.SIGINT)
        patient.ask(1, "ping")
    assert lines_of(patient)[-1]["exit_code"] == 21


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_late_second_signal_ends_the_worker_now(name: str, run: Any) -> None:
    session = run("--signal-grace", "0", script={"acts": [{"do": "hang", "step": 3}]})
    session.until("step", step=2)
    session.process.send_signal(signal.SIGTERM)
    session.until("status", phase="stopping")
    session.process.send_signal(signal.Signals[name])
    assert session.end() == 128 + signal.Signals[name]
    assert json.loads(session.raw[-1])["exit_code"] == 128 + signal.Signals[name]


def test_a_signal_that_was_ignored_at_the_start_stays_ignored(shop: Any, recorder: ModuleType) -> None:
    shop.folder.joinpath("script.json").write_text(json.dumps({"examples": 400, "step_ms": 5}))
    command = f"trap '' HUP; exec {sys.executable} -m trainwire_worker run config.toml --engine fake"
    process = subprocess.Popen(
        ["sh", "-c", f"{command} --script script.json"],
        cwd=shop.folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    with process:
        for raw in process.stdout:
            line = json.loads(raw)
            if line["type"] == "step" and line["step"] == 2:
                process.send_signal(signal.SIGHUP)
    assert line["outcome"] == "completed"


def test_the_first_cause_decides(run: Any, shop: Any) -> None:
    session = run(script={"acts": [AT_3]})
    session.until("step", step=3)
    with engine_held(shop):
        session.send({"id": 1, "cmd": "stop"})
        session.until("status", phase="stopping")
        session.process.send_signal(signal.SIGTERM)
        session.ask(2, "ping")
    end = lines_of(session)[-1]
    assert (end["outcome"], end["exit_code"]) == ("stopped", 0)


def test_a_dead_engine_is_reported_with_what_is_known(run: Any) -> None:
    acts = [{"do": "print", "step": 7, "by": "c", "stream": "stderr", "text": "driver: bad address"}]
    lines = lines_of(run(script={"acts": [*acts, {"do": "die", "step": 7, "signal": "SIGSEGV"}]}))
    error = only(lines, "error")[0]
    assert (error["code"], lines[-1]["exit_code"]) == ("engine_died", 9)
    assert error["details"]["signal"] == "SIGSEGV"
    assert error["details"]["stderr"][-1] == "driver: bad address"
    assert error["details"]["checkpoint"].endswith("checkpoint-000005")


def test_a_dead_engine_is_started_again_so_often_and_not_more_often(run: Any) -> None:
    lines = lines_of(run("--restarts", "2", script={"acts": [{"do": "die", "step": 8}]}))
    attempts = only(lines, "attempt")
    assert [line.get("resumed_from_step") for line in attempts] == [None, 5, 5]
    assert sum(line.get("code") == "engine_died" for line in only(lines, "log")) == 2
    assert lines[-1]["exit_code"] == 9


def test_the_engine_of_a_worker_that_is_killed_saves_and_leaves(shop: Any, run: Any) -> None:
    session = run(script=LONG)
    session.until("step", step=7)
    session.process.kill()
    session.process.wait(PATIENCE)
    wait_for(lambda: rundir.lock_holder(shop.run_dir) is None)
    newest, broken = rundir.newest_whole_checkpoint(shop.run_dir)
    assert broken == []
    assert newest is not None
    assert newest.step >= 7


def test_an_engine_that_does_not_leave_is_killed_and_the_run_counts(run: Any) -> None:
    lines = lines_of(run("--exit-grace", "0.1", script={"acts": [{"do": "hang", "at": "exit"}]}))
    assert (lines[-1]["outcome"], lines[-1]["exit_code"]) == ("completed", 0)


def test_an_idle_worker_leaves_with_0_at_the_end_of_input(serve: Any) -> None:
    session = serve()
    session.close_input()
    assert lines_of(session)[-1]["exit_code"] == 0


def test_a_heartbeat_comes_in_silence_under_serve_and_under_run_once_a_command_came(run: Any, serve: Any) -> None:
    waiting = serve("--heartbeat", "0.1")
    waiting.until("heartbeat")
    first = run(
        "--heartbeat", "0.1", script={"acts": [{"do": "sleep", "step": 2, "ms": 400}, {"do": "hang", "step": 3}]}
    )
    first.until("step", step=2)
    assert only([json.loads(line) for line in first.raw], "heartbeat") == []
    first.ask(1, "ping")
    age = first.until("heartbeat")["loop_age_ms"]
    assert first.until("heartbeat")["loop_age_ms"] > age
    silent = serve("--heartbeat", "0")
    silent.ask(1, "ping")
    time.sleep(0.3)
    silent.close_input()
    assert only(lines_of(silent), "heartbeat") == []


# Saves that fail


def test_a_failed_final_save_under_serve_waits_for_room(serve: Any, recorder: ModuleType) -> None:
    fails = {"do": "fail", "at": "final", "attempt": 1, "code": "disk_full", "message": "No space is left."}
    session = serve(script={"acts": [fails]})
    begin(session, recorder)
    session.until("paused")
    log = next(line for line in map(json.loads, session.raw) if line.get("code") == "save_failed")
    assert log["details"]["code"] == "disk_full"
    assert session.ask(1, "stop")["result"]["checkpoint"].endswith("checkpoint-000012")
    assert lines_of(session)[-1]["outcome"] == "stopped"


def test_a_failed_final_save_under_run_ends_it(run: Any) -> None:
    fails = {"do": "fail", "at": "final", "code": "disk_full", "message": "No space is left."}
    lines = lines_of(run(script={"acts": [fails]}))
    assert (only(lines, "error")[0]["code"], lines[-1]["exit_code"]) == ("disk_full", 7)


def test_a_failed_periodic_save_costs_a_log_line_only(run: Any) -> None:
    fails = {"do": "fail", "at": "save", "step": 5, "code": "disk_full", "message": "No space is left."}
    lines = lines_of(run(script={"acts": [fails]}))
    assert [line["step"] for line in only(lines, "checkpoint")] == [10, 12]
    assert any(line.get("code") == "save_failed" for line in lines)
    assert lines[-1]["outcome"] == "completed"


# The control socket


def knock(shop: Any) -> tuple[socket.socket, Any]:
    holder = rundir.lock_holder(shop.run_dir)
    assert holder is not None
    assert holder.socket is not None
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(PATIENCE)
    connection.connect(holder.socket)
    return connection, connection.makefile("rb")


def test_a_controller_steers_a_run_and_a_second_one_is_refused(shop: Any, run: Any) -> None:
    session = run(script=LONG)
    session.until("step", step=1)
    first, lines = knock(shop)
    with first, lines:
        assert json.loads(lines.readline())["type"] == "hello"
        second, refused = knock(shop)
        with second, refused:
            assert json.loads(refused.readline())["type"] == "hello"
            assert json.loads(refused.readline())["error"]["code"] == "busy"
            assert refused.readline() == b""
        first.sendall(b'{"id":"far","cmd":"pause"}\n')
        answer = next(line for line in map(json.loads, lines) if line["type"] == "response")
        assert (answer["id"], answer["ok"]) == ("far", True)
    assert session.until("command")["source"] == "socket"
    session.ask(1, "stop")
    lines_of(session)


def test_only_the_owner_reaches_the_control_socket(shop: Any, run: Any) -> None:
    session = run(script=LONG)
    session.until("step", step=1)
    holder = rundir.lock_holder(shop.run_dir)
    assert holder is not None
    path = Path(holder.socket or "")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    session.send("STOP")
    lines_of(session)
    assert not path.exists()


# Security


@pytest.mark.parametrize("key", ["run_dir", "data", "model", "prompts", "start_from", "cache_dir", "valid_data"])
def test_a_path_outside_the_root_is_refused(key: str, serve: Any, shop: Any, recorder: ModuleType) -> None:
    root = shop.folder / "root"
    root.mkdir()
    (root / "way-out").symlink_to(shop.folder)
    inside = {name: str(root / name) for name in ("model", "data", "run_dir")}
    session = serve("--root", str(root))
    outside = str(root / "way-out" / "x")
    session.send({"id": 1, "cmd": "start", "config": {**inside, key: outside}})
    lines = lines_of(session)
    assert only(lines, "error")[0]["code"] == only(lines, "response")[0]["error"]["code"] == "forbidden_path"
    assert lines[-1]["exit_code"] == 3


@pytest.mark.parametrize("text", ["-", "a\0b"])
def test_a_text_that_is_no_path_is_refused(text: str, serve: Any, recorder: ModuleType) -> None:
    session = serve()
    begin(session, recorder, run_dir=text)
    assert only(lines_of(session), "error")[0]["code"] == "forbidden_path"


def test_no_command_and_no_key_lets_a_model_s_code_run(serve: Any, recorder: ModuleType) -> None:
    session = serve()
    config = {**recorder.CONFIG, "trust_remote_code": True}
    assert session.ask(1, "validate", config=config)["result"]["issues"][0]["path"] == "trust_remote_code"
    refused = session.ask(2, "start", config=recorder.CONFIG, trust_remote_code=True)
    assert refused["error"]["code"] == "unknown_param"
