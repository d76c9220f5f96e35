"""`--dialect mlx-tui`: the lines of the @mlx-node/trl terminal view, checked by the rules of that view's parser."""

from __future__ import annotations

import json
import math
import os
import signal
from typing import Any

import pytest
from worker_driver import Line, Spawn, wait_until

NUMBERS: dict[str, dict[str, type]] = {
    "step": {
        "step": int,
        "loss": float,
        "meanReward": float,
        "stdReward": float,
        "meanAdvantage": float,
        "totalTokens": int,
        "generationTimeMs": float,
        "trainingTimeMs": float,
    },
    "epoch_end": {"epoch": int, "avgLoss": float, "avgReward": float, "epochTimeSecs": float},
    "epoch_start": {"epoch": int, "totalEpochs": int, "numBatches": int},
    "generation": {"index": int, "reward": float, "tokens": int},
    "complete": {"totalSteps": int, "totalTimeSecs": float},
    "checkpoint": {"step": int},
    "paused": {"step": int},
    "resumed": {"step": int},
    "init": {},
    "log": {},
    "status": {},
}
TEXTS = {
    "generation": ("prompt", "completion"),
    "checkpoint": ("path",),
    "init": ("model",),
    "log": ("level", "message"),
    "status": ("phase", "message"),
}


def check_tui_line(raw: bytes, limit: int) -> Line:
    """Read a line as that view does; an AssertionError where it would refuse it."""
    assert all(0x20 <= byte <= 0x7E for byte in raw)
    assert len(raw) < limit
    line: Line = json.loads(raw)
    kind = line["type"]
    assert kind in NUMBERS, f"a type that the view does not know: {raw[:200]!r}"
    for key, wanted in NUMBERS[kind].items():
        value = line[key]
        assert isinstance(value, int | float), (key, line)
        assert not isinstance(value, bool)
        assert math.isfinite(value)
        assert wanted is float or isinstance(value, int), (key, line)
    for key in TEXTS.get(kind, ()):
        assert isinstance(line[key], str), (key, line)
    if kind == "log":
        assert line["level"] in ("debug", "info", "warn", "error")
    if kind == "init":
        assert isinstance(line["config"], dict)
        for key in ("numEpochs", "batchSize", "gradientAccumulationSteps"):
            assert isinstance(line["config"][key], int)
        assert isinstance(line["config"]["learningRate"], float)
    return line


def tui(spawn: Spawn, *words: str, **settings: Any) -> Any:
    """Start a worker that speaks the dialect."""
    return spawn("--dialect", "mlx-tui", *words, check=check_tui_line, **settings)


def ended(worker: Any) -> int:
    """Read to the end and give the exit status."""
    worker.reader.rest()
    code: int = worker.exit_code()
    return code


def test_a_run_line_by_line(run: Spawn) -> None:
    config = {"max_steps": 10, "eval_every": 5, "generate_every": 5, "prompts": ["Hello"], "log_every": 5}
    worker = tui(
        run, script={"valid_examples": 8, "rows_dropped": {"empty": {"count": 1, "lines": ["a:1"]}}}, config=config
    )
    assert ended(worker) == 0
    kinds = [line["type"] for line in worker.lines]
    assert set(kinds) == {
        "status",
        "log",
        "init",
        "epoch_start",
        "step",
        "generation",
        "checkpoint",
        "epoch_end",
        "complete",
    }
    assert [line["step"] for line in worker.of("step")] == list(range(1, 11)), "a line for each update"
    loading = [line for line in worker.of("status") if line["phase"] == "loading"]
    assert {line["message"] for line in loading} == {worker.config["model"]}
    init = worker.of("init")[0]
    assert (init["config"]["numEpochs"], init["config"]["batchSize"]) == (1, 8)
    (complete,) = worker.of("complete")
    assert (complete["totalSteps"], complete["totalTimeSecs"] >= 0.1) == (10, True)


@pytest.mark.parametrize("words", [[], ["--dialect", "native"]])
def test_the_environment_chooses_the_dialect_and_the_option_wins(run: Spawn, words: list[str]) -> None:
    worker = run(*words, env={"MLX_TUI_MODE": "1"}, check=lambda raw, limit: json.loads(raw), config={"max_steps": 2})
    worker.reader.rest()
    assert worker.exit_code() == 0
    assert (worker.lines[0]["type"] == "hello") is bool(words)
    if words:
        assert worker.lines[0]["dialect"] == "native"


