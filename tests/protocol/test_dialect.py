"""The dialect of the @mlx-node/trl terminal view, line by line, from whole workers with the scripted engine."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

NUMBERS = {
    "step": "step loss meanReward stdReward meanAdvantage totalTokens generationTimeMs trainingTimeMs",
    "epoch_start": "epoch totalEpochs numBatches",
    "epoch_end": "epoch avgLoss avgReward epochTimeSecs",
    "generation": "index reward tokens",
    "complete": "totalSteps totalTimeSecs",
    "checkpoint": "step",
    "paused": "step",
    "resumed": "step",
    "init": "",
    "log": "",
    "status": "",
}
"""The types that the view knows, with the numbers that it reads without looking whether they are there."""
WHOLE = {"step", "totalTokens", "epoch", "totalEpochs", "numBatches", "index", "tokens", "totalSteps"}
WAIT = {"do": "await_order", "at": "boundary", "step": 3}
Line = dict[str, Any]


@pytest.fixture
def folder(recorder: ModuleType, tmp_path: Path) -> Path:
    recorder.Workshop(tmp_path).write(prompts=["What is a loss?"], generate_every=4)
    return tmp_path


def start(folder: Path, *words: str, script: Line | None = None, **environment: str) -> subprocess.Popen[bytes]:
    (folder / "script.json").write_text(
        json.dumps({"examples": 48, "valid_examples": 8, "step_ms": 2, **(script or {})})
    )
    command = [sys.executable, "-m", "trainwire_worker", "run", "config.toml", "--engine", "fake"]
    return subprocess.Popen(
        [*command, "--script", "script.json", *words],
        cwd=folder,
        env={key: value for key, value in os.environ.items() if key != "MLX_TUI_MODE"} | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def play(process: subprocess.Popen[bytes], on_step: dict[int, bytes | signal.Signals] | None = None) -> list[Line]:
    """Read to the end; at a step, send a word or a signal."""
    lines = []
    assert process.stdout is not None
    assert process.stdin is not None
    with process:
        for raw in process.stdout:
            lines.append(json.loads(raw))
            if lines[-1]["type"] == "step":
                act = (on_step or {}).pop(lines[-1]["step"], None)
                if isinstance(act, signal.Signals):
                    process.send_signal(act)
                elif act is not None:
                    process.stdin.write(act)
                    process.stdin.flush()
    return lines


def only(lines: list[Line], kind: str) -> list[Line]:
    return [line for line in lines if line["type"] == kind]


def test_only_known_types_come_and_their_numbers_are_there(folder: Path) -> None:
    script = {"acts": [WAIT, {"do": "non_finite", "step": 6}]}
    process = start(folder, "--dialect", "mlx-tui", script=script)
    lines = play(process, {3: b"PAUSE\nRESUME\n"})
    for line in lines:
        assert line["type"] in NUMBERS
        for name in NUMBERS[line["type"]].split():
            assert isinstance(line[name], int | float), line
            assert not isinstance(line[name], bool)
            assert name not in WHOLE or isinstance(line[name], int)
    assert {line["type"] for line in lines} == set(NUMBERS)
    assert all(line["level"] in ("debug", "info", "warn", "error") for line in only(lines, "log"))


def test_a_loss_that_is_not_finite_repeats_the_last_one_and_is_told(folder: Path) -> None:
    lines = play(start(folder, "--dialect", "mlx-tui", script={"acts": [{"do": "non_finite", "step": 6}]}))
    steps = only(lines, "step")
    assert steps[5]["loss"] == steps[4]["loss"]
    assert any(line["level"] == "error" for line in only(lines, "log"))
    assert all(line["meanReward"] == line["stdReward"] == line["meanAdvantage"] == 0 for line in steps)


def test_there_is_one_step_for_each_update_whatever_the_config_says(folder: Path) -> None:
    lines = play(start(folder, "log_every=5", "--dialect", "mlx-tui"))
    assert [line["step"] for line in only(lines, "step")] == list(range(1, 13))


def test_the_loading_status_carries_the_model_and_init_a_config_that_the_view_reads(folder: Path) -> None:
    lines = play(start(folder, "--dialect", "mlx-tui"))
    loading = next(line for line in only(lines, "status") if line["phase"] == "loading")
    init = only(lines, "init")[0]
    assert loading["message"] == init["model"] == "models/base"
    config = init["config"]
    assert (config["numEpochs"], config["batchSize"], config["gradientAccumulationSteps"]) == (2, 8, 1)
    assert config["learningRate"] == 1e-4


@pytest.mark.parametrize(
    ("words", "environment", "translated"),
    [
        ([], {"MLX_TUI_MODE": "1"}, True),
        (["--dialect", "mlx-tui"], {}, True),
        (["--dialect", "native"], {"MLX_TUI_MODE": "1"}, False),
        ([], {"MLX_TUI_MODE": "0"}, False),
    ],
)
def test_the_environment_chooses_the_dialect_and_an_argument_wins(
    words: list[str], environment: dict[str, str], translated: bool, folder: Path
) -> None:
    lines = play(start(folder, *words, **environment))
    assert (lines[0]["type"] != "hello") is translated


def test_a_run_that_was_interrupted_with_its_state_saved_leaves_with_0(folder: Path) -> None:
    process = start(folder, "--dialect", "mlx-tui", script={"acts": [WAIT]})
    lines = play(process, {3: signal.SIGTERM})
    assert process.returncode == 0
    assert only(lines, "checkpoint")[-1]["step"] == 3
    eof = start(folder, "--dialect", "mlx-tui", "--on-eof", "stop", "--resume", script={"examples": 80_000})
    assert eof.stdin is not None
    assert eof.stdout is not None
    with eof:
        eof.stdin.close()
        eof.stdout.read()
    assert eof.returncode == 0


def test_a_run_that_fails_keeps_its_exit_code(folder: Path) -> None:
    process = start(folder, "--dialect", "mlx-tui", script={"acts": [{"do": "exit", "step": 2}]})
    lines = play(process)
    assert process.returncode == 9
    assert only(lines, "log")[-1]["level"] in ("error", "info")
