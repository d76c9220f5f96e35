"""When the other side goes away: end of input, a broken pipe, a dead parent; detach and a second controller."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from worker_driver import Controller, LineReader, Spawn, Worker, is_gone, killed_at_the_end, read_log, wait_until

from trainwire_protocol.rundir import lock_holder

LONG = {"max_steps": 100_000}


def ended_in_the_log(worker: Worker) -> dict[str, object]:
    """Wait for the process and give the last line of the log."""
    code = worker.exit_code()
    end = read_log(worker.run_dir)[-1]
    assert end["type"] == "end"
    assert end["exit_code"] == code
    return end


def assert_saved_and_left(end: dict[str, object], reason: str) -> None:
    """Check an ending by detach: interrupted, with a checkpoint of the last update."""
    assert (end["outcome"], end["reason"], end["exit_code"], end["resumable"]) == ("interrupted", reason, 20, True)
    assert str(end["checkpoint"]).endswith(f"checkpoint-{end['step']:06d}")


def test_the_end_of_input_under_run_changes_nothing(run: Spawn) -> None:
    worker = run(stdin=subprocess.DEVNULL)
    assert worker.finish()["outcome"] == "completed"


def test_a_pipe_with_a_few_orders_is_done_and_the_run_goes_on(run: Spawn) -> None:
    worker = run(script={"acts": [{"do": "await_order", "at": "load"}]}, config={"max_steps": 10})
    worker.wait("status", activity="load")
    worker.raw(b"PAUSE\n")
    worker.wait("paused")
    worker.raw(b"SET save_every=3\nRESUME\n")
    worker.close_input()
    end = worker.finish()
    assert (end["outcome"], end["step"]) == ("completed", 10)
    assert [line["step"] for line in worker.of("checkpoint")] == [3, 6, 9, 10]


def test_the_end_of_input_under_serve_stops_with_a_checkpoint(serve: Spawn) -> None:
    worker = serve(config=LONG | {"save_every": 0})
    worker.begin()
    worker.close_input()
    assert_saved_and_left(worker.finish(), "end of input")
    command = worker.of("command")[-1]
    assert (command["cmd"], command["source"], command["parameters"]) == ("stop", "detach", {"reason": "end of input"})


def test_the_end_of_input_ends_an_idle_worker_with_success(serve: Spawn) -> None:
    worker = serve()
    worker.close_input()
    end = worker.finish()
    assert (end["outcome"], end["reason"], end["exit_code"]) == ("stopped", "end of input", 0)


@pytest.mark.parametrize("mode", ["run", "serve"])
@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_on_eof_overrides_either(request: pytest.FixtureRequest, mode: str, policy: str) -> None:
    spawn: Spawn = request.getfixturevalue(mode)
    config = LONG | {"save_every": 0} if policy == "stop" else {"max_steps": 20}
    worker = spawn("--on-eof", policy, config=config)
    if mode == "serve":
        worker.begin()
    else:
        worker.wait("step")
    worker.close_input()
    end = worker.finish()
    if policy == "stop":
        assert_saved_and_left(end, "end of input")
    else:
        assert (end["outcome"], end["step"]) == ("completed", 20)


def test_on_eof_stop_is_honoured_also_after_a_detach_that_continues(serve: Spawn) -> None:
    worker = serve("--on-eof", "stop", "--on-detach", "continue", config=LONG | {"save_every": 0})
    worker.begin()
    worker.close_output()
    wait_until(lambda: any(x.get("code") == "uncontrolled" for x in read_log(worker.run_dir)), "the run goes on")
    worker.close_input()
    assert_saved_and_left(ended_in_the_log(worker), "end of input")


@pytest.mark.parametrize("mode", ["run", "serve"])
def test_a_broken_pipe_on_stdout_stops_with_a_checkpoint_and_the_log_is_complete(
    request: pytest.FixtureRequest, mode: str
) -> None:
    spawn: Spawn = request.getfixturevalue(mode)
    worker = spawn(config=LONG | {"save_every": 0})
    if mode == "serve":
        worker.begin()
    else:
        worker.wait("step")
    worker.close_output()
    assert_saved_and_left(ended_in_the_log(worker), "nobody reads stdout any more")


def test_a_stdout_that_is_broken_from_the_beginning_still_leaves_a_log(run: Spawn) -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    worker = run(stdout=write_fd, config=LONG)
    os.close(write_fd)
    end = ended_in_the_log(worker)
    assert (end["outcome"], end["exit_code"]) == ("interrupted", 20)


def test_on_detach_continue_trains_on_with_the_log_only_and_another_controller_steers(serve: Spawn) -> None:
    worker = serve("--on-detach", "continue", config=LONG)
    worker.begin()
    worker.close_output()
    worker.close_input()
    wait_until(lambda: any(x.get("code") == "uncontrolled" for x in read_log(worker.run_dir)), "the run goes on")
    controller = worker.controller()
    assert controller.wait()["type"] == "hello"
    first = controller.wait("step")
    controller.wait("step", step=first["step"] + 3)
    assert controller.result("pause")["changed"]
    assert controller.result("status")["phase"] == "paused"
    controller.send("stop")
    assert controller.wait("end")["outcome"] == "stopped"
    controller.reader.rest()
    end = ended_in_the_log(worker)
    assert (end["outcome"], end["exit_code"]) == ("stopped", 0)
    sources = [line["source"] for line in read_log(worker.run_dir) if line["type"] == "command"]
    assert sources == ["stdin", "socket", "socket"]


PARENT = """
import subprocess, sys
worker = subprocess.Popen({command!r}, stdin=0, stdout=1, stderr=2, cwd={folder!r})
print(worker.pid, flush=True, file=sys.stderr)
worker.wait()
"""


def spawn_below_a_parent(worker: Worker, *words: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start the worker's command again as the child of another process: that process, and the worker's pid."""
    code = PARENT.format(command=[*worker.command, *words], folder=str(worker.folder))
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert parent.stderr is not None
    return parent, int(parent.stderr.readline())


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_dead_parent_is_noticed_though_the_pipes_are_held_by_others(serve: Spawn, policy: str) -> None:
    worker = serve("--on-detach", policy, config=LONG)
    worker.send("stop")
    worker.finish()
    parent, pid = spawn_below_a_parent(worker)
    assert parent.stdin is not None
    assert parent.stdout is not None
    reader = LineReader(parent.stdout.fileno())
    os.write(parent.stdin.fileno(), json.dumps({"cmd": "start", "config": worker.config}).encode() + b"\n")
    reader.wait("step")
    parent.kill()
    parent.wait()
    if policy == "continue":
        assert reader.wait("log", code="uncontrolled")["message"].endswith("the parent process is gone.")
        os.kill(pid, signal.SIGTERM)
    reader.rest()
    end = reader.lines[-1]
    expected = {"stop": ("the parent process is gone", 20), "continue": ("signal SIGTERM", 21)}
    assert (end["reason"], end["exit_code"]) == expected[policy]
    wait_until(lambda: is_gone(pid), "the worker leaves")
    parent.stdin.close()
    parent.stdout.close()
    if parent.stderr is not None:
        parent.stderr.close()


