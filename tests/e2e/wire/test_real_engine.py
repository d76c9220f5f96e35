"""What the page promises of commands, held against the engine that trains: the scripted one is no proof for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from worker_driver import Spawn, Worker

from trainwire_protocol import rundir
from trainwire_protocol.commands import COMMANDS
from trainwire_protocol.conformance import violations


def finish(worker: Worker) -> dict[str, Any]:
    """Read to the end; the session must break no rule."""
    end = worker.finish()
    assert violations(raw + b"\n" for raw in worker.reader.raw) == []
    return end


def place(worker: Worker, kind: str, **fields: Any) -> int:
    """Say which of the lines so far is the first of a type with these fields."""
    return next(n for n, line in enumerate(worker.lines) if line["type"] == kind and fields.items() <= line.items())


def test_every_command_does_what_it_says(serve: Spawn) -> None:
    worker = serve()
    assert worker.result("validate", config={**worker.config, "batchsize": 1})["valid"] is False
    checked = worker.result("validate", config=worker.config)
    assert checked["valid"], checked
    assert checked["estimate"]["largest_micro_batch_tokens"] > 0
    assert not worker.run_dir.exists()
    started = worker.start(linger=True)
    init = worker.wait("init")
    assert (started["at_seq"], started["result"]["run_id"]) == (init["seq"], init["run_id"])
    assert init["trainable_parameters"] == checked["trainable_parameters"]
    worker.wait("step")
    paused = worker.result("pause")
    assert worker.result("pause") == {"step": paused["step"], "changed": False}
    answer = worker.result("generate", prompt="say 3", max_tokens=3)
    assert 0 < answer["tokens"] <= 3
    messages = [{"role": "user", "content": "say 3"}]
    assert worker.result("generate", messages=messages, max_tokens=3)["text"] == answer["text"]
    draws = {"prompt": "say 3", "max_tokens": 8, "temperature": 2.0, "seed": 5, "adapter": False}
    assert worker.result("generate", **draws)["text"] == worker.result("generate", **draws)["text"]
    assert worker.refusal("generate", messages=[]) == "bad_params"
    whole, part = worker.result("eval"), worker.result("eval", max_batches=1)
    assert part["tokens"] <= whole["tokens"]
    changed = worker.result("set", values={"learning_rate": 1e-3, "log_every": 2})
    assert (changed["previous"]["log_every"], changed["effective_step"]) == (1, paused["step"] + 1)
    assert worker.refusal("set", values={"learning_rate": 1e-4, "lora_rank": 4}) == "unknown_param"
    saved = worker.result("checkpoint", name="mine")
    assert rundir.defect(Path(saved["path"])) is None
    assert worker.result("checkpoint")["changed"] is False
    status = worker.result("status")
    assert (status["phase"], status["step"], status["activity"]) == ("paused", paused["step"], "none")
    assert worker.result("replay", types=["init", "paused"])["count"] == 2
    assert worker.result("ping")["ts"] >= init["ts"]
    resumed = worker.send("resume", steps=4)
    assert worker.wait("paused", cause=resumed)["step"] == paused["step"] + 4
    told = [line["updates"] for line in worker.of("step") if line["step"] > paused["step"]]
    assert sum(told) == 4 > len(told)
    worker.result("set", values={"max_steps": paused["step"] + 6})
    assert worker.result("resume")["changed"]
    worker.wait("status", phase="lingering")
    assert worker.result("eval")["valid_loss"] > 0
    assert worker.refusal("pause") == "wrong_state"
    assert worker.result("detach") == {"changed": True}
    worker.send("stop")
    end = finish(worker)
    assert (end["outcome"], end["step"]) == ("completed", paused["step"] + 6)
    asked = {line["cmd"] for line in worker.of("response") if line["ok"]}
    assert asked == set(COMMANDS)


def test_questions_are_answered_while_the_model_loads(serve: Spawn) -> None:
    worker = serve()
    worker.send("start", config=worker.config)
    asked = [worker.send("ping"), worker.send("status")]
    for id in asked:
        worker.reader.answer(id)
    worker.wait("init")
    assert all(place(worker, "response", id=id) < place(worker, "init") for id in asked)
    worker.send("stop")
    finish(worker)


def test_a_question_and_a_stop_in_the_middle_of_a_long_update_are_answered_at_once(
    serve: Spawn, long_update: dict[str, Any]
) -> None:
    worker = serve(config=long_update)
    worker.begin()
    first = worker.of("step")[-1]
    ping = worker.send("ping")
    worker.reader.answer(ping)
    stop = worker.send("stop")
    announced = worker.wait("status", phase="stopping")
    end = finish(worker)
    after = [line for line in worker.of("step") if line["seq"] > announced["seq"]]
    assert len(after) <= 1, "the update that ran when the stop came, and no other one"
    assert end["step"] == (after or [first])[-1]["step"]
    assert worker.reader.answer(stop)["result"]["checkpoint"] == end["checkpoint"]
    assert rundir.defect(Path(end["checkpoint"])) is None


@pytest.mark.parametrize("method", ["lora", "full"])
def test_questions_are_answered_while_checkpoints_are_written(serve: Spawn, method: str) -> None:
    worker = serve(config={"method": method, "save_every": 1, "max_checkpoints": 1})
    worker.begin()
    for _ in range(30):
        worker.result("ping")
        worker.result("status")
    worker.wait("checkpoint")
    worker.send("stop")
    finish(worker)


def test_updates_that_wait_for_log_every_are_in_status_and_survive_a_stop(
    serve: Spawn, long_update: dict[str, Any]
) -> None:
    worker = serve("--stop-grace", "0.05", config={**long_update, "batch_size": 6, "log_every": 1000})
    assert worker.start()["ok"]
    while worker.result("status")["step"] == 0:
        assert not worker.of("end")
    worker.send("stop")
    end = finish(worker)
    assert sum(line["updates"] for line in worker.of("step")) == end["step"] > 0
    assert rundir.defect(Path(end["checkpoint"])) is None


def test_a_loss_that_is_not_finite_is_null_on_the_wire_and_named(run: Spawn) -> None:
    worker = run(config={"learning_rate": 1e30, "max_grad_norm": 0, "max_steps": 40, "max_consecutive_non_finite": 2})
    end = finish(worker)
    assert (end["reason"], end["exit_code"]) == ("non_finite", 6)
    skipped = [line for line in worker.of("step") if line["skipped"]]
    assert all("loss" in line["non_finite"] or "grad_norm" in line["non_finite"] for line in skipped)
    logs = [line for line in worker.of("log") if line.get("code") == "non_finite"]
    assert [line["details"]["in_row"] for line in logs][-2:] == [1, 2]
    assert all(Path(row.rpartition(":")[0]).name == "chat.jsonl" for line in logs for row in line["details"]["rows"])


def test_the_view_of_the_seed_gets_its_lines_from_the_real_engine_too(run: Spawn) -> None:
    config = {"max_steps": 3, "eval_every": 2, "prompts": ["say 3"], "generate_every": 2}
    worker = run("--dialect", "mlx-tui", config=config, check=lambda raw, limit: json.loads(raw))
    worker.reader.rest()
    assert worker.exit_code() == 0
    assert [line["step"] for line in worker.of("step")] == [1, 2, 3]
    assert {line["type"] for line in worker.lines} == {
        "init", "epoch_start", "step", "generation", "checkpoint", "epoch_end", "complete", "log", "status"
    }  # fmt: skip
