"""The engine dies, hangs, or says what is no report: the worker is still there to tell, and to start another."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from worker_driver import Spawn, Worker, children_of, is_gone, wait_until

LONG = {"max_steps": 20}


def died(end: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
    """Check the ending by a dead engine and give the details."""
    assert (end["outcome"], end["reason"], end["exit_code"]) == ("failed", "engine_died", 9)
    assert error["code"] == "engine_died"
    details: dict[str, Any] = error["details"]
    return details


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS"])
def test_a_death_by_signal_is_told_with_the_last_lines_and_the_last_checkpoint(run: Spawn, name: str) -> None:
    script = {
        "acts": [
            {"do": "print", "step": 12, "text": "the driver says farewell", "stream": "stderr"},
            {"do": "die", "step": 12, "signal": name},
        ]
    }
    worker = run(script=script, config=LONG)
    end = worker.finish()
    error = worker.of("error")[0]
    details = died(end, error)
    assert (details["signal"], details["exit_status"]) == (name, None)
    assert "the driver says farewell" in details["stderr"][-1]
    checkpoint = str(worker.run_dir / "checkpoint-000010")
    assert details["checkpoint"] == end["checkpoint"] == checkpoint
    assert (end["step"], end["resumable"]) == (11, True)
    assert ("memory" in error["hint"]) is (name == "SIGKILL")
    assert worker.lines[-2] == error


@pytest.mark.parametrize("status", [0, 1, 17, 139])
def test_an_exit_without_a_last_word_is_a_death_whatever_its_status(run: Spawn, status: int) -> None:
    worker = run(script={"acts": [{"do": "exit", "step": 3, "status": status}]}, config=LONG)
    details = died(worker.finish(), worker.of("error")[0])
    assert (details["signal"], details["exit_status"], details["checkpoint"]) == (None, status, None)


def test_open_commands_are_answered_before_the_end(serve: Spawn) -> None:
    worker = serve(config=LONG | {"max_steps": 100_000})
    worker.begin()
    worker.hold_engine()
    ids = [worker.send("checkpoint"), worker.send("pause"), worker.send("generate", prompt="a")]
    worker.result("status")
    os.kill(worker.engine_pid(), signal.SIGKILL)
    died(worker.finish(), worker.of("error")[0])
    assert [worker.reader.answer(id)["error"]["code"] for id in ids] == ["engine_died"] * 3


def test_a_death_while_loading_answers_start(serve: Spawn) -> None:
    worker = serve(script={"acts": [{"do": "die", "at": "load"}]})
    response = worker.start()
    assert response["error"]["code"] == "engine_died"
    assert worker.finish()["exit_code"] == 9


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("out_of_memory", 5),
        ("non_finite", 6),
        ("disk_full", 7),
        ("io_error", 7),
        ("model_load_failed", 4),
        ("dataset_invalid", 3),
        ("config_invalid", 3),
        ("resume_refused", 3),
        ("unsupported", 3),
        ("internal", 1),
        ("from_the_future", 1),
    ],
)
def test_a_failure_that_the_engine_tells_is_passed_on_with_its_exit_code(run: Spawn, code: str, status: int) -> None:
    act = {"do": "fail", "step": 7, "code": code, "message": "It failed.", "hint": "Do this.", "details": {"rows": [1]}}
    worker = run("--restarts", "3", script={"acts": [act]}, config=LONG)
    end = worker.finish()
    error = worker.of("error")[0]
    assert (error["message"], error["hint"], error["details"]) == ("It failed.", "Do this.", {"rows": [1]})
    assert error["code"] == (code if code != "from_the_future" else "internal")
    assert (end["outcome"], end["exit_code"]) == ("failed", status)
    assert end["checkpoint"] == worker.of("checkpoint")[-1]["path"]
    assert len(worker.of("attempt")) == 1, "only a death is followed by a restart"


def test_restarts_go_on_from_the_last_checkpoint_and_each_is_visible(run: Spawn) -> None:
    script = {"acts": [{"do": "die", "step": 8, "attempt": 1}, {"do": "die", "step": 12, "attempt": 2}]}
    worker = run("--restarts", "2", script=script, config=LONG)
    assert worker.finish()["outcome"] == "completed"
    attempts = worker.of("attempt")
    assert [(line["attempt"], line.get("resumed_from_step")) for line in attempts] == [(1, None), (2, 5), (3, 10)]
    told = [line for line in worker.of("log") if line.get("code") == "engine_died"]
    assert ["Restart 1 of 2" in told[0]["message"], "Restart 2 of 2" in told[1]["message"]] == [True, True]
    assert not worker.of("error")
    assert [line["step"] for line in worker.of("step")] == [*range(1, 8), *range(6, 12), *range(11, 21)]


def test_restarts_end_at_their_number(run: Spawn) -> None:
    script = {"acts": [{"do": "die", "step": 8}]}
    worker = run("--restarts", "2", script=script, config=LONG)
    end = worker.finish()
    died(end, worker.of("error")[0])
    assert len(worker.of("attempt")) == 3
    assert end["checkpoint"] == str(worker.run_dir / "checkpoint-000005")


def test_a_restart_answers_what_was_open_keeps_a_pause_and_takes_orders_meanwhile(serve: Spawn) -> None:
    script = {"load_ms": 30}
    worker = serve("--restarts", "1", script=script, config=LONG | {"max_steps": 100_000})
    worker.begin()
    worker.wait("checkpoint")
    worker.result("pause")
    saved = worker.of("checkpoint")[-1]["step"]
    worker.hold_engine()
    open_ = worker.send("checkpoint")
    os.kill(worker.engine_pid(), signal.SIGKILL)
    worker.wait("attempt", attempt=2)
    assert worker.reader.answer(open_)["error"]["code"] == "engine_died"
    assert worker.wait("paused")["step"] == saved
    assert worker.result("resume")["changed"]
    worker.wait("step", step=saved + 2)
    worker.send("stop")
    worker.finish()


def paused_before_the_first_update(worker: Worker) -> Worker:
    """Start the run and hold it at step 0."""
    worker.send("start", config=worker.config)
    worker.send("pause")
    worker.wait("paused", step=0)
    return worker


def test_a_restart_keeps_the_settings_that_were_made_since_the_checkpoint(serve: Spawn) -> None:
    acts = [{"do": "die", "step": 13, "attempt": attempt} for attempt in (1, 2)]
    steady = {"max_steps": 1000, "schedule": "constant", "warmup_steps": 0}
    worker = paused_before_the_first_update(serve("--restarts", "2", script={"acts": acts}, config=LONG | steady))
    for values in ({"learning_rate": 2e-3, "log_every": 1}, {"max_steps": 20}, {"learning_rate": 3e-3}):
        worker.result("resume", steps=4)
        worker.wait("paused")
        worker.result("set", values=values)
    worker.result("resume")
    end = worker.finish()
    assert (end["outcome"], end["step"], len(worker.of("attempt"))) == ("completed", 20, 3)
    second = worker.lines.index(worker.of("attempt")[1])
    changed = [line for line in worker.lines[second:] if line["type"] == "config_changed"]
    assert [line["effective_step"] for line in changed] == [11, 11]
    assert [line["changes"] for line in changed] == [{"learning_rate": {"from": 2e-3, "to": 3e-3}}] * 2
    assert all("cause" not in line for line in changed)
    rates = {line["learning_rate"] for line in worker.lines[second:] if line["type"] == "step"}
    assert rates == {3e-3}, "also the updates that are made again use them"


@pytest.mark.parametrize(("save_every", "again"), [(5, [6, 7, 8, 9, 10]), (10, list(range(1, 11)))])
def test_a_restart_keeps_to_the_updates_that_a_resume_counts(serve: Spawn, save_every: int, again: list[int]) -> None:
    act = {"do": "die", "step": 8, "attempt": 1}
    worker = serve("--restarts", "1", script={"acts": [act]}, config={"max_steps": 1000, "save_every": save_every})
    paused_before_the_first_update(worker).result("resume", id="counted", steps=10)
    worker.wait("attempt", attempt=2)
    paused = worker.wait("paused")
    assert (paused["step"], paused["cause"]) == (10, "counted")
    start = worker.lines.index(worker.of("attempt")[1])
    assert [line["step"] for line in worker.lines[start:] if line["type"] == "step"] == again
    worker.send("stop")
    worker.finish()


def test_a_restart_passes_over_a_broken_checkpoint_and_names_it(serve: Spawn) -> None:
    worker = serve("--restarts", "1", config=LONG | {"max_steps": 100_000})
    worker.begin()
    worker.wait("checkpoint", step=10)
    worker.hold_engine()
    (worker.run_dir / "checkpoint-000010" / "adapters.safetensors").write_bytes(b"")
    os.kill(worker.engine_pid(), signal.SIGKILL)
    assert worker.wait("attempt", attempt=2)["resumed_from_step"] == 5
    told = worker.wait("log", code="checkpoint_broken")
    assert told["details"]["path"] == str(worker.run_dir / "checkpoint-000010")
    worker.send("stop")
    worker.finish()


def test_a_start_that_is_open_is_answered_by_the_attempt_that_gets_through(serve: Spawn) -> None:
    worker = serve("--restarts", "1", script={"acts": [{"do": "die", "at": "load", "attempt": 1}]}, config=LONG)
    response = worker.start()
    assert response["ok"]
    assert worker.finish()["outcome"] == "completed"


def test_a_stop_during_a_restart_ends_the_run(serve: Spawn) -> None:
    worker = serve("--restarts", "1", script={"load_ms": 600_000}, config=LONG)
    worker.send("start", config=worker.config)
    worker.wait("status", activity="load")
    os.kill(worker.engine_pid(), signal.SIGKILL)
    worker.wait("log", code="engine_died")
    worker.send("stop")
    assert worker.finish()["outcome"] == "stopped"


def test_an_engine_that_hangs_when_it_leaves_gets_a_bounded_time(run: Spawn) -> None:
    worker = run("--exit-grace", "0.1", script={"acts": [{"do": "hang", "at": "exit"}]}, config=LONG)
    end = worker.finish()
    assert (end["outcome"], end["exit_code"]) == ("completed", 0)


def test_an_engine_that_closes_its_channel_and_goes_on_is_ended(run: Spawn) -> None:
    acts = [{"do": "await_order", "at": "boundary", "step": 6}, {"do": "close_channel", "step": 7}]
    worker = run("--exit-grace", "0.1", script={"acts": acts, "ignore_close": True}, config=LONG | {"max_steps": 10**5})
    worker.wait("step", step=6)
    engine = worker.engine_pid()
    worker.send("checkpoint")
    end = worker.finish()
    error = worker.of("error")[0]
    died(end, error)
    assert "did not leave within 0.1 s" in error["message"]
    assert is_gone(engine)


@pytest.mark.parametrize("kind", ["garbage", "unknown_type", "missing_field", "bad_text", "oversize"])
def test_bytes_that_are_no_report_end_the_engine_gracefully_and_the_run_with_an_error(run: Spawn, kind: str) -> None:
    worker = run(
        "--exit-grace",
        "5",
        script={"acts": [{"do": "frame", "step": 7, "kind": kind}]},
        config=LONG | {"max_steps": 10**5},
    )
    end = worker.finish()
    error = worker.of("error")[0]
    died(end, error)
    assert "no report" in error["message"]
    saved = [int(path.name[-6:]) for path in worker.run_dir.glob("checkpoint-*")]
    assert max(saved) >= 7, "the engine has saved what it had"


def test_half_a_report_is_a_death(run: Spawn) -> None:
    worker = run(script={"acts": [{"do": "frame", "step": 7, "kind": "half"}]}, config=LONG)
    died(worker.finish(), worker.of("error")[0])


def test_a_child_that_the_engine_leaves_behind_holds_nobody_up(run: Spawn) -> None:
    worker = run(script={"acts": [{"do": "spawn", "step": 2, "ms": 3000}]}, config=LONG)
    assert worker.finish()["outcome"] == "completed"


def test_a_failed_save_costs_a_log_and_the_run_goes_on(run: Spawn) -> None:
    act = {"do": "fail", "at": "save", "step": 5, "code": "disk_full", "message": "No space is left."}
    worker = run(script={"acts": [act]}, config=LONG)
    assert worker.finish()["outcome"] == "completed"
    assert [line["details"]["step"] for line in worker.of("log") if line.get("code") == "save_failed"] == [5]
    assert [line["step"] for line in worker.of("checkpoint")] == [10, 15, 20]


def test_a_failed_final_save_ends_a_run_and_pauses_one_that_is_served(run: Spawn, serve: Spawn) -> None:
    act = {"do": "fail", "at": "final", "attempt": 1, "code": "disk_full", "message": "No space is left."}
    alone = run(script={"acts": [act]}, config=LONG)
    end = alone.finish()
    assert (end["reason"], end["exit_code"]) == ("disk_full", 7)
    served = serve(script={"acts": [act]}, config=LONG | {"run_dir": str(alone.folder / "other")})
    served.start()
    paused = served.wait("paused")
    assert (paused["step"], served.result("status")["phase"]) == (20, "paused")
    told = [line for line in served.of("log") if line["level"] == "error"]
    assert [line["code"] for line in told] == ["save_failed"]
    served.send("stop")
    served.finish()


def test_the_last_steps_of_a_dying_engine_are_not_lost(run: Spawn) -> None:
    script = {"step_ms": 0, "acts": [{"do": "exit", "step": 4000}]}
    worker = run(script=script, config={"max_steps": 10_000, "save_every": 0})
    worker.finish()
    assert sum(line["updates"] for line in worker.of("step")) == 3999


def test_no_process_is_left_behind(run: Spawn) -> None:
    worker = run(config={"max_steps": 100_000})
    worker.wait("step")
    engine = worker.engine_pid()
    assert engine in children_of(worker.pid)
    worker.send("stop")
    worker.finish()
    wait_until(lambda: is_gone(engine), "the engine is gone")