def test_run_watches_its_parent_only_if_asked_and_then_any_process(run: Spawn) -> None:
    watched = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    worker = run("--parent-pid", str(watched.pid), config=LONG)
    worker.wait("step")
    assert watched.stdin is not None
    watched.stdin.close()
    watched.wait()
    assert_saved_and_left(worker.finish(), "the parent process is gone")


def test_detach_lets_the_run_outlive_its_front_end_whatever_the_options_say(serve: Spawn) -> None:
    script = {"acts": [{"do": "await_order", "at": "boundary", "step": 2}]}
    worker = serve("--on-eof", "stop", script=script, config={"max_steps": 40})
    worker.begin()
    assert worker.result("detach") == {"changed": True}
    assert worker.result("detach") == {"changed": False}
    # An order before this boundary would not be the one that the script waits for.
    worker.wait("step", step=2)
    worker.send("checkpoint")
    worker.close_input()
    worker.close_output()
    end = ended_in_the_log(worker)
    assert (end["outcome"], end["step"]) == ("completed", 40)


def test_detach_changes_nothing_for_a_run_that_would_go_on_anyway(serve: Spawn) -> None:
    worker = serve("--on-detach", "continue", config=LONG)
    worker.begin()
    assert worker.result("detach") == {"changed": False}
    worker.send("stop")
    worker.finish()


def test_the_control_socket_takes_one_controller_at_a_time(serve: Spawn) -> None:
    worker = serve(config=LONG)
    worker.begin()
    first = worker.controller()
    assert first.wait()["type"] == "hello"
    second = worker.controller()
    assert second.wait()["type"] == "hello"
    refusal = second.wait("response")
    assert (refusal["id"], refusal["ok"], refusal["error"]["code"]) == (None, False, "busy")
    second.reader.rest()
    assert first.result("ping")
    first.close()
    third = wait_until(lambda: _let_in(worker), "the next one is let in")
    assert third.result("pause")["changed"]
    third.close()
    worker.wait("paused")
    worker.send("stop")
    worker.finish()


