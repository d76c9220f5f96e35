"""The client against the real worker with the scripted engine: what needs a real process, lock, log or socket."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

import trainwire_client as tw
from trainwire_client import Checkpoint, Complete, End, Init, Log, Paused, Step
from trainwire_protocol.rundir import lock_holder

Answer = TypeVar("Answer")

ROWS = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": f"Ho {n}"}]} for n in range(8)
]
FOR_EVER = 1_000_000


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., tw.Run]]:
    """Launch runs on the scripted engine: `begin(script, launch_option=…, config_key=…)`."""
    runs: list[tw.Run] = []

    def launch(script: dict[str, Any] | None = None, options: dict[str, Any] | None = None, **config: Any) -> tw.Run:
        path = tmp_path / "script.json"
        path.write_text(json.dumps({"step_ms": 1, **(script or {})}))
        config = {"model": "model", "run_dir": str(tmp_path / "run"), **config}
        options = {"worker_args": ["--engine", "fake", "--script", str(path)], "rows": ROWS, **(options or {})}
        if config.get("data"):
            del options["rows"]
        runs.append(tw.launch(config, **options))
        return runs[-1]

    yield launch
    for run in runs:
        run.close()


def seqs(events: list[Any]) -> list[int]:
    return [event.seq for event in events if event.seq is not None]


def test_a_whole_run_gives_typed_events_and_a_result(begin: Callable[..., tw.Run], tmp_path: Path) -> None:
    with begin(max_steps=5, save_every=2) as run:
        events = list(run)
        result = run.wait().check()
    assert [event.step for event in events if isinstance(event, Step)] == [1, 2, 3, 4, 5]
    assert seqs(events) == list(range(1, len(events) + 1))
    assert isinstance(events[-2], Complete)
    assert isinstance(events[-1], End)
    assert (result.outcome, result.step, result.exit_code, result.shutdown) == ("completed", 5, 0, ())
    assert result.checkpoint == str(tmp_path / "run" / "final")
    assert result.metrics["step"] == 5
    assert result.run_dir == run.run_dir == str(tmp_path / "run")


def test_rows_in_memory_are_written_to_the_run_folder_and_named_in_the_config(
    begin: Callable[..., tw.Run], tmp_path: Path
) -> None:
    with begin(max_steps=1) as run:
        init = next(event for event in run if isinstance(event, Init))
    path = tmp_path / "run" / "rows" / "train.jsonl"
    assert init.config["data"] == str(path)
    assert [json.loads(line) for line in path.read_text().splitlines()] == ROWS


def test_a_config_file_s_relative_paths_start_at_the_file(begin: Callable[..., tw.Run], tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    config.write_text('model = "model"\ndata = "rows.jsonl"\nmax_steps = 1\n')
    with tw.launch(config, worker_args=["--engine", "fake"]) as run:
        started = run.started(90)
        init = next(event for event in run if isinstance(event, Init))
    assert started.run_dir == init.run_dir == str(tmp_path / "runs" / "mine")
    assert init.config["data"] == str(tmp_path / "rows.jsonl")


def test_a_run_is_steered_by_every_command(begin: Callable[..., tw.Run], tmp_path: Path) -> None:
    with begin({"valid_examples": 4}, max_steps=FOR_EVER) as run:
        paused = run.pause()
        assert paused.changed
        assert not run.pause().changed
        assert [e.step for e in run.replay(types=["paused"]) if isinstance(e, Paused)] == [paused.step]
        snapshot = run.status()
        assert (snapshot.phase, snapshot.step) == ("paused", paused.step)
        assert snapshot.fields["phase"] == "paused"
        applied = run.set(learning_rate=5e-5, save_every=7)
        assert applied.applied == {"learning_rate": 5e-5, "save_every": 7}
        assert applied.effective_step == paused.step + 1
        assert run.eval(max_batches=1).tokens > 0
        assert run.generate("Hello?").text != run.generate("Hello?", adapter=False).text
        saved = run.checkpoint("mine")
        assert saved.path == str(tmp_path / "run" / "mine")
        assert run.ping().ts > 0
        assert run.resume(steps=2).step == paused.step
        while True:
            event = next(run)
            if isinstance(event, Paused) and event.step == paused.step + 2:
                break
        stopped = run.stop()
        assert (stopped.outcome, stopped.step) == ("stopped", paused.step + 2)
        assert stopped.checkpoint is not None
        assert run.wait(90).checkpoint == stopped.checkpoint


def test_a_client_drives_the_loop_itself_by_counted_stretches(begin: Callable[..., tw.Run]) -> None:
    with begin({"acts": [{"do": "await_order", "at": "load"}]}, max_steps=25) as run:
        assert run.pause().step == 0
        stretches = []
        for event in run:
            if isinstance(event, Paused):
                stretches.append(event.step)
                run.resume(steps=10)
        assert run.wait().outcome == "completed"
    assert stretches == [0, 10, 20]


def test_a_refused_command_names_its_code_and_the_run_goes_on(begin: Callable[..., tw.Run]) -> None:
    with begin(max_steps=FOR_EVER) as run:
        run.started(90)
        with pytest.raises(tw.CommandFailed, match="learning_rte") as caught:
            run.set(learning_rte=1.0)
        assert caught.value.code == "unknown_param"
        with pytest.raises(tw.CommandFailed) as caught:
            run.set(learning_rate=-1.0)
        assert caught.value.code == "bad_params"
        assert run.pause().changed


def test_a_bad_config_is_a_failed_result_with_the_worker_s_sentence(begin: Callable[..., tw.Run]) -> None:
    with begin(batchsize=4) as run:
        with pytest.raises(tw.CommandFailed) as refused:
            run.started(90)
        result = run.wait(90)
    assert refused.value.code == "config_invalid"
    assert (result.outcome, result.exit_code) == ("failed", 3)
    with pytest.raises(tw.RunFailed, match="batch_size") as caught:
        result.check()
    assert (caught.value.code, caught.value.exit_code) == ("config_invalid", 3)


def test_an_engine_that_dies_is_a_failed_result_and_no_dead_worker(begin: Callable[..., tw.Run]) -> None:
    with begin({"acts": [{"do": "die", "at": "update", "step": 3}]}, max_steps=9) as run:
        result = run.wait(90)
    assert (result.outcome, result.exit_code) == ("failed", 9)
    assert result.error is not None
    assert result.error.code == "engine_died"


def test_a_worker_that_is_killed_raises_everywhere_and_names_the_checkpoint(
    begin: Callable[..., tw.Run], tmp_path: Path
) -> None:
    with begin(max_steps=FOR_EVER, save_every=5) as run:
        saved = next(event for event in run if isinstance(event, Checkpoint))
        run.pause()
        os.kill(run.pid, signal.SIGKILL)
        with pytest.raises(tw.WorkerDied) as caught:
            list(run)
        assert caught.value.signal == "SIGKILL"
        assert caught.value.exit_code is None
        assert caught.value.last_checkpoint is not None
        assert caught.value.last_checkpoint >= saved.path
        for call in (run.ping, run.wait, run.stop):
            with pytest.raises(tw.WorkerDied, match="SIGKILL"):
                call()
    wait_for_the_lock(tmp_path / "run")


def wait_for_the_lock(run_dir: Path) -> None:
    """Wait until no process of the run is left, by waiting for the log's follower to see it."""
    with tw.attach(run_dir) as past, pytest.raises(tw.WorkerDied):
        list(past)


