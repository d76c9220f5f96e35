"""Every command in every phase: what it does, what it answers, and when."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from worker_driver import Spawn, Worker

ALL = (
    ("validate", {"config": {}}),
    ("start", {"config": {}}),
    ("pause", {}),
    ("resume", {}),
    ("checkpoint", {}),
    ("set", {"values": {"save_every": 7}}),
    ("eval", {}),
    ("generate", {"prompt": "Hello"}),
    ("status", {}),
    ("replay", {"to_seq": 2}),
    ("ping", {}),
    ("detach", {}),
)
LONG = {"max_steps": 100_000}
ALWAYS = {"status", "ping", "detach"}
WITH_A_RUN = ALWAYS | {"replay"}
TRAINING = WITH_A_RUN | {"pause", "resume", "checkpoint", "set", "eval", "generate"}


def _idle(worker: Worker) -> None:
    worker.wait("hello")


def _loading(worker: Worker) -> None:
    worker.send("start", config=worker.config)
    worker.wait("status", activity="load")


def _preparing(worker: Worker) -> None:
    worker.send("start", config=worker.config)
    worker.wait("status", phase="preparing")


def _running(worker: Worker) -> None:
    worker.begin()


def _pausing(worker: Worker) -> None:
    worker.begin()
    worker.hold_engine()
    worker.send("pause")
    worker.wait("status", phase="pausing")


def _paused(worker: Worker) -> None:
    worker.begin()
    worker.result("pause")


def _stopping(worker: Worker) -> None:
    worker.begin()
    worker.hold_engine()
    worker.send("stop")
    worker.wait("status", phase="stopping")


def _lingering(worker: Worker) -> None:
    worker.start(linger=True, config={"max_steps": 2})
    worker.wait("status", phase="lingering")


PHASES: dict[str, tuple[Any, set[str], str, dict[str, Any]]] = {
    "idle": (_idle, ALWAYS, "wrong_state", {}),
    "loading": (_loading, WITH_A_RUN | {"pause"}, "wrong_state", {"load_ms": 600_000}),
    "preparing": (_preparing, WITH_A_RUN | {"pause"}, "wrong_state", {"tokenize_ms": 600_000}),
    "running": (_running, TRAINING, "wrong_state", {}),
    "pausing": (_pausing, TRAINING, "wrong_state", {}),
    "paused": (_paused, TRAINING, "wrong_state", {}),
    "stopping": (_stopping, WITH_A_RUN, "shutting_down", {}),
    "lingering": (_lingering, WITH_A_RUN | {"eval", "generate"}, "wrong_state", {}),
}
"""For each phase: the way into it, the commands that are taken, the code of the others, and the script."""


@pytest.mark.parametrize("phase", PHASES)
def test_each_phase_takes_its_commands_and_refuses_the_others_before_any_effect(serve: Spawn, phase: str) -> None:
    enter, taken, code, script = PHASES[phase]
    worker = serve(script={"valid_examples": 8, **script}, config=LONG)
    enter(worker)
    refused = {}
    for cmd, parameters in ALL:
        if cmd not in taken and not (phase == "idle" and cmd in ("validate", "start")):
            refused[cmd] = worker.send(cmd, **parameters)
    assert {cmd: worker.reader.answer(id)["error"]["code"] for cmd, id in refused.items()} == dict.fromkeys(
        refused, code
    )
    assert worker.result("status")["phase"] == phase
    ids = [worker.send(cmd, **parameters) for cmd, parameters in ALL if cmd in taken]
    if phase in ("loading", "preparing"):
        # The pause takes effect at the first boundary, which this run does not reach.
        worker.send("stop")
        ids.remove(next(id for id in ids if id.startswith("pause")))
    if phase in ("pausing", "stopping"):
        worker.let_engine_go()
    responses = [worker.reader.answer(id) for id in ids]
    assert all(response["ok"] for response in responses), responses
    if phase not in ("loading", "preparing", "stopping"):
        worker.send("stop")
    assert worker.finish()["outcome"] == ("completed" if phase == "lingering" else "stopped")


def test_pause_takes_effect_at_the_boundary_and_is_true_when_it_is_said(serve: Spawn) -> None:
    worker = serve(script={"acts": [{"do": "await_order", "at": "boundary", "step": 4}]}, config=LONG)
    worker.begin()
    worker.wait("step", step=4)
    response = worker.ask("pause")
    paused = worker.of("paused")[-1]
    assert response["result"] == {"step": 4, "changed": True}
    assert (paused["step"], paused["cause"], response["at_seq"]) == (4, response["id"], paused["seq"])
    around = [line for line in worker.lines if line["type"] in ("command", "status", "paused", "response")][-5:]
    assert [(line["type"], line.get("phase") or line.get("cmd")) for line in around] == [
        ("command", "pause"),
        ("status", "pausing"),
        ("status", "paused"),
        ("paused", None),
        ("response", "pause"),
    ]
    steps = len(worker.of("step"))
    worker.result("status")
    assert len(worker.of("step")) == steps
    worker.send("stop")
    worker.finish()


def test_a_second_pause_and_a_resume_while_running_change_nothing_and_say_no_event(serve: Spawn) -> None:
    worker = serve(config=LONG)
    worker.begin()
    assert worker.result("resume")["changed"] is False
    assert worker.result("resume", steps=3)["changed"] is False
    worker.result("pause")
    assert worker.result("pause")["changed"] is False
    assert [line["cmd"] for line in worker.of("command")] == ["start", "pause"]
    assert len(worker.of("paused")) == 1
    assert not worker.of("resumed")
    worker.send("stop")
    worker.finish()


def test_pause_yields_also_in_the_middle_of_an_evaluation(serve: Spawn) -> None:
    script = {"valid_examples": 800_000, "eval_ms": 5}
    worker = serve(script=script, config=LONG | {"eval_every": 3})
    worker.begin()
    worker.wait("step", step=3)
    assert worker.result("pause") == {"step": 3, "changed": True}
    assert not worker.of("eval_end")
    worker.send("stop")
    worker.finish()


def test_a_pause_before_the_first_update_holds_there(serve: Spawn) -> None:
    worker = serve(script={"acts": [{"do": "await_order", "at": "load"}]}, config=LONG)
    worker.send("start", config=worker.config)
    worker.wait("status", activity="load")
    assert worker.result("pause") == {"step": 0, "changed": True}
    assert worker.of("init")
    assert not worker.of("step")
    assert worker.result("resume")["changed"] is True
    worker.wait("step")
    worker.send("stop")
    worker.finish()


def test_resume_with_steps_runs_that_many_and_pauses_again(serve: Spawn) -> None:
    worker = serve(config=LONG)
    worker.begin()
    at = worker.result("pause")["step"]
    for round_ in (1, 2):
        id = worker.send("resume", steps=3)
        response = worker.reader.answer(id)
        assert response["result"] == {"step": at, "changed": True}
        resumed = worker.wait("resumed", cause=id)
        assert response["at_seq"] == resumed["seq"]
        at += 3
        paused = worker.wait("paused")
        assert (paused["step"], paused["cause"]) == (at, id), round_
        assert [line["step"] for line in worker.of("step")][-3:] == [at - 2, at - 1, at]
    worker.send("stop")
    worker.finish()


def test_a_plain_resume_lifts_the_count(serve: Spawn) -> None:
    worker = serve(config=LONG)
    worker.begin()
    at = worker.result("pause")["step"]
    worker.result("resume", steps=50_000)
    assert worker.result("resume")["changed"] is True
    worker.wait("step", step=at + 5)
    assert len(worker.of("paused")) == 1
    assert worker.result("resume")["changed"] is False
    worker.send("stop")
    worker.finish()


def test_checkpoint_gives_a_whole_one_and_does_not_write_a_step_twice(serve: Spawn) -> None:
    worker = serve(config=LONG | {"save_every": 0})
    worker.begin()
    worker.result("pause")
    response = worker.ask("checkpoint", name="by-hand_1.0")
    event = worker.wait("checkpoint")
    result = response["result"]
    assert result == {
        "path": str(worker.run_dir / "by-hand_1.0"),
        "step": event["step"],
        "bytes": event["bytes"],
        "changed": True,
    }
    assert (event["kind"], event["cause"], response["at_seq"]) == ("manual", response["id"], event["seq"])
    assert (worker.run_dir / "by-hand_1.0" / "manifest.json").is_file()
    again = worker.result("checkpoint")
    assert (again["changed"], again["step"]) == (False, result["step"])
    assert len(worker.of("checkpoint")) == 1
    worker.send("stop")
    worker.finish()


@pytest.mark.parametrize("name", ["events.jsonl", "run.lock", "config.json", "final", "best", "checkpoint-000001"])
def test_a_checkpoint_takes_no_name_that_the_run_uses(serve: Spawn, name: str) -> None:
    worker = serve(config=LONG)
    worker.begin()
    assert worker.refusal("checkpoint", name=name) == "bad_params"
    worker.send("stop")
    worker.finish()
    worker.log()


@pytest.mark.parametrize("name", ["", ".hidden", "-x", "a/b", "..", "a\n", "ä", "x" * 65, 7, None])
def test_a_checkpoint_name_is_a_plain_file_name(serve: Spawn, name: Any) -> None:
    worker = serve(config=LONG)
    worker.begin()
    if name is not None:
        assert worker.refusal("checkpoint", name=name) == "bad_params"
    (worker.run_dir / "notes").write_text("mine")
    assert worker.refusal("checkpoint", name="notes") == "bad_params"
    assert (worker.run_dir / "notes").read_text() == "mine"
    worker.send("stop")
    worker.finish()


def test_set_changes_all_values_or_none(serve: Spawn) -> None:
    worker = serve(config=LONG)
    worker.begin()
    response = worker.ask("set", values={"learning_rate": 0.5, "save_every": 3})
    result, event = response["result"], worker.wait("config_changed")
    assert result["applied"] == {"learning_rate": 0.5, "save_every": 3}
    assert result["previous"] == {"learning_rate": 1e-4, "save_every": 5}
    assert event["changes"]["save_every"] == {"from": 5, "to": 3}
    assert event["effective_step"] == result["effective_step"]
    assert event["cause"] == response["id"]
    first = worker.wait("step")
    assert first["step"] == result["effective_step"]
    for values, code in (
        ({"save_every": 4, "batch_size": 2}, "unknown_param"),
        ({"save_every": 4, "nothing": 2}, "unknown_param"),
        ({"save_every": 4, "learning_rate": -1}, "bad_params"),
        ({"save_every": "often"}, "bad_params"),
        ({"save_every": 1.5}, "bad_params"),
        ({"learning_rate": None}, "bad_params"),
        ({}, "bad_params"),
    ):
        assert worker.refusal("set", values=values) == code, values
    assert worker.result("set", values={"save_every": 3})["previous"] == {"save_every": 3}
    worker.send("stop")
    worker.finish()


def test_set_moves_the_end_of_the_run(serve: Spawn) -> None:
    worker = serve(config=LONG)
    worker.begin()
    step = worker.result("pause")["step"]
    worker.result("set", values={"max_steps": step + 2})
    worker.result("resume")
    end = worker.finish()
    assert (end["outcome"], end["step"]) == ("completed", step + 2)


def test_eval_and_generate_answer_with_what_the_model_says(serve: Spawn) -> None:
    worker = serve(script={"valid_examples": 8, "completion": "Good day", "base_completion": "Hm"}, config=LONG)
    worker.begin()
    response = worker.ask("eval", max_batches=1)
    event = worker.wait("eval_end")
    assert response["result"]["valid_loss"] == event["valid_loss"]
    assert (response["at_seq"], event["cause"]) == (event["seq"], response["id"])
    assert worker.result("generate", prompt="Hello", max_tokens=5)["text"] == "Good day"
    messages = [{"role": "user", "content": "Hello"}]
    assert worker.result("generate", messages=messages, adapter=False)["text"] == "Hm"
    assert worker.refusal("generate") == "bad_params"
    assert worker.refusal("generate", prompt="a", messages=messages) == "bad_params"
    assert worker.refusal("generate", prompt="a", max_tokens=0) == "bad_params"
    worker.send("stop")
    worker.finish()


def test_eval_without_data_is_refused_and_the_run_goes_on(serve: Spawn) -> None:
    worker = serve(config=LONG)
    worker.begin()
    assert worker.refusal("eval") == "wrong_state"
    worker.wait("step")
    worker.send("stop")
    worker.finish()


def test_stop_saves_and_ends_with_success(serve: Spawn) -> None:
    worker = serve(config=LONG | {"save_every": 0})
    worker.begin()
    id = worker.send("stop")
    end = worker.finish()
    result = worker.reader.answer(id)["result"]
    assert (end["outcome"], end["reason"], end["exit_code"], end["resumable"]) == ("stopped", "stop", 0, True)
    assert result == {"outcome": "stopped", "step": end["step"], "checkpoint": end["checkpoint"]}
    assert end["checkpoint"] == str(worker.run_dir / f"checkpoint-{end['step']:06d}")
    assert not worker.of("complete")
    assert not end["step"] % 20 or worker.of("epoch_end", "step")[-1]["type"] == "step", "no epoch ends by a stop"


def test_stop_without_saving_leaves_no_checkpoint(serve: Spawn) -> None:
    worker = serve(config=LONG | {"save_every": 0})
    worker.begin()
    worker.send("stop", save=False)
    assert worker.finish()["checkpoint"] is None
    assert not worker.of("checkpoint")


def test_updates_that_wait_for_log_every_count_and_a_stop_saves_them(serve: Spawn) -> None:
    script = {"acts": [{"do": "sleep", "step": 3, "ms": 500}]}
    config = {"max_steps": 100, "log_every": 50, "save_every": 0}
    worker = serve("--stop-grace", "0.05", script=script, config=config)
    worker.start()
    while worker.result("status")["step"] < 2:
        assert not worker.of("step", "end")
    worker.send("stop")
    end = worker.finish()
    assert worker.of("step")[0]["updates"] == end["step"] >= 3
    assert end["checkpoint"] == str(worker.run_dir / f"checkpoint-{end['step']:06d}")


@pytest.mark.parametrize(
    "script", [{"load_ms": 600_000}, {"acts": [{"do": "hang", "at": "load"}]}], ids=["load", "hang"]
)
def test_stop_before_the_first_update_does_not_wait_for_the_model(serve: Spawn, script: dict[str, Any]) -> None:
    worker = serve("--stop-grace", "0.2", script=script)
    start = worker.send("start", config=worker.config)
    worker.wait("status", activity="load")
    worker.send("stop")
    end = worker.finish()
    assert (end["outcome"], end["exit_code"]) == ("stopped", 0)
    assert worker.reader.answer(start)["error"]["code"] == "shutting_down"


def test_stop_of_an_idle_worker_ends_it(serve: Spawn) -> None:
    worker = serve()
    worker.send("stop")
    end = worker.finish()
    assert (end["outcome"], end["step"], end["checkpoint"], end["resumable"]) == ("stopped", 0, None, False)
    assert "seq" not in end


def test_stop_cuts_an_evaluation_and_a_generation_short_and_both_are_answered(serve: Spawn) -> None:
    worker = serve(script={"valid_examples": 800_000, "eval_ms": 5, "token_ms": 5}, config=LONG)
    worker.begin()
    ids = [worker.send("eval"), worker.send("generate", prompt="Hello", max_tokens=100)]
    worker.result("status")
    worker.send("stop")
    worker.finish()
    assert [worker.reader.answer(id)["error"]["code"] for id in ids] == ["shutting_down"] * 2


def test_status_is_a_snapshot(serve: Spawn) -> None:
    worker = serve(script={"valid_examples": 8}, config=LONG)
    assert worker.result("status") | {"queue": 0, "engine_pid": 0} == {
        "phase": "idle",
        "activity": "none",
        "step": 0,
        "total_steps": 0,
        "epoch": 0,
        "run_id": None,
        "run_dir": None,
        "attempt": 0,
        "metrics": None,
        "valid_loss": None,
        "checkpoint": None,
        "memory": None,
        "last_seq": 0,
        "queue": 0,
        "open_ids": [],
        "loop_age_ms": 0,
        "engine_pid": 0,
    }
    worker.begin()
    worker.wait("checkpoint")
    worker.result("eval")
    worker.result("pause")
    status = worker.result("status")
    newest = worker.of("step")[-1]
    assert (status["phase"], status["step"], status["total_steps"]) == ("paused", newest["step"], 100_000)
    assert status["metrics"]["loss"] == newest["loss"]
    assert status["memory"]["as_of_step"] == newest["step"]
    assert status["checkpoint"] == worker.of("checkpoint")[-1]["path"]
    assert status["valid_loss"] == worker.of("eval_end")[-1]["valid_loss"]
    assert status["last_seq"] == max(line.get("seq", 0) for line in worker.lines)
    assert (status["run_dir"], status["attempt"]) == (str(worker.run_dir), 1)
    worker.send("stop")
    worker.finish()


def test_status_names_the_commands_that_are_open(serve: Spawn) -> None:
    worker = serve(config=LONG)
    worker.begin()
    worker.hold_engine()
    worker.send("checkpoint", "mine")
    worker.send("pause", 17)
    assert worker.result("status")["open_ids"] == ["mine", 17]
    worker.let_engine_go()
    worker.send("stop")
    worker.finish()


def test_at_most_256_commands_are_open_and_a_stop_still_gets_through(serve: Spawn) -> None:
    acts = [{"do": "log", "step": 2, "message": "hanging"}, {"do": "hang", "step": 2}]
    worker = serve(script={"acts": acts}, config=LONG)
    worker.begin()
    worker.wait("log", message="hanging")
    for number in range(300):
        worker.send("checkpoint", number)
    assert worker.reader.answer(256)["error"]["code"] == "busy"
    assert worker.reader.answer(299)["error"]["code"] == "busy"
    assert len(worker.result("status")["open_ids"]) == 256
    worker.result("ping")
    worker.send("stop")
    worker.wait("status", phase="stopping")
    assert worker.refusal("stop") == "busy"
    os.kill(worker.engine_pid(), signal.SIGKILL)
    assert worker.finish()["reason"] == "engine_died"


def test_ids_are_integers_texts_or_absent(serve: Spawn) -> None:
    worker = serve()
    for id in (0, -5, 2**53 - 1, "", "é\u2028", "x" * 128):
        assert worker.ask("ping", id)["id"] == id
    for text in ("true", "1.5", "[]", str(2**53), '"' + "x" * 129 + '"', "{}"):
        worker.raw(b'{"cmd":"ping","id":' + text.encode() + b"}\n")
        assert worker.wait("response", ok=False)["error"]["code"] == "bad_params"
    worker.raw(b'{"cmd":"ping"}\n')
    assert worker.wait("response", ok=True, id=None)["cmd"] == "ping"
    worker.send("stop")
    worker.finish()


def test_unknown_commands_and_parameters_are_refused_before_any_effect(serve: Spawn) -> None:
    worker = serve(config=LONG)
    worker.begin()
    response = worker.ask("paus")
    assert response["error"]["code"] == "unknown_command"
    assert "pause" in response["error"]["hint"]
    assert worker.refusal("pause", now=True) == "unknown_param"
    assert worker.refusal("stop", Save=False) == "unknown_param"
    assert worker.refusal("stop", save="no") == "bad_params"
    assert worker.refusal("resume", steps=0) == "bad_params"
    assert worker.result("status")["phase"] == "running"
    worker.send("stop")
    worker.finish()


def test_orders_take_effect_in_the_order_in_which_they_came(serve: Spawn) -> None:
    worker = serve(config=LONG)
    worker.begin()
    worker.hold_engine()
    ids = [
        worker.send("set", values={"save_every": 50}),
        worker.send("checkpoint", name="first"),
        worker.send("set", values={"save_every": 60}),
        worker.send("checkpoint", name="second"),
    ]
    worker.let_engine_go()
    worker.reader.answer(ids[-1])
    answered = [line["id"] for line in worker.of("response") if line["id"] in ids]
    assert answered == ids
    worker.send("stop")
    worker.finish()


def test_only_orders_that_change_the_run_are_recorded_with_their_source(serve: Spawn) -> None:
    worker = serve(script={"valid_examples": 8}, config=LONG)
    worker.begin()
    for cmd in ("ping", "status", "eval"):
        worker.result(cmd)
    worker.result("replay", to_seq=1)
    worker.result("pause", id="p")
    worker.raw(b"SET save_every=9\nRESUME\n")
    worker.wait("response", id=None, cmd="resume")
    worker.send("stop")
    worker.finish()
    recorded = [(line["cmd"], line["source"], line["parameters"]) for line in worker.of("command")]
    assert recorded[1:4] == [
        ("pause", "stdin", {}),
        ("set", "word", {"values": {"save_every": 9}}),
        ("resume", "word", {}),
    ]
    assert worker.of("command")[1]["cause"] == "p"
    assert [cmd for cmd, _, _ in recorded] == ["start", "pause", "set", "resume", "stop"]
