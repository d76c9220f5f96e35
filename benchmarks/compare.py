"""The cases of the comparison with `mlx_lm.lora`, and what is made of their runs."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.inputs import make_model, make_rows
from benchmarks.sides import BATCH, LEARNING_RATE, Job, Training, mlx_lm, trainwire


@dataclass(frozen=True)
class Case:
    """A model and method; the updates that trainwire, the peer on the same BLAS and the stock peer make, over rows of
    at most `longest` words.

    `goal_same` and `goal_stock` are the ratios of trained tokens per second to reach. `short`: part of `make bench`.
    `stock_longest`: where the stock BLAS takes minutes an update, it is compared over shorter rows and once, with a
    run of trainwire over the same. `learning_rate`: at 1e-3 a trained model is thrown off by its first full updates,
    and rounding decides where to.
    """

    model: str
    method: str
    updates: tuple[int, int, int]
    longest: int
    goal_same: float
    goal_stock: float
    short: bool = False
    stock_longest: int | None = None
    learning_rate: float = LEARNING_RATE


CASES = {
    "512-words-lora": Case("512-words", "lora", (40, 12, 6), 200, 4, 4, short=True),
    "512-words-full": Case("512-words", "full", (40, 12, 6), 200, 4, 4, short=True),
    "tiny-lora": Case("tiny", "lora", (16, 6, 2), 400, 3, 15, short=True),
    "tiny-full": Case("tiny", "full", (16, 6, 2), 400, 3, 15, short=True),
    "50M-lora": Case("50M", "lora", (8, 4, 2), 120, 3, 15, stock_longest=20),
    "50M-full": Case("50M", "full", (8, 4, 2), 120, 3, 15, stock_longest=20),
    "smollm2-lora": Case("smollm2", "lora", (5, 3, 2), 80, 2, 15, stock_longest=20),
    "smollm2-full": Case("smollm2", "full", (5, 3, 2), 80, 2, 15, stock_longest=20, learning_rate=1e-5),
}

GOAL_FIRST_UPDATE = GOAL_PEAK = 0.5
"""Most of the peer's time to the first update, and of its peak memory, on the same BLAS."""

AGREE = 1e-3
"""Relative difference of an update's losses up to which both sides learn the same."""


def compare(case: Case, folder: Path, rounds: int, threads: int | None = None) -> dict[str, Any]:
    """Run a case; raises RuntimeError if a side fails or if the sides did not train the same.

    The peer on trainwire's BLAS gets so many of its `threads`, or as many as it is faster with. Where the stock peer
    trains rows of its own, it is left to `beside_stock`.
    """
    job = _job(case, folder, max(case.updates), case.longest)
    if threads is None:
        threads = faster_threads(lambda count, limit: mlx_lm(job, 2, str(count), limit))
    else:
        mlx_lm(job, 1, str(threads))
    trainwire(job, 2)
    ours, same, stock = [], [], []
    for _ in range(rounds):
        ours.append(trainwire(job, case.updates[0]))
        same.append(mlx_lm(job, case.updates[1], str(threads)))
        if case.stock_longest is None:
            stock.append(mlx_lm(job, case.updates[2], "stock"))
    sides = {"trainwire": _figures(ours), "same": _figures(same)}
    result = {
        "blas": ours[0].blas,
        "peer_blas_threads": threads,
        "goals": {
            "same": case.goal_same,
            "stock": case.goal_stock,
            "first_update": GOAL_FIRST_UPDATE,
            "peak": GOAL_PEAK,
        },
        "sides": sides,
        "ratios": {
            "same": ratio(ours, same),
            "first_update": sides["trainwire"]["first_update_seconds"] / sides["same"]["first_update_seconds"],
            "peak": sides["trainwire"]["peak_bytes"] / sides["same"]["peak_bytes"],
        },
        "same_training": same_training(ours[0], same[0]),
    }
    return {**result, **(_against(stock, ours, result) if stock else {})}


def beside_stock(case: Case, folder: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Add to a case's result the stock peer over its own, shorter rows, and a run of trainwire over the same."""
    assert case.stock_longest is not None
    job = _job(case, folder, case.updates[2], case.stock_longest)
    trainwire(job, 1)
    ours = [trainwire(job, case.updates[2])]
    stock = [mlx_lm(job, case.updates[2], "stock")]
    return {**result, **_against(stock, ours, result)}


def _job(case: Case, folder: Path, updates: int, longest: int) -> Job:
    """What both sides of a case train: rows for so many updates, the longest of so many words."""
    rows = make_rows(folder / f"rows-{longest}", BATCH * updates, longest)
    place = folder / f"runs-{case.model}-{case.method}"
    return Job(make_model(case.model, folder), rows, place, case.method, learning_rate=case.learning_rate)


def _against(stock: list[Training], ours: list[Training], result: dict[str, Any]) -> dict[str, Any]:
    """Give what a result gains by the stock peer and a run of trainwire over the same rows."""
    return {
        "sides": {**result["sides"], "stock": _figures(stock)},
        "beside_stock": _figures(ours),
        "ratios": {**result["ratios"], "stock": ratio(ours, stock)},
        "stock_training": same_training(ours[0], stock[0]),
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
    """Compare update by update; raises RuntimeError if the trained tokens or the losses differ."""
    pairs = list(zip(ours.tokens, theirs.tokens))
    if any(a != b for a, b in pairs):
        raise RuntimeError(f"the sides trained different tokens: {pairs}")
    apart = [abs(a - b) / b for a, b in zip(ours.losses, theirs.losses)]
    if max(apart) > AGREE:
        raise RuntimeError(f"the sides learned differently: {ours.losses}, {theirs.losses}")
    return {
        "updates": len(pairs),
        "first_losses": [ours.losses[0], theirs.losses[0]],
        "last_losses": [ours.losses[len(pairs) - 1], theirs.losses[len(pairs) - 1]],
        "largest_difference": max(apart),
    }


def _figures(runs: list[Training]) -> dict[str, Any]:
    updates = len(runs[0].times)
    return {
        "runs": len(runs),
        "updates": updates,
        "tokens_per_second": statistics.median(run.rate(updates) for run in runs),
        "first_update_seconds": statistics.median(run.times[0] for run in runs),
        "peak_bytes": statistics.median(run.peak_bytes for run in runs),
        "resident_bytes": statistics.median(run.resident_bytes for run in runs),
    }