def test_the_worker_has_a_process_group_of_its_own(begin: Callable[..., tw.Run]) -> None:
    with begin(max_steps=FOR_EVER) as run:
        assert os.getpgid(run.pid) == run.pid != os.getpgid(0)
        assert os.getsid(run.pid) != os.getsid(0)


def test_an_error_in_the_with_block_stops_the_run_with_a_checkpoint(begin: Callable[..., tw.Run]) -> None:
    run = begin(max_steps=FOR_EVER)

    def work() -> None:
        with run:
            next(event for event in run if isinstance(event, Step))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    result = run.wait()
    assert (result.outcome, [rung.name for rung in result.shutdown]) == ("stopped", ["stop"])
    assert result.checkpoint is not None


QUICK = {"stop": 0.3, "stdin": 0.3, "terminate": 0.3, "exit": 5}


def test_a_worker_that_was_stopped_by_the_system_is_woken_to_leave(begin: Callable[..., tw.Run]) -> None:
    with begin(options={"shutdown": {**QUICK, "terminate": 30}}, max_steps=FOR_EVER) as run:
        run.started(90)
        os.kill(run.pid, signal.SIGSTOP)
        with pytest.raises(tw.CommandTimeout, match="ping was not answered"):
            run.ping(timeout=0.1)
    assert [rung.name for rung in run.rungs] == ["stop", "stdin", "terminate"]
    assert run.wait().checkpoint is not None