def test_the_words_of_the_view_steer_the_run(run: Spawn) -> None:
    worker = tui(run, config={"max_steps": 10**5})
    worker.wait("step")
    worker.raw(b"PAUSE\n")
    paused = worker.wait("paused")
    worker.raw(b"SAVE_CHECKPOINT\n")
    assert worker.wait("checkpoint")["step"] == paused["step"]
    worker.raw(b"SET sample_display=best_worst\nRESUME\n")
    worker.wait("resumed")
    worker.raw(b"NONSENSE\n")
    assert "NONSENSE" in worker.wait("log", level="warn")["message"]
    worker.raw(b"STOP\n")
    assert ended(worker) == 0
    assert not worker.of("complete")


def test_a_loss_that_is_not_finite_repeats_the_last_one_and_is_told(run: Spawn) -> None:
    script = {"loss": [2.5, "nan", "inf", 2.0], "step_ms": 1}
    worker = tui(run, script=script, config={"max_steps": 4})
    assert ended(worker) == 0
    assert [line["loss"] for line in worker.of("step")] == [2.5, 2.5, 2.5, 2.0]
    assert len([line for line in worker.of("log") if line["level"] == "error"]) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_graceful_end_from_outside_is_no_failure_for_the_view(run: Spawn, number: int) -> None:
    worker = tui(run, config={"max_steps": 10**5})
    worker.wait("step")
    worker.signal(number)
    assert ended(worker) == 0


def test_a_front_end_that_is_gone_is_no_failure_for_the_view(run: Spawn) -> None:
    worker = tui(run, "--on-eof", "stop", config={"max_steps": 10**5})
    worker.wait("step")
    worker.close_input()
    assert ended(worker) == 0


def test_a_failure_is_a_log_line_and_its_exit_code(run: Spawn) -> None:
    act = {"do": "fail", "step": 3, "code": "out_of_memory", "message": "Too large.", "hint": "Make it smaller."}
    worker = tui(run, script={"acts": [act]}, config={"max_steps": 10})
    assert ended(worker) == 5
    errors = [line["message"] for line in worker.of("log") if line["level"] == "error"]
    assert errors[0] == "Too large. Make it smaller."


def test_the_view_restarts_with_resume_and_goes_on(run: Spawn) -> None:
    first = tui(run, script={"acts": [{"do": "exit", "step": 8}]}, config={"max_steps": 20})
    assert ended(first) == 9
    second = tui(run, "--resume", config={"max_steps": 20})
    assert ended(second) == 0
    assert second.of("step")[0]["step"] == 6


def test_a_step_for_each_update_is_kept_to_also_by_set(run: Spawn) -> None:
    worker = tui(run, config={"max_steps": 10**5})
    worker.wait("step")
    worker.raw(b"SET log_every=5\n")
    assert "log_every stays" in worker.wait("log", level="warn")["message"]
    worker.raw(b"STOP\n")
    assert ended(worker) == 0
    steps = [line["step"] for line in worker.of("step")]
    assert steps == list(range(1, len(steps) + 1))


def test_a_view_that_says_stop_and_is_killed_leaves_a_run_that_saves(run: Spawn) -> None:
    worker = tui(run, "--on-eof", "stop", script={"step_ms": 200}, config={"max_steps": 10**5, "save_every": 0})
    worker.wait("step")
    worker.raw(b"STOP\n")
    worker.close_input()
    worker.close_output()
    assert worker.exit_code() == 0
    assert worker.log()[-1]["outcome"] == "stopped"
    assert worker.log()[-1]["checkpoint"] is not None


def test_lines_stay_within_the_limit(run: Spawn) -> None:
    config = {"max_steps": 2, "generate_every": 1, "prompts": ["x" * 5000]}
    script = {"completion": "é", "completion_repeat": 40_000}
    worker = tui(run, "--max-line", "9000", script=script, config=config, limit=60_000)
    assert ended(worker) == 0
    generations = [raw for raw in worker.reader.raw if raw.startswith(b'{"type":"generation"')]
    assert generations
    assert max(map(len, generations)) < 9000


def test_a_view_that_does_not_read_loses_lines_but_never_gets_one_of_ours(run: Spawn) -> None:
    script = {"step_ms": 0, "acts": [{"do": "log", "message": "m" * 900}] * 8}
    worker = tui(run, "--flush-grace", "30", script=script, config={"max_steps": 1500, "save_every": 0})
    log = worker.run_dir / "events.jsonl"
    wait_until(lambda: log.exists() and b'{"type":"end"' in _tail(log), "the run ends", 60)
    assert ended(worker) == 0
    assert len(worker.lines) < 1500 * 9


def _tail(path: Any) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 2000))
        data: bytes = file.read()
        return data
