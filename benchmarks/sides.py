"""One training of one side in processes of its own, from the spawn to its last update."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BATCH = 8
LEARNING_RATE = 1e-3
SEED = 42
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Job:
    """What a side trains: a model, by a method, over the rows of a folder; `folder` is for what it writes."""

    model: Path
    rows: Path
    folder: Path
    method: str
    batch: int = BATCH
    learning_rate: float = LEARNING_RATE


@dataclass
class Training:
    """Times are seconds after the spawn, tokens are trained ones, one entry for each update.

    `peak_bytes` is MLX's own peak, `resident_bytes` the largest resident size of any of the processes,
    `worker_seconds` the processor time of trainwire's worker since the first update where /proc tells it, `profile`
    what `--profile` found.
    """

    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: float = 0.0
    resident_bytes: float = 0.0
    blas: str = ""
    worker_seconds: float = 0.0
    profile: dict[str, Any] = field(default_factory=dict)

    def rate(self, updates: int) -> float:
        """Trained tokens per second from the end of the first update to the end of the given one."""
        return sum(self.tokens[1:updates]) / (self.times[updates - 1] - self.times[0])


def environment() -> dict[str, str]:
    """The checkout's sources on the path, and nothing that names a number of threads."""
    paths = [str(ROOT), *(str(ROOT / part) for part in ("protocol", "worker", "clients/python"))]
    named = [name for name in os.environ if name.endswith("_NUM_THREADS")]
    return {
        **{key: value for key, value in os.environ.items() if key not in (*named, "PYTHONSAFEPATH")},
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
    }


def write_config(job: Job, updates: int) -> Path:
    """Write trainwire's config: every token of the rows in the file's order, no clipping, no checkpoint between."""
    values = {
        "model": str(job.model), "data": str(job.rows / "train.jsonl"), "run_dir": str(job.folder / "run"),
        "method": job.method, "cache_dir": str(job.folder / "cache"), "train_on": "all", "shuffle": False,
        "seed": SEED, "batch_size": job.batch, "max_steps": updates, "learning_rate": job.learning_rate,
        "schedule": "constant", "warmup_steps": 0, "max_grad_norm": 0.0, "save_every": 0, "eval_every": 0,
    }  # fmt: skip
    job.folder.mkdir(parents=True, exist_ok=True)
    config = job.folder / "config.toml"
    config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    return config


def trainwire(job: Job, updates: int, *words: str) -> Training:
    """Train with `trainwire run`; `words` are more of its options."""
    config = write_config(job, updates)
    shutil.rmtree(job.folder / "run", ignore_errors=True)
    training = Training()
    worker = 0
    before = 0.0

    def take(line: str, began: float) -> None:
        nonlocal worker, before
        event = json.loads(line)
        if event["type"] == "step":
            before = before or _processor_seconds(worker)
            training.times.append(event["ts"] / 1000 - began)
            training.tokens.append(event["trained_tokens"] - sum(training.tokens))
            training.losses.append(event["loss"])
            training.peak_bytes = max(training.peak_bytes, event["peak_bytes"])
        elif event["type"] == "init":
            training.blas = event.get("blas") or ""
        elif event["type"] == "hello":
            worker = event["pid"]
        elif event["type"] == "log" and event["code"] == "profile":
            training.profile = event["details"]
        elif event["type"] == "complete":
            training.worker_seconds = _processor_seconds(worker) - before
        elif event["type"] == "error":
            raise RuntimeError(event["message"])

    command = [sys.executable, "-m", "trainwire_worker", "run", str(config), "--progress", "off", *words]
    training.resident_bytes = _follow(command, take)
    return training


def alone(job: Job, updates: int, *words: str, **variables: str) -> Training:
    """Train with the engine's parts alone, `python -m benchmarks.alone`, with more environment variables."""
    config = write_config(job, updates)
    training = Training()

    def take(line: str, began: float) -> None:
        told = json.loads(line)
        training.times.append(told["time"] - began)
        training.tokens.append(told["tokens"])
        training.losses.append(told["loss"])
        training.peak_bytes = told["peak"]

    command = [sys.executable, "-m", "benchmarks.alone", str(config), *words]
    training.resident_bytes = _follow(command, take, variables=variables)
    return training


def mlx_lm(job: Job, updates: int, blas: str, limit: float | None = None) -> Training:
    """Train with `mlx_lm.lora`: the same rows, rank, scale and optimizer; `blas` is `stock` or a number of threads.

    After `limit` seconds it is ended, and has the updates that it made.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    config = job.folder / "mlx_lm.yaml"
    config.write_text(
        "lora_parameters: {rank: 8, scale: 2.0, dropout: 0.0}\noptimizer_config: {adamw: {bias_correction: true,"
        " weight_decay: 0.0}}\n"
    )
    command = [
        sys.executable, "-m", "benchmarks.peer", blas, "--model", str(job.model), "--data", str(job.rows), "--train",
        "--fine-tune-type", job.method, "--optimizer", "adamw", "--batch-size", str(job.batch), "--num-layers", "-1",
        "--iters", str(updates), "--steps-per-report", "1", "--save-every", str(10**6), "--learning-rate",
        str(job.learning_rate), "--adapter-path", str(job.folder / "mlx_lm"), "-c", str(config),
    ]  # fmt: skip
    training = Training(blas=blas)

    def take(line: str, began: float) -> None:
        if not line.startswith("UPDATE "):
            return
        told: dict[str, Any] = json.loads(line.removeprefix("UPDATE "))
        training.times.append(told["time"] - began)
        training.tokens.append(int(told["trained_tokens"]) - sum(training.tokens))
        training.losses.append(told["train_loss"])
        training.peak_bytes = told["peak_memory"] * 1e9

    training.resident_bytes = _follow(command, take, limit)
    return training


def _processor_seconds(process: int) -> float:
    """Processor time of a process so far, without its children; 0 where /proc does not tell."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _follow(
    command: list[str], take: Any, limit: float | None = None, variables: Mapping[str, str] | None = None
) -> float:
    """Run a command, give its lines of output with the time of its spawn; returns the peak resident bytes."""
    with tempfile.TemporaryFile("w+") as errors:
        began = time.time()
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**environment(), **(variables or {})},
        ) as process:
            assert process.stdout is not None
            ended = False

            def end() -> None:
                nonlocal ended
                ended = True
                process.kill()

            timer = threading.Timer(limit or 10**6, end)
            timer.daemon = True
            timer.start()
            for line in process.stdout:
                take(line, began)
            timer.cancel()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode and not ended:
            errors.seek(0)
            raise RuntimeError(f"{' '.join(command[:4])} left with {process.returncode}: {errors.read()[-2000:]}")
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