def test_a_run_that_is_killed_saves_nothing_and_tells_what_was_last_heard(
    begin: Callable[..., tw.Run], tmp_path: Path
) -> None:
    with begin(options={"supervise": True}, max_steps=FOR_EVER) as run:
        started = run.started(90)
        next(event for event in run if event.type == "step")
        paused = run.pause().step
        assert (run.run_id, run.phase, run.step) == (started.run_id, "paused", paused)
        run.kill()
        with pytest.raises(tw.WorkerDied, match="SIGKILL"):
            run.wait()
    assert (run.ended, run.restarts, run.rungs, run.last_checkpoint) == (True, 0, (), None)
    wait_for_the_lock(tmp_path / "run")
    assert tw.latest_checkpoint(tmp_path / "run") is None


def test_a_hanging_engine_is_killed_with_its_worker(begin: Callable[..., tw.Run], tmp_path: Path) -> None:
    acts = [{"do": "log", "message": "hangs from here on", "step": 3}, {"do": "hang", "step": 3}]
    with begin({"acts": acts}, {"shutdown": QUICK}, max_steps=FOR_EVER) as run:
        assert any(isinstance(event, Log) and event.message == "hangs from here on" for event in run)
    assert [rung.name for rung in run.rungs] == ["stop", "stdin", "terminate", "kill"]
    assert all(rung.seconds > 0.2 for rung in run.rungs[:3])
    with pytest.raises(tw.WorkerDied, match="SIGKILL"):
        run.wait()
    wait_for_the_lock(tmp_path / "run")
    assert lock_holder(tmp_path / "run") is None


def test_a_scripted_engine_that_hangs_does_not_outlive_its_killed_worker(
    begin: Callable[..., tw.Run], tmp_path: Path
) -> None:
    with begin({"acts": [{"do": "hang", "step": 3, "orphan_ms": 50}]}, max_steps=FOR_EVER) as run:
        next(event for event in run if isinstance(event, Step) and event.step == 2)
        os.kill(run.pid, signal.SIGKILL)
        wait_for_the_lock(tmp_path / "run")
    assert lock_holder(tmp_path / "run") is None


def test_handlers_run_in_the_thread_that_waits_and_may_steer(begin: Callable[..., tw.Run]) -> None:
    with begin(max_steps=FOR_EVER) as run:
        losses: list[float | None] = []
        names: list[str] = []

        @run.on("step")
        def note(event: Step) -> None:
            losses.append(event.loss)
            if len(losses) == 5:
                run.stop()

        run.on("*", lambda event: names.append(type(event).__name__))
        result = run.wait(90)
        with pytest.raises(tw.ClientError, match="step"):
            run.on("steps", note)
        run.off("step", note)
    assert result.outcome == "stopped"
    assert len(losses) >= 5
    assert names[0] == "Attempt"
    assert names[-1] == "End"


def test_a_supervised_run_survives_two_kills_and_gives_each_event_once(
    begin: Callable[..., tw.Run], tmp_path: Path
) -> None:
    kills = [15, 40]
    acts = [
        {"do": "await_order", "at": "boundary", "step": step, "attempt": attempt}
        for attempt, step in enumerate(kills, 1)
    ]
    with begin({"acts": acts}, {"supervise": True}, max_steps=60, save_every=5) as run:
        events: list[Any] = []
        for event in run:
            events.append(event)
            if kills and isinstance(event, Step) and event.step == kills[0]:
                kills.pop(0)
                os.kill(run.pid, signal.SIGKILL)
        result = run.wait()
    assert (result.outcome, result.restarts, result.step) == ("completed", 2, 60)
    assert seqs(events) == list(range(1, len(events) + 1))
    logged = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_bytes().splitlines()]
    assert [line["seq"] for line in logged] == seqs(events)
    assert [line["type"] for line in logged] == [event.type for event in events]
    losses = tw.history(tmp_path / "run", ["loss"])["loss"]
    assert losses.steps == list(range(1, 61))


