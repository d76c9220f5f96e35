"""Compares two ranks on two cores with one process pinned to one core, over the ring backend on loopback.

    python benchmarks/ranks.py [--seconds 25] [--method lora] [--out FILE]

A model of a million weights trains on rows of log-normal lengths, batch 16, in float32. Figures are trained tokens per
second over the second half of the updates, and the two runs' losses, which have to agree. The share of an update that
the sum over the ranks takes is measured apart: the same number of float32 values, summed by two idle processes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODEL = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "rms_norm_eps": 1e-6,
    "vocab_size": 512, "max_position_embeddings": 4096, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip
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


def write_rows(path: Path, rows: int) -> None:
    """Write text rows; a letter is about a token."""
    draw = random.Random(7)
    with path.open("w") as file:
        for _ in range(rows):
            length = max(16, min(800, int(draw.lognormvariate(5.0, 0.7))))
            file.write(json.dumps({"text": "".join(draw.choice("qwxzjkvb") for _ in range(length))}) + "\n")


def train(
    config: Path, seconds: float, *words: str, cores: set[int] | None = None, env: dict[str, str] | None = None
) -> dict[str, Any]:
    """Train for a while; steady rate, loss by step, trainable weights, and time of an update in ms."""
    command = [sys.executable, "-m", "trainwire_worker", "run", str(config), *words]

    def pin() -> None:
        if cores is not None:
            os.sched_setaffinity(0, cores)

    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env or environment(), text=True, preexec_fn=pin
    )
    assert process.stdin is not None
    assert process.stdout is not None
    points: list[tuple[float, int]] = []
    losses: dict[int, float] = {}
    result: dict[str, Any] = {}
    stop_at = float("inf")
    for line in process.stdout:
        event = json.loads(line)
        if event["type"] == "init":
            result["weights"] = event["trainable_parameters"]
        elif event["type"] == "step":
            stop_at = min(stop_at, time.time() + seconds)
            points.append((event["ts"] / 1000, event["trained_tokens"]))
            losses[event["step"]] = event["loss"]
        elif event["type"] == "error":
            raise RuntimeError(event["message"])
        if time.time() > stop_at:
            stop_at = float("inf")
            process.stdin.write('{"cmd":"stop","save":false}\n')
            process.stdin.flush()
    process.wait()
    middle = points[len(points) // 2]
    span = points[-1][0] - middle[0]
    rate = (points[-1][1] - middle[1]) / span
    return {**result, "rate": rate, "ms": 1000 * span / (len(points) - 1 - len(points) // 2), "losses": losses}


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
        "update_ms": round(two["ms"], 2), "sum_ms": round(sum_ms, 3), "sum_share": round(sum_ms / two["ms"], 4),
        "updates_compared": len(both),
        "largest_loss_difference": max(abs(one["losses"][step] - two["losses"][step]) for step in both),
    }  # fmt: skip


def main() -> None:
    """Run both and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--method", default="lora", choices=["lora", "full"])
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="trainwire-ranks-"))
    try:
        subprocess.run(
            [sys.executable, "-c", _MAKE, str(folder / "model"), json.dumps(MODEL)], check=True, env=environment()
        )
        write_rows(folder / "rows.jsonl", 2000)
        values = {
            "model": str(folder / "model"), "data": str(folder / "rows.jsonl"), "cache_dir": str(folder / "cache"),
            "method": chosen.method, "batch_size": 16, "num_epochs": 1000, "save_every": 0, "eval_every": 0,
            "schedule": "constant", "warmup_steps": 0, "learning_rate": 1e-4,
        }  # fmt: skip
        config = folder / "run.toml"
        config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
        core = {min(os.sched_getaffinity(0))}
        one = train(config, chosen.seconds, f"run_dir={folder}/one", cores=core)
        two = train(config, chosen.seconds, f"run_dir={folder}/two", "--ranks", "2")
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
