"""Signals: the first is graceful and announced at once, a later one ends, and those of a terminal mean the worker."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from worker_driver import Spawn, Worker, children_of, is_gone, wait_until

from trainwire_worker.options import parse
from trainwire_worker.timers import Timers

LONG = {"max_steps": 100_000, "save_every": 0}


def running(spawn: Spawn, *words: str, **settings: Any) -> Worker:
    """Start a run and wait for its first update."""
    worker = spawn(*words, **{"config": LONG, **settings})
    worker.wait("step")
    return worker


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_the_first_signal_saves_and_leaves(run: Spawn, name: str) -> None:
    worker = running(run)
    worker.signal(getattr(signal, name))
    end = worker.finish()
    assert (end["outcome"], end["reason"], end["exit_code"]) == ("interrupted", f"signal {name}", 21)
    assert end["checkpoint"].endswith(f"checkpoint-{end['step']:06d}")
    assert end["resumable"]
    command = worker.of("command")[-1]
    assert (command["cmd"], command["source"], command["parameters"]) == ("stop", "signal", {"signal": name})


def test_a_signal_is_announced_at_once_in_the_middle_of_a_long_step(run: Spawn) -> None:
    worker = running(run, script={"acts": [{"do": "hang", "step": 2}]})
    worker.signal(signal.SIGTERM)
    worker.wait("command", cmd="stop")
    worker.wait("status", phase="stopping")
    os.kill(worker.engine_pid(), signal.SIGKILL)
    worker.finish()


def test_a_second_signal_within_the_grace_is_ignored(run: Spawn) -> None:
    worker = running(run, "--signal-grace", "900")
    worker.hold_engine()
    worker.signal(signal.SIGINT)
    worker.wait("status", phase="stopping")
    worker.signal(signal.SIGINT)
    worker.signal(signal.SIGTERM)
    worker.send("ping")
    worker.wait("response")
    worker.let_engine_go()
    end = worker.finish()
    assert (end["reason"], end["exit_code"]) == ("signal SIGINT", 21)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_second_signal_after_the_grace_ends_at_once(run: Spawn, name: str) -> None:
    worker = running(run, "--signal-grace", "0", script={"acts": [{"do": "hang", "step": 2}]})
    engine = worker.engine_pid()
    worker.signal(signal.SIGTERM)
    worker.wait("status", phase="stopping")
    number = getattr(signal, name)
    worker.signal(number)
    end = worker.finish()
    assert (end["outcome"], end["exit_code"]) == ("interrupted", 128 + number)
    assert is_gone(engine)


@pytest.mark.timeout(10)
def test_a_timer_of_no_length_lets_the_loop_have_its_turn() -> None:
    timers, calls = Timers(), list[int]()

    def again() -> None:
        calls.append(1)
        timers.after(0, again)

    again()
    timers.run_due()
    timers.run_due()
    assert 1 <= len(calls) <= 3


def test_the_timers_are_as_documented_unless_an_argument_says_otherwise() -> None:
    options = parse(["serve"], {})
    assert (options.signal_grace, options.stop_grace, options.heartbeat, options.lock_wait) == (1.0, 2.0, 5.0, 30.0)


def test_the_first_cause_decides_reason_and_code(serve: Spawn) -> None:
    worker = serve(config=LONG)
    worker.begin()
    worker.hold_engine()
    worker.send("stop")
    worker.wait("status", phase="stopping")
    worker.signal(signal.SIGTERM)
    worker.close_input()
    worker.let_engine_go()
    end = worker.finish()
    assert (end["outcome"], end["reason"], end["exit_code"]) == ("stopped", "stop", 0)


def test_a_stop_behind_a_signal_is_answered_with_the_ending_that_the_signal_caused(serve: Spawn) -> None:
    worker = serve(config=LONG)
    worker.begin()
    worker.hold_engine()
    worker.signal(signal.SIGTERM)
    worker.wait("status", phase="stopping")
    stop = worker.send("stop")
    worker.result("ping")
    worker.let_engine_go()
    end = worker.finish()
    assert (end["outcome"], end["exit_code"]) == ("interrupted", 21)
    assert worker.reader.answer(stop)["result"]["outcome"] == "interrupted"


@pytest.mark.parametrize("script", [{"load_ms": 600_000}, {"acts": [{"do": "hang", "at": "load"}]}])
def test_a_signal_before_the_first_update_does_not_wait_for_the_model(run: Spawn, script: dict[str, Any]) -> None:
    worker = run("--stop-grace", "0.1", script=script)
    worker.wait("status", activity="load")
    worker.signal(signal.SIGINT)
    end = worker.finish()
    assert (end["outcome"], end["exit_code"], end["step"]) == ("interrupted", 21, 0)


def test_a_signal_to_an_idle_worker_ends_it(serve: Spawn) -> None:
    worker = serve()
    worker.wait("hello")
    worker.signal(signal.SIGTERM)
    assert worker.finish()["exit_code"] == 21


def ignoring(*numbers: int) -> dict[str, Any]:
    """Start a process as `nohup` or a shell's `&` does."""

    def ignore() -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)

    return {"preexec_fn": ignore}


