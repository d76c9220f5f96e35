"""Compares two ranks on two cores with one process pinned to one core, over the ring backend on loopback.

    python benchmarks/ranks.py [--seconds 25] [--method lora] [--width 256] [--batch-size 16] [--out FILE]

A llama of four layers trains on rows of log-normal lengths in float32. Every epoch has the same updates; the first one
is for warming up, then whole epochs are measured: trained tokens per second, and the two runs' losses, which have to
agree. The share of an update that the sum over the ranks takes is measured apart: the same number of float32 values,
summed by two idle processes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
UPDATES = 16
"""Updates of an epoch."""
_MAKE = """
import json, sys
from pathlib import Path
from tiny import tiny_model
tiny_model(Path(sys.argv[1]), "llama", **json.loads(sys.argv[2]))
"""
_SUM = """
import sys, time
import mlx.core as mx
group = mx.distributed.init(backend=sys.argv[2], strict=True)
value = mx.ones((int(sys.argv[1]),))
times = []
for _ in range(30):
    mx.eval(mx.distributed.all_sum(mx.zeros(1), group=group))
    start = time.perf_counter()
    mx.eval(mx.distributed.all_sum(value, group=group))
    times.append(time.perf_counter() - start)
if group.rank() == 0:
    print(sorted(times)[len(times) // 2])
"""


def environment() -> dict[str, str]:
    """The sources of the checkout on the path."""
    paths = [str(ROOT / part) for part in ("protocol", "worker", "clients/python", "tests/engine")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}


def write_rows(path: Path, lengths: list[int], vocabulary: int) -> None:
    """Write rows of so many inputs each, as ids; every token but the first is trained."""
    draw = np.random.default_rng(7)
    with path.open("w") as file:
        for length in lengths:
            ids = draw.integers(3, vocabulary, length + 1).tolist()
            file.write(json.dumps({"input_ids": ids, "labels": [-100, *ids[1:]]}) + "\n")


def mixed(count: int, middle: float, sigma: float, longest: int) -> list[int]:
    """Draw log-normal lengths from 16 on; `middle` is the logarithm of the median."""
    drawn = np.random.default_rng(7).lognormal(middle, sigma, count)
    return [int(length) for length in np.clip(drawn, 16, longest)]


def write_config(path: Path, **values: Any) -> Path:
    """Write a run's config: the same updates in every epoch, and nothing between them."""
    constant = {
        "shuffle": False, "num_epochs": 100000, "save_every": 0, "eval_every": 0, "schedule": "constant",
        "warmup_steps": 0, "learning_rate": 1e-5, "max_seq_length": 4096,
    }  # fmt: skip
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in {**constant, **values}.items()))
    return path


def train(
    config: Path,
    seconds: float,
    *words: str,
    cores: set[int] | None = None,
    env: dict[str, str] | None = None,
    deadline: float = float("inf"),
    warm: int = 1,
) -> dict[str, Any]:
    """Train `warm` epochs to warm up, then measure whole epochs, as many as take so many seconds.

    Gives the rate in trained tokens per second, the update's time in ms, the last loss of each step, the number of
    trainable weights, what the last update said of itself, and the seconds until the measurement began.
    """
    command = [sys.executable, "-m", "trainwire_worker", "run", str(config), *words]

    def pin() -> None:
        if cores is not None:
            os.sched_setaffinity(0, cores)

    began = time.time()
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env or environment(), text=True, preexec_fn=pin
    )
    assert process.stdin is not None
    assert process.stdout is not None
    found: dict[str, Any] = {"losses": {}}
    marks: list[tuple[float, int, int]] = []
    tokens = step = 0
    for line in process.stdout:
        event = json.loads(line)
        if event["type"] == "init":
            found["weights"] = event["trainable_parameters"]
        elif event["type"] == "step":
            tokens, step = event["trained_tokens"], event["step"]
            found["losses"][step] = event["loss"]
            figures = ("micro_batches", "padding_fraction", "data_time_ms", "peak_bytes")
            found["last"] = {name: event[name] for name in figures}
        elif event["type"] == "epoch_start" and event["epoch"] > warm:
            marks.append((event["ts"] / 1000, tokens, step))
        elif event["type"] == "log" and event.get("code") == "profile":
            found["profile"] = event["message"]
        elif event["type"] == "error":
            raise RuntimeError(event["message"])
        if (marks and marks[-1][0] - marks[0][0] > seconds) or time.time() > deadline:
            process.stdin.close()
            process.kill()
            break
    process.wait()
    if len(marks) < 2:
        raise RuntimeError(f"No whole epoch could be measured in {time.time() - began:.0f} s.")
    (first, tokens_before, step_before), (last, tokens_after, step_after) = marks[0], marks[-1]
    found["rate"] = (tokens_after - tokens_before) / (last - first)
    found["ms"] = 1000 * (last - first) / (step_after - step_before)
    found["warm_seconds"] = first - began
    return found


