"""The cases of the comparison with `mlx_lm.lora`, and what is made of their runs."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.inputs import make_model, make_rows
from benchmarks.sides import BATCH, Training, mlx_lm, trainwire


@dataclass(frozen=True)
class Case:
    """A model and method; the updates that trainwire, the peer on the same BLAS and the stock peer make.

    `goal_same` and `goal_stock` are the ratios of trained tokens per second to reach.
    """

    model: str
    method: str
    updates: tuple[int, int, int]
    longest: int
    goal_same: float
    goal_stock: float
    short: bool = False


CASES = {
    "512-words-lora": Case("512-words", "lora", (40, 12, 8), 200, 4, 4, short=True),
    "512-words-full": Case("512-words", "full", (40, 12, 8), 200, 4, 4, short=True),
    "tiny-lora": Case("tiny", "lora", (16, 8, 3), 400, 3, 15, short=True),
    "tiny-full": Case("tiny", "full", (16, 8, 3), 400, 3, 15, short=True),
    "50M-lora": Case("50M", "lora", (12, 6, 2), 400, 3, 15),
    "50M-full": Case("50M", "full", (12, 6, 2), 400, 3, 15),
    "smollm2-lora": Case("smollm2", "lora", (8, 5, 2), 300, 2, 15),
    "smollm2-full": Case("smollm2", "full", (8, 5, 2), 300, 2, 15),
}


def compare(case: Case, folder: Path, rounds: int) -> dict[str, Any]:
    """Run a case; raises RuntimeError if a side fails or if the sides did not train the same."""
    model = make_model(case.model, folder)
    rows = make_rows(folder / f"rows-{case.longest}", BATCH * max(case.updates), case.longest)
    place = folder / f"runs-{case.model}-{case.method}"
    threads = faster_threads(lambda count, limit: mlx_lm(model, rows, place, case.method, 3, str(count), limit))
    trainwire(model, rows, place, case.method, 2)
    ours, same, stock = [], [], []
    for _ in range(rounds):
        ours.append(trainwire(model, rows, place, case.method, case.updates[0]))
        same.append(mlx_lm(model, rows, place, case.method, case.updates[1], str(threads)))
        stock.append(mlx_lm(model, rows, place, case.method, case.updates[2], "stock"))
    return {
        "blas": ours[0].blas,
        "peer_blas_threads": threads,
        "goals": {"same": case.goal_same, "stock": case.goal_stock},
        "sides": {"trainwire": _figures(ours), "same": _figures(same), "stock": _figures(stock)},
        "ratios": {"same": ratio(ours, same), "stock": ratio(ours, stock)},
        "same_training": same_training(ours[0], same[0]),
    }


def faster_threads(run: Callable[[int, float | None], Training]) -> int:
    """The number of BLAS threads that the peer is faster with, one or all: idle threads of OpenBLAS spin."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores == 1:
        return 1
    alone = run(1, None).times
    together = run(cores, 1.5 * alone[-1] + 2).times
    return cores if len(together) == len(alone) and together[-1] - together[0] < alone[-1] - alone[0] else 1


def ratio(ours: list[Training], theirs: list[Training]) -> float:
    """How many times as many trained tokens per second trainwire makes, over the updates that both made."""
    updates = min(len(ours[0].times), len(theirs[0].times))
    # The tokens are the same, so the rates of both are taken of ours.
    rates = [run.rate(updates) for run in ours]
    peer = [sum(ours[0].tokens[1:updates]) / (run.times[updates - 1] - run.times[0]) for run in theirs]
    return statistics.median(rates) / statistics.median(peer)


def same_training(ours: Training, theirs: Training) -> dict[str, Any]:
    """Compare update by update: tokens, and losses; raises RuntimeError if the tokens differ.

    `mlx_lm.lora` counts the first place behind the end of a padded row as trained, so it has up to one token a row
    more, and the losses differ by what those add.
    """
    pairs = list(zip(ours.tokens, theirs.tokens))
    if any(not 0 <= b - a <= BATCH for a, b in pairs):
        raise RuntimeError(f"the sides trained different tokens: {pairs}")
    apart = [abs(a - b) / b for a, b in zip(ours.losses, theirs.losses)]
    return {
        "updates": len(pairs),
        "first_losses": [ours.losses[0], theirs.losses[0]],
        "last_losses": [ours.losses[len(pairs) - 1], theirs.losses[len(pairs) - 1]],
        "largest_difference": max(apart),
    }


def _figures(runs: list[Training]) -> dict[str, float]:
    updates = len(runs[0].times)
    return {
        "updates": updates,
        "tokens_per_second": statistics.median(run.rate(updates) for run in runs),
        "first_update_seconds": statistics.median(run.times[0] for run in runs),
        "peak_bytes": statistics.median(run.peak_bytes for run in runs),
        "resident_bytes": statistics.median(run.resident_bytes for run in runs),
    }
