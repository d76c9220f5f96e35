"""Results as lines and as the table of README.md."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- results -->", "<!-- end of results -->"


def machine() -> dict[str, Any]:
    """What the figures were measured on, and when."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "machine": f"{cpu}, {cores} cores, {platform.system()}",
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "trainwire")}
        | {"python": platform.python_version()},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def line_of(name: str, result: dict[str, Any]) -> str:
    """One line for the terminal."""
    sides, ratios = result["sides"], result["ratios"]
    installed = f"{ratios['stock']:.1f} times the installed one" if "stock" in ratios else "not yet beside it installed"
    return (
        f"{name}: {sides['trainwire']['tokens_per_second']:,.0f} trained tokens/s, {ratios['same']:.1f} times"
        f" mlx_lm.lora on the same BLAS, {installed}; {ratios['peak']:.2f} of its"
        f" peak memory, first update after {ratios['first_update']:.2f} of its time; losses apart by"
        f" {result['same_training']['largest_difference']:.1e} at most; load {result['load']}"
    )


def table(results: dict[str, Any]) -> str:
    """The rows of all results."""
    head = (
        "| case | trained tokens/s | same BLAS: tokens/s, ratio (goal) | installed: tokens/s, ratio (goal)"
        " | peak memory GB, ratio (goal) | first update s, ratio (goal) | losses apart | load, date |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    return "\n".join([head, *(_row(name, result) for name, result in results.items())])


def _row(name: str, result: dict[str, Any]) -> str:
    sides, ratios, goals = result["sides"], result["ratios"], result["goals"]
    rate = {side: f"{figures['tokens_per_second']:,.0f}" for side, figures in sides.items()}
    peak = " / ".join(f"{sides[side]['peak_bytes'] / 1e9:.2f}" for side in ("trainwire", "same"))
    first = " / ".join(f"{figures['first_update_seconds']:.1f}" for figures in sides.values())
    same, stock = (
        f"{rate[side]}, {ratios[side]:.1f} (≥ {goals[side]:g})" if side in rate else "not measured"
        for side in ("same", "stock")
    )
    return (
        f"| {name} | {rate['trainwire']} | {same} | {stock}"
        f" | {peak}, {ratios['peak']:.2f} (≤ {goals['peak']:g})"
        f" | {first}, {ratios['first_update']:.2f} (≤ {goals['first_update']:g})"
        f" | {result['same_training']['largest_difference']:.1e} | {result['load']}, {result['date']} |"
    )


def write_readme(results: dict[str, Any]) -> None:
    """Put the table and its machine into README.md, between its marks."""
    readme = HERE / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    after = rest.split(END)[1]
    last = list(results.values())[-1]
    versions = ", ".join(f"{name} {number}" for name, number in last["versions"].items())
    about = f"{last['machine']}; {last['blas']}; {versions}."
    readme.write_text(f"{before}{BEGIN}\n{table(results)}\n\n{about}\n{END}{after}")
