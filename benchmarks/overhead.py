"""What trainwire adds to its engine: the loop outside MLX, and the worker with its wire.

    python -m benchmarks.overhead [--model 512-words] [--updates 60] [--rounds 6] [--folder FOLDER]

The same updates, in turn (A B A B): by the engine's parts alone (`benchmarks.alone`), and by `trainwire run` with its
worker, its log and its lines on stdout. Then one run with `--profile`, which tells the share of an update that passes
outside MLX. Goals: at most 1 % and at most 2 %.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.arguments import folder_of, parser
from benchmarks.inputs import make_model, make_rows
from benchmarks.sides import BATCH, Job, Training, alone, trainwire


def main() -> None:
    """Measure both and print one line of JSON."""
    chosen = parser(__doc__, model="512-words", updates=60, rounds=6).parse_args()
    with folder_of(chosen) as folder:
        print(json.dumps(measure(chosen.model, chosen.updates, chosen.rounds, folder)))


def measure(name: str, updates: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Give the rates of both, what the worker costs, and the loop's share outside MLX."""
    model = make_model(name, folder)
    rows = make_rows(folder / "rows-overhead", BATCH * updates, 200)
    job = Job(model, rows, folder / f"overhead-{name}", "lora")
    trainwire(job, 2)
    bare: list[Training] = []
    whole: list[Training] = []
    for _ in range(rounds):
        bare.append(alone(job, updates))
        whole.append(trainwire(job, updates))
    profiled = trainwire(job, 22, "--profile", "20")
    parts = {key: ms for key, ms in profiled.profile.items() if key.endswith("_ms")}
    rates = {"alone": [run.rate(updates) for run in bare], "worker": [run.rate(updates) for run in whole]}
    return {
        "model": name,
        "updates": updates,
        "tokens_per_second": {side: statistics.median(found) for side, found in rates.items()},
        "spread": {side: max(found) / min(found) - 1 for side, found in rates.items()},
        "worker_and_wire": 1 - statistics.median(rates["worker"]) / statistics.median(rates["alone"]),
        "worker_processor_share": statistics.median(
            run.worker_seconds / (run.times[-1] - run.times[0]) for run in whole
        ),
        "profile_ms": parts,
        "outside_mlx": parts["outside_ms"] / sum(parts.values()),
    }


if __name__ == "__main__":
    main()