DETACHED = """
    import json, sys, trainwire_client as tw
    with tw.launch(json.loads(sys.argv[1]), worker_args=json.loads(sys.argv[2])) as run:
        next(event for event in run if isinstance(event, tw.Step))
        run.detach()
    print(run.pid)
"""
CRASHING = """
    import json, os, signal, sys, trainwire_client as tw
    run = tw.launch(json.loads(sys.argv[1]), worker_args=json.loads(sys.argv[2]))
    next(event for event in run if isinstance(event, tw.Step))
    os.kill(os.getpid(), signal.SIGKILL)
"""


INTERRUPTED = """
    import json, os, signal, sys, trainwire_client as tw
    with tw.launch(json.loads(sys.argv[1]), worker_args=json.loads(sys.argv[2])) as run:
        for event in run:
            if isinstance(event, tw.Step):
                os.kill(os.getpid(), signal.SIGINT)
"""


def front_end(program: str, tmp_path: Path, step_ms: float) -> subprocess.CompletedProcess[str]:
    """Run another front end to its end."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"step_ms": step_ms}))
    config = {"model": "m", "data": "d", "run_dir": str(tmp_path / "run"), "max_steps": FOR_EVER, "save_every": 50}
    words = [json.dumps(config), json.dumps(["--engine", "fake", "--script", str(script), "--parent-poll", "0.05"])]
    program = textwrap.dedent(program)
    return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=240)


def once_free(command: Callable[[], Answer]) -> Answer:
    """Give a command as soon as the one who steers has left the control socket."""
    while True:
        with contextlib.suppress(tw.NoWorker):
            return command()


def test_a_run_that_was_let_go_outlives_its_front_end_and_is_steered_by_attach(tmp_path: Path) -> None:
    front = front_end(DETACHED, tmp_path, 5)
    assert front.returncode == 0, front.stderr
    with tw.attach(tmp_path / "run") as run:
        assert run.pid == int(front.stdout)
        first = [next(run) for _ in range(12)]
        assert seqs(first) == list(range(1, 13))
        assert run.pause().changed
        assert run.status().phase == "paused"
        with tw.attach(tmp_path / "run") as second:
            # The first leaves the socket a moment after its last answer, and takes it again.
            assert once_free(second.status).phase == "paused"
        once_free(run.resume)
        assert run.stop().outcome == "stopped"
        rest = list(run)
        assert seqs(first + rest) == list(range(1, len(first + rest) + 1))
        assert (run.wait().outcome, run.wait().exit_code) == ("stopped", 0)
    assert run.pid is None


def test_a_second_controller_is_refused_with_the_reason(begin: Callable[..., tw.Run], tmp_path: Path) -> None:
    with begin({}, max_steps=FOR_EVER) as run:
        next(event for event in run if isinstance(event, Init))
        holder = lock_holder(tmp_path / "run")
        assert holder is not None
        assert holder.socket is not None
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as first, tw.attach(tmp_path / "run") as second:
            first.connect(holder.socket)
            assert b'"hello"' in first.recv(64)
            with pytest.raises(tw.NoWorker, match="Another controller steers the run"):
                second.ping()
        run.stop()


def test_a_run_whose_front_end_is_killed_stops_with_a_checkpoint(tmp_path: Path) -> None:
    assert front_end(CRASHING, tmp_path, 5).returncode == -signal.SIGKILL
    with tw.attach(tmp_path / "run") as run:
        result = run.wait(90)
    assert (result.outcome, result.exit_code) == ("interrupted", 20)
    found = tw.latest_checkpoint(tmp_path / "run")
    assert found is not None
    assert str(found.path) == result.checkpoint


def test_ctrl_c_in_a_front_end_stops_its_run_gracefully(tmp_path: Path) -> None:
    front = front_end(INTERRUPTED, tmp_path, 5)
    assert "KeyboardInterrupt" in front.stderr
    with tw.attach(tmp_path / "run") as run:
        result = run.wait(90)
    assert (result.outcome, result.exit_code) == ("stopped", 0)
    assert result.checkpoint is not None


def test_attaching_while_a_run_of_our_own_goes_on_takes_the_log_up_to_its_end(
    begin: Callable[..., tw.Run], tmp_path: Path
) -> None:
    with begin(max_steps=FOR_EVER) as run:
        run.started(90)
        with tw.attach(tmp_path / "run", from_seq=3) as watcher:
            first = next(watcher)
            assert first.seq == 3
            run.stop()
            watched = [first, *watcher]
        own = [event for event in run if (event.seq or 0) >= 3]
    assert [(e.seq, type(e)) for e in watched] == [(e.seq, type(e)) for e in own]


def test_an_attached_handle_that_is_closed_leaves_the_run_alone(begin: Callable[..., tw.Run], tmp_path: Path) -> None:
    with begin(max_steps=FOR_EVER) as run:
        run.started(90)
        with tw.attach(tmp_path / "run") as watcher:
            assert watcher.ping().ts > 0
        assert list(watcher)[-1:] != [End]
        with pytest.raises(tw.NoWorker):
            watcher.ping()
        assert run.pause().changed
        assert lock_holder(tmp_path / "run") is not None


def test_a_second_run_in_the_same_folder_is_refused_as_busy(begin: Callable[..., tw.Run]) -> None:
    with begin(max_steps=FOR_EVER) as first:
        first.started(90)
        second = begin(max_steps=FOR_EVER)
        result = second.wait(90)
    assert (result.outcome, result.exit_code) == ("failed", 3)
    assert result.error is not None
    assert result.error.code == "busy"


def test_resuming_goes_on_where_the_run_stopped(begin: Callable[..., tw.Run]) -> None:
    with begin({"acts": [{"do": "await_order", "at": "boundary", "step": 3}]}, max_steps=20) as run:
        next(event for event in run if isinstance(event, Step))
        stopped = run.stop()
    with begin(max_steps=20) as run:
        started = run.started(90)
        steps = [event.step for event in run if isinstance(event, Step)]
    assert started.resumed_from == stopped.checkpoint
    assert steps == list(range(stopped.step + 1, 21))


def test_validate_reports_without_training(tmp_path: Path) -> None:
    config = {"model": "m", "data": "d", "run_dir": str(tmp_path / "run")}
    report = tw.validate(config, worker_args=["--engine", "fake"])
    assert report["valid"]
    assert report["config"]["batch_size"] == 8
    bad = tw.validate({**config, "learning_rate": "much"}, worker_args=["--engine", "fake"])
    assert not bad["valid"]
    assert bad["issues"][0]["path"] == "learning_rate"
    assert not (tmp_path / "run" / "events.jsonl").exists()


def test_a_command_that_cannot_be_run_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(tw.WorkerNotFound, match="no-such-program") as caught:
        tw.launch({"model": "m", "data": "d"}, command=[str(tmp_path / "no-such-program")])
    assert caught.value.command[-1] == "serve"
    with pytest.raises(tw.WorkerNotFound, match="nowhere"):
        tw.launch({"model": "m", "data": "d"}, cwd=tmp_path / "nowhere")


def test_rows_are_refused_when_the_config_has_data_or_when_they_are_no_objects(tmp_path: Path) -> None:
    config = {"model": "m", "run_dir": str(tmp_path / "run")}
    with pytest.raises(tw.ClientError, match="data and rows"):
        tw.launch({**config, "data": "d"}, rows=ROWS)
    with pytest.raises(tw.ClientError, match="Row 1 is no object"):
        tw.launch(config, rows=[3])  # type: ignore[list-item]
    with pytest.raises(tw.ClientError, match="Row 1 cannot be written"):
        tw.launch(config, rows=[{"text": {1, 2}}])
    with pytest.raises(tw.ClientError, match="empty"):
        tw.launch(config, rows=[])
    assert not any((tmp_path / "run" / "rows").iterdir())