def _let_in(worker: Worker) -> Controller | None:
    controller = worker.controller()
    controller.send("ping", 1)
    answer = controller.wait("response")
    return controller if answer["ok"] else None


def test_of_many_that_knock_at_once_one_is_let_in_and_each_other_one_is_told(serve: Spawn) -> None:
    worker = serve(config=LONG)
    worker.begin()
    os.kill(worker.pid, signal.SIGSTOP)
    knocking = [worker.controller() for _ in range(30)]
    os.kill(worker.pid, signal.SIGCONT)
    assert knocking[0].result("ping")
    assert [other.wait("response")["error"]["code"] for other in knocking[1:]] == ["busy"] * 29
    worker.send("stop")
    worker.finish()


def test_the_control_socket_is_for_its_owner_only_and_is_removed(serve: Spawn) -> None:
    worker = serve(config=LONG)
    worker.begin()
    holder = lock_holder(worker.run_dir)
    assert holder is not None
    assert holder.socket is not None
    path = Path(holder.socket)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert (holder.pid, holder.phase) == (worker.pid, "running")
    worker.send("stop")
    worker.finish()
    assert not path.parent.exists()
    assert lock_holder(worker.run_dir) is None


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Give a temporary folder in which a socket's path is short enough."""
    folder = Path(tempfile.mkdtemp(prefix="tw-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def test_the_next_worker_takes_away_the_sockets_of_killed_ones_and_of_no_other(
    serve: Spawn, tmp_path: Path, short_folder: Path
) -> None:
    place = {"TMPDIR": str(short_folder)}
    killed = serve(config=LONG, env=place)
    killed.begin()
    killed.process.kill()
    killed.process.wait()
    (left,) = short_folder.glob("trainwire-*/control")
    living = serve(config=LONG | {"run_dir": str(tmp_path / "living")}, env=place)
    living.begin()
    assert not left.parent.exists()
    (short_folder / "trainwire-control-empty").mkdir()
    other = serve(config=LONG | {"run_dir": str(tmp_path / "other")}, env=place)
    other.begin()
    assert not (short_folder / "trainwire-control-empty").exists()
    for worker in (living, other):
        assert worker.controller().result("ping")
        worker.send("stop")
        worker.finish()
    assert not list(short_folder.glob("trainwire-*"))


def test_a_controller_that_only_says_a_word_gets_its_answer(serve: Spawn) -> None:
    worker = serve(config=LONG)
    worker.begin()
    controller = worker.controller()
    controller.raw(b"PAUSE\n")
    controller.close_input()
    controller.reader.rest()
    answer = controller.of("response")[-1]
    assert (answer["cmd"], answer["ok"]) == ("pause", True)
    worker.wait("paused")
    worker.send("stop")
    worker.finish()


def test_a_controller_that_never_reads_holds_nobody_up(serve: Spawn) -> None:
    worker = serve(script={"step_ms": 0}, config={"max_steps": 5000, "save_every": 0})
    worker.start()
    controller = worker.controller()
    assert worker.finish()["outcome"] == "completed"
    assert sum(line.get("updates", 0) for line in worker.of("step")) == 5000
    controller.close()


@pytest.mark.parametrize("name", ["x" * 120, "missing", "a-file", "/proc"])
def test_a_temporary_folder_that_can_hold_no_socket_is_replaced(serve: Spawn, tmp_path: Path, name: str) -> None:
    (tmp_path / ("x" * 120)).mkdir()
    (tmp_path / "a-file").write_text("")
    worker = serve(config=LONG, env={"TMPDIR": str(tmp_path / name)})
    worker.begin()
    controller = worker.controller()
    assert controller.result("ping")
    controller.close()
    worker.send("stop")
    worker.finish()


def test_a_killed_worker_leaves_an_engine_that_saves_and_leaves(serve: Spawn) -> None:
    worker = serve(config=LONG | {"save_every": 0})
    worker.begin()
    engine = worker.engine_pid()
    with killed_at_the_end(lambda: engine):
        worker.process.kill()
        wait_until(lambda: is_gone(engine), "the engine leaves")
    saved = sorted(path.name for path in worker.run_dir.glob("checkpoint-*"))
    assert len(saved) == 1
    assert (worker.run_dir / saved[0] / "manifest.json").is_file()
    again = serve(config=LONG)
    response = again.start()
    assert response["result"]["resumed_from"] == str(worker.run_dir / saved[0])
    step = int(saved[0].removeprefix("checkpoint-"))
    again.wait("step", step=step + 1)
    logged = [line["step"] for line in again.log() if line["type"] == "step"]
    assert logged[: step + 1] == list(range(1, step + 2)), "log and weights agree"
    again.send("stop")
    again.finish()
