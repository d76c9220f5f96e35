"""`trainwire validate` with the real engine: its prediction, against the run that follows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_model
from whole import ENVIRONMENT, trainwire, write_config


def validate(config: Path) -> dict[str, Any]:
    """What a program gets from it."""
    command = [sys.executable, "-m", "trainwire_cli", "validate", str(config), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=240)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_predicted_memory_is_that_of_the_run_and_the_samples_show_what_is_trained(base: Path, tmp_path: Path) -> None:
    config = write_config(
        tmp_path / "c.toml",
        model=str(base / "model"),
        data=str(base / "chat.jsonl"),
        valid_data=str(base / "valid.jsonl"),
        cache_dir=str(base / "cache"),
        num_epochs=2,
        method="full",
    )
    result = validate(config)
    assert not (tmp_path / "runs").exists()
    session = trainwire("run", config)
    assert session.exit_code == 0, session.stderr
    steps = session.of("step")
    assert result["total_steps"] == len(steps)
    assert result["estimate"]["peak_bytes"] == pytest.approx(max(step["peak_bytes"] for step in steps), rel=0.15)
    assert result["data"][0]["trained_tokens"] == session.of("data")[0]["trained_tokens"]
    first = result["samples"][0]
    assert first["row"] == f"{base}/chat.jsonl:1"
    trained = [segment["text"] for segment in first["segments"] if segment["trained"]]
    assert trained == ["number 0 <|im_end|>"]
    whole = "".join(segment["text"] for segment in first["segments"])
    assert whole == "<|im_start|>user\nsay 0<|im_end|>\n<|im_start|>assistant\nnumber 0 <|im_end|>\n"


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Let processes that are started meanwhile use so many cores: an engine has a lane for each."""
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < count:
        pytest.skip(f"{count} cores cannot be chosen here")
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(("family", "method", "cores", "updates"), [("qwen3", "lora", 1, 3), ("llama", "full", 2, 24)])
def test_predicted_memory_of_mixed_rows_in_a_deep_model_is_that_of_the_run(
    tmp_path: Path, family: str, method: str, cores: int, updates: int
) -> None:
    """On two cores lanes meet otherwise in each update; the peak of a run is that of the fullest."""
    tiny_model(tmp_path / "model", family, hidden_size=64, intermediate_size=192, num_hidden_layers=8)
    rows = [[3 + place % 400 for place in range(length)] for length in (150, 135, 105, 85, 60, 45, 30, 15)]
    lines = [json.dumps({"input_ids": row, "labels": [-100] * 9 + row[9:]}) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    config = write_config(
        tmp_path / "c.toml",
        model=str(tmp_path / "model"),
        data=str(tmp_path / "rows.jsonl"),
        cache_dir=str(tmp_path / "cache"),
        method=method,
        batch_size=len(rows),
        micro_batch_tokens=256,
        num_epochs=updates,
    )
    with on_cores(cores):
        told = validate(config)["estimate"]["peak_bytes"]
        session = trainwire("run", config)
    assert session.exit_code == 0, session.stderr
    assert f"{cores} core" in session.one("init")["blas"]
    peak = max(step["peak_bytes"] for step in session.of("step"))
    assert told == pytest.approx(peak, rel=0.15)
