"""Compares the peak memory of an update with a large vocabulary: 151,936 words, rows of 1,024 tokens on average.

    python -m benchmarks.peak [--rows 8] [--peer-rows 1 2] [--words 720] [--folder FOLDER]

One update each, LoRA on a model whose blocks are small, so that the head is what takes the memory. `mlx_lm.lora`
builds all logits and their gradient, several times: with 8 such rows it needs more memory than a machine of 24 GB has.
It trains `--peer-rows` instead, and its peak grows with them in proportion. Bytes are MLX's own peak.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from benchmarks.arguments import add_folder, folder_of
from benchmarks.inputs import make_model, make_rows
from benchmarks.sides import Job, Training, mlx_lm, trainwire


def main() -> None:
    """Train once with each and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--peer-rows", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--words", type=int, default=720, help="of a row, 1.42 tokens each")
    add_folder(parser)
    chosen = parser.parse_args()
    with folder_of(chosen) as folder:
        model = make_model("wide-head", folder)
        rows = make_rows(folder / f"rows-equal-{chosen.words}", chosen.rows, chosen.words, equal=True)
        job = Job(model, rows, folder / "peak", "lora", batch=chosen.rows)
        print(json.dumps(_figures("trainwire", chosen.rows, trainwire(job, 1))))
        for count in chosen.peer_rows:
            run = mlx_lm(replace(job, batch=count), 1, "1")
            print(json.dumps(_figures("mlx_lm.lora", count, run)), flush=True)


def _figures(side: str, rows: int, run: Training) -> dict[str, Any]:
    return {
        "side": side,
        "rows": rows,
        "trained_tokens": run.tokens[0],
        "peak_gb": round(run.peak_bytes / 1e9, 3),
        "resident_gb": round(run.resident_bytes / 1e9, 3),
        "loss": run.losses[0],
    }


if __name__ == "__main__":
    main()
