"""`validate` before a run, `linger` after it, and the heartbeat in between."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from worker_driver import Spawn

LONG = {"max_steps": 100_000}


def test_validate_resolves_a_good_config_and_leaves_no_trace(serve: Spawn) -> None:
    worker = serve(script={"step_ms": 20})
    result = worker.result("validate", config=worker.config)
    assert (result["valid"], result["issues"]) == (True, [])
    assert result["config"]["warmup_steps"] is not None
    assert result["data"][0]["split"] == "train"
    assert not worker.run_dir.exists()
    assert worker.result("status")["phase"] == "idle"
    worker.send("stop")
    worker.finish()


def test_validate_names_every_issue_of_a_bad_config_without_an_engine(serve: Spawn) -> None:
    worker = serve(script={"acts": [{"do": "hang", "at": "load"}]})
    result = worker.result("validate", config={"model": "m", "dat": "d", "batch_size": 0})
    assert not result["valid"]
    assert {issue["path"] for issue in result["issues"]} == {"dat", "batch_size", "data"}
    assert all(issue["message"].endswith((".", "?")) for issue in result["issues"])
    assert worker.refusal("validate") == "bad_params"
    worker.send("stop")
    worker.finish()


@pytest.mark.parametrize(
    ("change", "path"),
    [({"revision": "main"}, "revision"), ({"chat_template_args": {"n": [2**53]}}, "chat_template_args")],
)
def test_validate_names_what_only_a_closer_look_finds(serve: Spawn, change: dict[str, object], path: str) -> None:
    worker = serve()
    result = worker.result("validate", config={**worker.config, **change})
    assert [issue["path"] for issue in result["issues"]] == [path]
    worker.send("stop")
    worker.finish()


@pytest.mark.parametrize("moment", ["load", "tokenize"])
def test_validate_says_what_is_wrong_with_model_or_data(serve: Spawn, moment: str) -> None:
    code = {"load": "model_load_failed", "tokenize": "dataset_invalid"}[moment]
    worker = serve(script={"acts": [{"do": "fail", "at": moment, "code": code, "message": "No."}]})
    result = worker.result("validate", config=worker.config)
    assert not result["valid"]
    assert [(issue["code"], issue["message"]) for issue in result["issues"]] == [(code, "No.")]
    worker.send("stop")
    worker.finish()


def test_validate_says_whether_the_run_folder_can_be_used(serve: Spawn, tmp_path: Path) -> None:
    running = serve(config={"max_steps": 10**6})
    running.begin()
    worker = serve()
    result = worker.result("validate", config=worker.config)
    assert [(issue["path"], issue["code"]) for issue in result["issues"]] == [("run_dir", "busy")]
    assert str(running.pid) in result["issues"][0]["message"]
    assert (result["valid"], result["total_steps"]) == (False, 20), "the rest is told too"
    running.send("stop")
    running.finish()
    assert worker.result("validate", config=worker.config)["valid"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "novel.txt").write_text("It was a dark and stormy night.")
    for name in ("other", "other/novel.txt"):
        (issue,) = worker.result("validate", config=worker.config | {"run_dir": str(tmp_path / name)})["issues"]
        assert (issue["path"], issue["code"]) == ("run_dir", "resume_refused")
    worker.close_input()
    worker.finish()


def test_a_dead_engine_is_the_answer_to_validate_and_the_worker_lives(serve: Spawn) -> None:
    worker = serve(script={"acts": [{"do": "die", "at": "load", "attempt": 1}]})
    assert worker.refusal("validate", config=worker.config) == "engine_died"
    assert worker.result("status")["phase"] == "idle"
    worker.send("stop")
    worker.finish()


def test_checks_and_a_start_that_overlap_are_taken_one_after_the_other(serve: Spawn) -> None:
    worker = serve(config={"max_steps": 3})
    ids = [worker.send("validate", config=worker.config) for _ in range(3)]
    start = worker.send("start", config=worker.config)
    late = worker.send("validate", config=worker.config)
    assert all(worker.reader.answer(id)["result"]["valid"] for id in ids)
    assert worker.reader.answer(start)["ok"]
    assert worker.finish()["outcome"] == "completed"
    assert worker.reader.answer(late)["error"]["code"] == "wrong_state"
    answered = [line["id"] for line in worker.of("response")]
    assert answered[:3] == ids


@pytest.mark.parametrize("on_eof", [None, "stop"])
def test_the_end_of_input_waits_for_a_check_and_then_ends_an_idle_worker(serve: Spawn, on_eof: str | None) -> None:
    worker = serve(*(["--on-eof", on_eof] if on_eof else []))
    worker.send("validate", config=worker.config)
    worker.close_input()
    end = worker.finish()
    assert (end["outcome"], end["exit_code"]) == ("stopped", 0)
    assert worker.of("response")[0]["result"]["valid"]


def test_a_stop_ends_a_check(serve: Spawn) -> None:
    worker = serve(script={"acts": [{"do": "hang", "at": "load"}]})
    id = worker.send("validate", config=worker.config)
    waiting = worker.send("start", config=worker.config)
    worker.send("stop")
    worker.finish()
    for open_ in (id, waiting):
        assert worker.reader.answer(open_)["error"]["code"] == "shutting_down"


def test_a_run_that_lingers_answers_eval_and_generate_until_it_is_stopped(serve: Spawn) -> None:
    worker = serve(script={"valid_examples": 8, "completion": "Still here"}, config={"max_steps": 3})
    worker.start(linger=True)
    complete = worker.wait("complete")
    status = [line for line in worker.of("status") if line["phase"] == "lingering"]
    assert len(status) == 1
    assert worker.result("generate", prompt="Hello")["text"] == "Still here"
    assert worker.result("eval")["tokens"] > 0
    id = worker.send("stop")
    end = worker.finish()
    assert (end["outcome"], end["reason"], end["exit_code"], end["step"]) == ("completed", "stop", 0, 3)
    assert end["checkpoint"] == str(worker.run_dir / "final")
    assert worker.reader.answer(id)["result"]["outcome"] == "completed"
    assert complete["reason"] == "finished"


@pytest.mark.parametrize("mode", ["run", "serve"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_end_of_input_ends_a_run_that_lingers_whenever_it_comes(
    request: pytest.FixtureRequest, mode: str, when: str
) -> None:
    spawn: Spawn = request.getfixturevalue(mode)
    if mode == "run":
        worker = spawn("--linger", config={"max_steps": 3})
    else:
        worker = spawn("--on-detach", "continue", config={"max_steps": 3})
        worker.start(linger=True)
    if when == "after":
        worker.wait("status", phase="lingering")
        worker.send("ping", "still there")
        assert worker.reader.answer("still there")["ok"]
    worker.close_input()
    end = worker.finish()
    assert (end["outcome"], end["exit_code"]) == ("completed", 0)
    assert worker.of("complete")


def test_a_signal_ends_a_run_that_lingers_as_completed(run: Spawn) -> None:
    worker = run("--linger", config={"max_steps": 3})
    worker.wait("status", phase="lingering")
    worker.process.terminate()
    end = worker.finish()
    assert (end["outcome"], end["reason"], end["exit_code"]) == ("completed", "signal SIGTERM", 0)


def test_a_heartbeat_comes_while_nothing_else_is_said_and_shows_a_silent_engine(serve: Spawn) -> None:
    worker = serve("--heartbeat", "0.05", script={"acts": [{"do": "hang", "step": 3}]}, config=LONG)
    idle = worker.wait("heartbeat")
    assert (idle["phase"], idle["step"], idle["last_seq"]) == ("idle", 0, 0)
    worker.begin()
    worker.wait("step", step=2)
    beats = [worker.wait("heartbeat") for _ in range(5)]
    ages = [beat["loop_age_ms"] for beat in beats]
    assert ages == sorted(ages)
    assert ages[-1] > ages[0] >= 0
    assert beats[-1]["up_ms"] > beats[0]["up_ms"]
    newest = worker.of("step")[-1]
    assert (beats[-1]["phase"], beats[-1]["activity"], beats[-1]["step"]) == ("running", "train", 2)
    assert beats[-1]["last_seq"] == newest["seq"]
    assert beats[-1]["queue"] == {"lines": 0, "bytes": 0}
    assert "seq" not in beats[-1]


def test_no_heartbeat_while_events_come_nor_when_it_is_turned_off(serve: Spawn) -> None:
    worker = serve("--heartbeat", "90", script={"step_ms": 20}, config={"max_steps": 10})
    worker.start()
    worker.finish()
    assert not worker.of("heartbeat")
    silent = serve("--heartbeat", "0")
    silent.wait("hello")
    deadline = time.monotonic() + 0.3
    with pytest.raises(AssertionError, match="nothing more came in time"):
        silent.reader.read_some(deadline)
    assert [line["type"] for line in silent.lines] == ["hello"]


def test_under_run_the_heartbeat_is_off_until_a_command_came(run: Spawn) -> None:
    worker = run("--heartbeat", "0.05", script={"load_ms": 400}, config=LONG)
    worker.wait("init")
    assert not worker.of("heartbeat")
    worker.hold_engine()
    worker.send("ping")
    worker.wait("heartbeat")
    worker.let_engine_go()
    worker.send("stop")
    worker.finish()


def test_pings_are_answered_at_once_while_the_engine_hangs(serve: Spawn) -> None:
    worker = serve(script={"acts": [{"do": "hang", "step": 2}]}, config=LONG)
    worker.begin()
    for _ in range(50):
        worker.result("ping")
    assert worker.result("status")["loop_age_ms"] > 0
