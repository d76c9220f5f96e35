"""`trainwire validate` with the real engine: its prediction, against the run that follows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from whole import ENVIRONMENT, trainwire, write_config


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
    command = [sys.executable, "-m", "trainwire_cli", "validate", str(config), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=240)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
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
