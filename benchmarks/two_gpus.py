"""Compares a run on two GPUs, over NCCL, with the same run on one: scaling efficiency, and what the sum takes.

    python benchmarks/two_gpus.py --tokenizer FOLDER [--gpus 2] [--cases fixed mixed full] [--limit 460] [--out FILE]

The model has the shape of Qwen3 0.6B. Both runs make the same updates: `batch_size` counts the examples of an update on
all ranks together. The first epochs trace, compile and record, later ones of the same updates are measured whole.

- fixed: LoRA, updates of 64 rows of 1,024 tokens: no padding, and a pass of 16 rows is one of four on one GPU and one
  of two on each of two GPUs. It measures what the ranks cost, and nothing else.
- mixed: LoRA, updates of 256 rows of log-normal lengths: with the padding and the shapes of real rows.
- full: as fixed, every weight trained, so that 2.4 GB of gradients are summed in each update.

`--profile N` says where the time of rank 0's first updates goes. What the limit, in seconds, leaves no time for is left
out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

from gpu import environment, make_inputs
from ranks import compare, mixed, time_of_sum, train, write_config, write_rows

EPOCH = 8
"""Updates of an epoch."""
_WARM = 2
"""Epochs before the measurement: where memory is short, recordings of the first are made once more in the second."""
CASES: dict[str, tuple[str, int, list[int]]] = {
    "fixed": ("lora", 64, [1024] * 64 * EPOCH),
    "mixed": ("lora", 256, mixed(256 * EPOCH, 5.4, 0.9, 1900)),
    "full": ("full", 64, [1024] * 64 * EPOCH),
}
"""Method, rows of an update, and lengths of the rows."""


def measure(name: str, chosen: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """Run one case on one and on several GPUs."""
    method, batch_size, lengths = CASES[name]
    folder: Path = chosen.folder
    write_rows(folder / f"{name}.jsonl", lengths, 151000)
    config = write_config(
        folder / f"{name}.toml", model=str(folder / "model"), data=str(folder / f"{name}.jsonl"), method=method,
        batch_size=batch_size, cache_dir=str(folder / "cache"),
    )  # fmt: skip
    runs = []
    for gpus in (1, chosen.gpus):
        run_dir = folder / f"{name}-{gpus}"
        shutil.rmtree(run_dir, ignore_errors=True)
        words = [f"run_dir={run_dir}", *(["--profile", str(chosen.profile)] if chosen.profile else [])]
        words += ["--ranks", str(gpus)] if gpus > 1 else []
        runs.append(train(config, chosen.seconds, *words, env=environment(), deadline=deadline, warm=_WARM))
        print(name, gpus, json.dumps({key: value for key, value in runs[-1].items() if key != "losses"}), flush=True)
    places = [
        {
            "MLX_RANK": str(rank), "MLX_WORLD_SIZE": str(chosen.gpus), "NCCL_HOST_IP": "127.0.0.1",
            "NCCL_PORT": str(chosen.port), "CUDA_VISIBLE_DEVICES": str(rank),
        }
        for rank in range(chosen.gpus)
    ]  # fmt: skip
    sum_ms = time_of_sum(runs[0]["weights"] + 7, places, "nccl", env=environment())
    result = compare(*runs, sum_ms)
    return {**result, "gpus": chosen.gpus, "efficiency": round(result["ratio"] / chosen.gpus, 3)}


def main() -> None:
    """Run the cases and print a comparison for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/trainwire-gpu"))
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--cases", nargs="+", default=["fixed", "mixed"], choices=list(CASES))
    parser.add_argument("--seconds", type=float, default=15.0, help="to measure each run for, in whole epochs")
    parser.add_argument("--limit", type=float, default=460.0, help="seconds for everything")
    parser.add_argument("--profile", type=int, default=0, metavar="N")
    parser.add_argument("--port", type=int, default=46001)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    deadline = time.time() + chosen.limit
    make_inputs(chosen.folder, chosen.tokenizer, 1)
    results: dict[str, Any] = {}
    for name in chosen.cases:
        try:
            results[name] = measure(name, chosen, deadline)
        except RuntimeError as error:
            results[name] = {"error": str(error)}
        print(name, json.dumps(results[name]), flush=True)
        if chosen.out:
            chosen.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
