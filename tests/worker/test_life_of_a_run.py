"""A whole run, from `hello` to `end`, on the wire and in the log."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from worker_driver import Line, Spawn

from trainwire_protocol.conformance import violations
from trainwire_worker.sleep import SleepWatch, asleep


def kinds(lines: list[Line]) -> list[str]:
    """Name the lines by type, a phase by its name, repetitions once."""
    names = [f"status {line['phase']}" if line["type"] == "status" else line["type"] for line in lines]
    return [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]


def test_a_run_says_everything_in_order(run: Spawn) -> None:
    worker = run(script={"valid_examples": 8, "step_ms": 1}, config={"max_steps": 10, "eval_every": 5})
    end = worker.finish()
    assert (end["outcome"], end["reason"], end["step"]) == ("completed", "finished", 10)
    assert [name for name in kinds(worker.lines) if name not in ("progress", "log")] == [
        "hello",
        "attempt",
        "status loading",
        "status preparing",
        "data",
        "init",
        "status running",
        "epoch_start",
        "step",
        "eval_end",
        "checkpoint",
        "step",
        "eval_end",
        "checkpoint",
        "epoch_end",
        "checkpoint",
        "complete",
        "end",
    ]
    assert [line["step"] for line in worker.of("step")] == list(range(1, 11))
    assert [line["split"] for line in worker.of("data")] == ["train", "valid"]


def test_the_log_holds_the_same_lines_byte_for_byte(run: Spawn) -> None:
    worker = run(script={"step_ms": 0})
    worker.finish()
    logged = (worker.run_dir / "events.jsonl").read_bytes().splitlines()
    assert logged == [raw for raw, line in zip(worker.reader.raw, worker.lines, strict=True) if "seq" in line]
    assert len(worker.log()) == len(logged)


def test_hello_tells_version_features_and_limits(serve: Spawn) -> None:
    worker = serve("--max-line", "9000")
    hello = worker.wait()
    assert hello["type"] == "hello"
    assert (hello["protocol"], hello["minor"], hello["dialect"], hello["pid"]) == (1, 0, "native", worker.pid)
    assert {"replay", "linger", "validate", "control_socket"} <= set(hello["features"])
    limits = {"max_line_in": 1 << 20, "max_line_out": 9000, "max_open_commands": 256}
    assert hello["limits"] == limits | {"max_response_backlog": 8 << 20, "max_backlog": 8 << 20}


def test_start_is_answered_when_init_is_out(serve: Spawn) -> None:
    worker = serve(script={"load_ms": 50})
    response = worker.start()
    init = worker.wait("init")
    assert response["result"] == {
        "run_id": init["run_id"],
        "run_dir": str(worker.run_dir),
        "total_steps": 20,
        "resumed_from": None,
    }
    assert response["at_seq"] == init["seq"]
    assert init["cause"] == response["id"]
    assert worker.finish()["outcome"] == "completed"


def test_every_path_on_the_wire_is_absolute(serve: Spawn) -> None:
    worker = serve(config={"run_dir": "here", "model": "model", "data": "train.jsonl", "cache_dir": "cache"})
    worker.start()
    worker.finish()
    init = worker.of("init")[0]
    here = str(worker.folder / "here")
    assert init["run_dir"] == here
    assert [init["config"][key] for key in ("model", "data", "run_dir", "cache_dir")] == [
        str(worker.folder / "model"),
        str(worker.folder / "train.jsonl"),
        here,
        str(worker.folder / "cache"),
    ]
    assert [line["path"] for line in worker.of("checkpoint")][-1] == f"{here}/final" == worker.lines[-1]["checkpoint"]


def test_words_win_over_the_file_wherever_they_stand(run: Spawn) -> None:
    worker = run("max_steps=3", "--progress", "off", "batch_size=2")
    worker.finish()
    config = worker.of("init")[0]["config"]
    assert (config["max_steps"], config["batch_size"]) == (3, 2)


def test_progress_is_always_closed(run: Spawn) -> None:
    worker = run(script={"acts": [{"do": "progress", "step": 2, "total": 5}]})
    worker.finish()
    last = {line["id"]: line for line in worker.of("progress")}
    assert last
    assert all(line["done"] == line["total"] for line in last.values())


def test_an_update_that_is_not_finite_is_null_named_and_told(run: Spawn) -> None:
    script = {"acts": [{"do": "non_finite", "step": 3}, {"do": "non_finite", "step": 5, "value": "-inf"}]}
    worker = run(script=script)
    assert worker.finish()["outcome"] == "completed"
    steps = {line["step"]: line for line in worker.of("step")}
    assert (steps[3]["loss"], steps[3]["non_finite"]["loss"], steps[3]["skipped"]) == (None, "nan", 1)
    assert (steps[5]["loss"], steps[5]["non_finite"]["loss"]) == (None, "-inf")
    assert [line["details"]["step"] for line in worker.of("log") if line.get("code") == "non_finite"] == [3, 5]


def test_a_long_text_is_cut_and_named_and_the_line_stays_short(serve: Spawn) -> None:
    script = {"completion": "\u2028\u00e4", "completion_repeat": 50_000, "step_ms": 5}
    worker = serve("--max-line", "5000", script=script, limit=5000, config={"max_steps": 100000})
    worker.begin()
    response = worker.ask("generate", prompt="Hello")
    assert response["ok"]
    assert response["truncated"] == ["result.text"]
    assert response["result"]["text"].startswith("\u2028\u00e4")
    worker.send("stop")
    worker.finish()


LONG_VALUES = {
    "prompts": ["p" * 1000] * 60,
    "data": [f"shard-{number:05d}.jsonl" for number in range(900)],
    "chat_template_args": {"text": "\U0001f600" * 5000},
}


@pytest.mark.parametrize("key", LONG_VALUES)
def test_a_config_that_init_could_not_tell_in_one_line_is_refused_and_the_key_is_named(serve: Spawn, key: str) -> None:
    worker = serve()
    result = worker.result("validate", config={**worker.config, key: LONG_VALUES[key]})
    assert [(issue["path"], issue["code"]) for issue in result["issues"]] == [(key, "too_long")]
    worker.send("start", config={**worker.config, key: LONG_VALUES[key]})
    end = worker.finish()
    assert (end["reason"], end["exit_code"]) == ("config_invalid", 3)
    assert "--max-line" in worker.of("error")[0]["hint"]
    assert not worker.run_dir.exists()


def test_the_longest_config_that_is_taken_fits_into_a_line_also_when_it_is_sent_again(serve: Spawn) -> None:
    worker = serve("--max-line", "9000", limit=9000, config={"run_name": "n" * 200})
    low, high = 0, 9000

    def is_taken(length: int) -> bool:
        config = {**worker.config, "chat_template_args": {"text": "t" * length}}
        return bool(worker.result("validate", config=config)["valid"])

    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_taken(middle) else (low, middle)
    id = "\U0001f600" * 128
    start = worker.send("start", id, config={**worker.config, "chat_template_args": {"text": "t" * low}})
    assert worker.reader.answer(start)["ok"]
    worker.wait("step")
    assert worker.ask("replay", "\U0001f601" * 128, types=["init"])["result"] == {"count": 1}
    first, again = worker.of("init")
    assert len(first["config"]["chat_template_args"]["text"]) == low
    assert again == {**first, "cause": "\U0001f601" * 128, "replay": True}
    worker.finish()


def test_a_line_limit_that_a_config_needed_belongs_to_the_arguments_of_its_resume(serve: Spawn) -> None:
    worker = serve("--max-line", "70000", limit=70_000, config={"max_steps": 10**5})
    worker.begin(config={"prompts": ["p" * 60_000]})
    worker.send("stop")
    words = worker.finish()["resume_args"]
    assert words[words.index("--max-line") + 1] == "70000"


def test_log_every_puts_updates_together_by_the_rule_of_slow_readers(run: Spawn) -> None:
    worker = run(config={"log_every": 4, "max_steps": 10})
    worker.finish()
    assert sum(line["updates"] for line in worker.of("step")) == 10 > len(worker.of("step"))
    assert sum(line["total_tokens"] for line in worker.of("step")) == worker.of("step")[-1]["trained_tokens"]


@pytest.mark.parametrize("mode", ["run", "serve"])
def test_two_sessions_by_scripted_clocks_are_the_same_byte_for_byte(
    mode: str, request: pytest.FixtureRequest, tmp_path: Any
) -> None:
    spawn: Spawn = request.getfixturevalue(mode)
    sessions = []
    for number in range(2):
        config = {"run_dir": str(tmp_path / "same"), "max_steps": 4, "resume": "never"}
        words = ["--clock", "scripted"] + (["--overwrite"] if mode == "run" else [])
        worker = spawn(*words, script={"clock": "scripted", "step_ms": 250}, config=config)
        if mode == "serve":
            worker.start(overwrite=True)
        worker.finish()
        sessions.append([raw for raw, line in zip(worker.reader.raw, worker.lines, strict=True) if "seq" in line])
        assert worker.of("attempt")[0]["pid"] == 1, number
    assert sessions[0] == sessions[1]


def test_the_worker_never_imports_mlx_or_numpy(tmp_path: Any) -> None:
    import subprocess

    code = (
        "import sys, trainwire_worker.__main__, trainwire_worker.worker\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_lm', 'numpy', 'transformers', 'tqdm')])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(printed.replace("'", '"')) == []


def test_a_sleep_of_the_machine_is_told_once(run: Spawn) -> None:
    code = (
        "import itertools, trainwire_worker.sleep as sleep\n"
        "asked = itertools.count()\n"
        "sleep.asleep = lambda: 7.0 if next(asked) < 5 else 319.0\n"
        "from trainwire_worker.__main__ import leave\n"
        "leave()\n"
    )
    worker = run(python=("-c", code), config={"max_steps": 20})
    assert worker.finish()["outcome"] == "completed"
    (log,) = [line for line in worker.of("log") if line.get("code") == "system_slept"]
    assert log["level"] == "info"
    assert log["details"] == {"seconds": 312}


def test_a_clock_that_is_set_back_again_and_again_changes_nothing_but_the_times(run: Spawn) -> None:
    code = (
        "import itertools, time\n"
        "real, hours = time.time_ns, itertools.count()\n"
        "time.time_ns = lambda: real() - next(hours) * 3600 * 10**9\n"
        "from trainwire_worker.__main__ import leave\n"
        "leave()\n"
    )
    worker = run("--restarts", "1", python=("-c", code), script={"acts": [{"do": "die", "step": 8, "attempt": 1}]})
    assert worker.finish()["outcome"] == "completed"
    times = [line["ts"] for line in worker.lines if "ts" in line]
    assert times == sorted(times, reverse=True)
    assert violations(raw + b"\n" for raw in worker.reader.raw) == []
    assert [line.get("resumed_from_step") for line in worker.of("attempt")] == [None, 5]
    assert len(worker.log()) == worker.lines[-1]["seq"]


def test_a_machine_that_never_slept_has_nothing_to_tell() -> None:
    watch = SleepWatch()
    assert watch.slept() is None
    assert asleep() == pytest.approx(asleep(), abs=1.0)
