"""Compares a run on two GPUs, over NCCL, with the same run on one: scaling efficiency, and what the sum takes.

    python benchmarks/two_gpus.py --tokenizer FOLDER [--gpus 2] [--cases lora full] [--seconds 90] [--out FILE]

Model and rows are those of gpu.py (the shape of Qwen3 0.6B, rows of log-normal lengths, every token trained). Both
runs make the same updates: `batch_size` counts the examples of an update on all ranks together, and is 16 here so that
each GPU gets as much as one GPU gets in gpu.py. Figures are trained tokens per second over the second half.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from gpu import environment, make_inputs
from ranks import compare, time_of_sum, train


def main() -> None:
    """Run the cases and print a comparison for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/trainwire-gpu"))
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--cases", nargs="+", default=["lora", "full"], choices=["lora", "full"])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--port", type=int, default=46001)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    make_inputs(chosen.folder, chosen.tokenizer, chosen.rows)
    results: dict[str, Any] = {}
    for method in chosen.cases:
        values = {
            "model": str(chosen.folder / "model"), "data": str(chosen.folder / "data/train.jsonl"), "method": method,
            "train_on": "all", "batch_size": chosen.batch_size, "save_every": 0, "eval_every": 0, "num_epochs": 50,
            "learning_rate": 1e-5, "schedule": "constant", "warmup_steps": 0, "max_seq_length": 2048,
            "cache_dir": str(chosen.folder / "cache"),
        }  # fmt: skip
        config = chosen.folder / f"ranks-{method}.toml"
        config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
        runs = []
        for gpus in (1, chosen.gpus):
            run_dir = chosen.folder / f"ranks-{method}-{gpus}"
            shutil.rmtree(run_dir, ignore_errors=True)
            words = ["--ranks", str(gpus)] if gpus > 1 else []
            runs.append(train(config, chosen.seconds, f"run_dir={run_dir}", *words, env=environment()))
        places = [
            {
                "MLX_RANK": str(rank), "MLX_WORLD_SIZE": str(chosen.gpus), "NCCL_HOST_IP": "127.0.0.1",
                "NCCL_PORT": str(chosen.port), "CUDA_VISIBLE_DEVICES": str(rank),
            }
            for rank in range(chosen.gpus)
        ]  # fmt: skip
        sum_ms = time_of_sum(runs[0]["weights"] + 7, places, "nccl", env=environment())
        result = compare(*runs, sum_ms)
        results[method] = {**result, "gpus": chosen.gpus, "efficiency": round(result["ratio"] / chosen.gpus, 3)}
        print(method, json.dumps(results[method]), flush=True)
    if chosen.out:
        chosen.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