def time_of_sum(values: int, places: list[dict[str, str]], backend: str, env: dict[str, str] | None = None) -> float:
    """Median time in ms of one sum over the ranks of so many float32 values."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _SUM, str(values), backend],
            env={**(env or environment()), **place},
            stdout=subprocess.PIPE,
            text=True,
        )
        for place in places
    ]
    printed = [process.communicate(timeout=120)[0] for process in processes]
    return 1000 * float(printed[0])


def compare(one: dict[str, Any], two: dict[str, Any], sum_ms: float) -> dict[str, Any]:
    """Put two runs beside each other."""
    both = one["losses"].keys() & two["losses"].keys()
    return {
        "one": round(one["rate"]), "two": round(two["rate"]), "ratio": round(two["rate"] / one["rate"], 3),
        "update_ms": [round(one["ms"], 2), round(two["ms"], 2)],
        "sum_ms": round(sum_ms, 3), "sum_share": round(sum_ms / two["ms"], 4),
        "warm_seconds": [round(one["warm_seconds"], 1), round(two["warm_seconds"], 1)],
        "last_updates": [one["last"], two["last"]],
        "updates_compared": len(both),
        "largest_loss_difference": max(abs(one["losses"][step] - two["losses"][step]) for step in both),
        **({"profile": two["profile"]} if "profile" in two else {}),
    }  # fmt: skip


def main() -> None:
    """Run both and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--method", default="lora", choices=["lora", "full"])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--profile", type=int, default=0, metavar="N")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="trainwire-ranks-"))
    model = {
        "model_type": "llama", "hidden_size": chosen.width, "intermediate_size": 4 * chosen.width,
        "num_hidden_layers": 4, "num_attention_heads": chosen.width // 32, "num_key_value_heads": chosen.width // 32,
        "head_dim": 32, "rms_norm_eps": 1e-6, "vocab_size": 512, "max_position_embeddings": 4096,
        "rope_theta": 10000.0, "tie_word_embeddings": True,
    }  # fmt: skip
    try:
        subprocess.run(
            [sys.executable, "-c", _MAKE, str(folder / "model"), json.dumps(model)], check=True, env=environment()
        )
        write_rows(folder / "rows.jsonl", mixed(UPDATES * chosen.batch_size, 5.0, 0.7, 800), 512)
        config = write_config(
            folder / "run.toml", model=str(folder / "model"), data=str(folder / "rows.jsonl"),
            cache_dir=str(folder / "cache"), method=chosen.method, batch_size=chosen.batch_size,
        )  # fmt: skip
        profile = ["--profile", str(chosen.profile)] if chosen.profile else []
        core = {min(os.sched_getaffinity(0))}
        one = train(config, chosen.seconds, f"run_dir={folder}/one", *profile, cores=core)
        two = train(config, chosen.seconds, f"run_dir={folder}/two", *profile, "--ranks", "2")
        ring = folder / "ring.json"
        ring.write_text(json.dumps([["127.0.0.1:46001"], ["127.0.0.1:46002"]]))
        places = [{"MLX_HOSTFILE": str(ring), "MLX_RANK": str(rank)} for rank in range(2)]
        result = compare(one, two, time_of_sum(one["weights"] + 7, places, "ring"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"method": chosen.method, **result}, indent=1))
    if chosen.out:
        chosen.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