def test_a_signal_that_was_ignored_at_the_start_stays_ignored(run: Spawn) -> None:
    worker = running(run, **ignoring(signal.SIGHUP, signal.SIGINT), config=LONG | {"max_steps": 100_000})
    worker.signal(signal.SIGHUP)
    worker.signal(signal.SIGINT)
    worker.send("ping", 1)
    assert worker.reader.answer(1)["ok"]
    assert worker.result("status")["phase"] == "running"
    worker.signal(signal.SIGTERM)
    assert worker.finish()["reason"] == "signal SIGTERM"


def test_a_signal_to_the_whole_group_ends_the_run_by_the_worker_s_hand(run: Spawn) -> None:
    worker = running(run, start_new_session=True)
    os.killpg(worker.pid, signal.SIGINT)
    end = worker.finish()
    assert (end["outcome"], end["exit_code"]) == ("interrupted", 21)
    assert end["checkpoint"]


def test_a_signal_to_the_group_while_the_engine_starts_does_not_kill_it(run: Spawn) -> None:
    """The engine is deaf from its first instruction on, before it can say so itself."""
    worker = run(start_new_session=True, script={"load_ms": 50}, config=LONG)
    worker.wait("attempt")
    wait_until(lambda: children_of(worker.pid), "the engine is there")
    os.killpg(worker.pid, signal.SIGTSTP)
    os.killpg(worker.pid, signal.SIGCONT)
    os.killpg(worker.pid, signal.SIGTERM)
    end = worker.finish()
    assert (end["outcome"], end["reason"]) == ("interrupted", "signal SIGTERM")


def test_a_stopped_worker_goes_on_where_it_was(run: Spawn) -> None:
    worker = running(run)
    engine = worker.engine_pid()
    worker.signal(signal.SIGSTOP)
    wait_until(lambda: _state(worker.pid) == "T", "the worker stands still")
    before = _processor_ticks(engine)
    wait_until(lambda: _processor_ticks(engine) > before, "the engine trains on")
    worker.signal(signal.SIGCONT)
    worker.send("stop")
    end = worker.finish()
    assert end["outcome"] == "stopped"
    assert sum(line["updates"] for line in worker.of("step")) == end["step"]


def test_a_run_whose_processes_all_stand_still_for_a_while_goes_on(run: Spawn) -> None:
    worker = running(run, "--exit-grace", "0.2", "--stop-grace", "0.2", start_new_session=True)
    both = (worker.pid, worker.engine_pid())
    os.killpg(worker.pid, signal.SIGSTOP)
    wait_until(lambda: [_state(pid) for pid in both] == ["T", "T"], "both stand still")
    # Longer than every grace: what was due meanwhile finds a run that lives.
    select.select([], [], [], 0.5)
    os.killpg(worker.pid, signal.SIGCONT)
    worker.send("ping", "awake")
    assert worker.reader.answer("awake")["ok"]
    worker.send("stop")
    end = worker.finish()
    assert (end["outcome"], end["exit_code"]) == ("stopped", 0)
    assert sum(line["updates"] for line in worker.of("step")) == end["step"]


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def _processor_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def test_a_broken_pipe_on_stderr_is_no_reason_to_end(run: Spawn) -> None:
    read_fd, write_fd = os.pipe()
    worker = run(
        "--progress", "on", stderr=write_fd, config={"max_steps": 10}, script={"acts": [{"do": "print", "step": 2}]}
    )
    os.close(write_fd)
    os.close(read_fd)
    assert worker.finish()["outcome"] == "completed"


def test_a_stderr_that_nobody_reads_holds_nobody_up(run: Spawn) -> None:
    read_fd, write_fd = os.pipe()
    script = {"acts": [{"do": "print", "step": 2, "repeat": 50_000}, {"do": "print", "step": 3, "repeat": 50_000}]}
    worker = run("--progress", "on", stderr=write_fd, config={"max_steps": 10}, script=script)
    os.close(write_fd)
    assert worker.finish()["outcome"] == "completed"
    os.close(read_fd)


def test_nohup_and_logout(run: Spawn, tmp_path: Any) -> None:
    probe = run(config={"max_steps": 30})
    probe.finish()
    command = ["nohup", *probe.command, f"run_dir={tmp_path / 'second'}"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b'{"type":"hello"')
    os.killpg(process.pid, signal.SIGHUP)
    rest = process.stdout.read()
    assert b'"outcome":"completed"' in rest.splitlines()[-1]
    assert process.wait() == 0
    process.stdout.close()
