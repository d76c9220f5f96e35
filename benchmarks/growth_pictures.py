"""Draws what `growth.py` and `data.py --scale` measured: time and memory over one thing at a time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

TITLES = {
    "lengths": "tokens of one row",
    "batch": "rows of 128 tokens in an update",
    "vocabulary": "words of the vocabulary",
    "depth": "blocks",
}


def draw(files: list[Any], into: Path) -> list[Path]:
    """Write growth.png (an update) and growth_run.png (a run) from the JSON of growth.py and, a list, of data.py."""
    measured: dict[str, Any] = {}
    for file in files:
        measured |= {"rows": file} if isinstance(file, list) else file
    plt.rcParams.update({"font.size": 8, "axes.spines.top": False})
    return [_updates(measured, into), _runs(measured, into)]


def _updates(measured: dict[str, Any], into: Path) -> Path:
    parts = [part for part in TITLES if measured.get(part)]
    figure, places = plt.subplots(1, len(parts), figsize=(3 * len(parts), 2.8), squeeze=False, layout="constrained")
    for part, axes in zip(parts, places[0]):
        points = measured[part]
        at = [point["at"] for point in points]
        _log(axes, at, [1000 * point["core_seconds"] for point in points], "milliseconds of a core", "C0", TITLES[part])
        _log(axes.twinx(), at, [point["peak_bytes"] / 1e6 for point in points], "peak memory, MB", "C3", TITLES[part])
    return _saved(figure, into / "growth.png")


def _runs(measured: dict[str, Any], into: Path) -> Path:
    figure, (memory, rate, rows) = plt.subplots(1, 3, figsize=(9, 2.8), layout="constrained")
    for part in measured.get("updates", []):
        for key in ("active", "cache", "peak", "resident"):
            samples = part["samples"]
            memory.plot([s["update"] for s in samples], [s[key] / 1e6 for s in samples], ".-", label=key)
    memory.set(xlabel="updates made", ylabel="MB", ylim=(0, 1.35 * memory.get_ylim()[1]))
    memory.legend(frameon=False, ncol=2, loc="upper center")
    if points := measured.get("events"):
        at = [point["at"] for point in points]
        _log(rate, at, [point["events_per_second"] for point in points], "events a second", "C0", "steps of a run")
        _log(rate.twinx(), at, [p["resident_bytes"] / 1e6 for p in points], "resident, MB", "C3", "steps of a run")
    if points := measured.get("rows"):
        at = [point["rows"] for point in points]
        _log(rows, at, [point["seconds_to_first_rows"] for point in points], "seconds to first rows", "C0", "rows")
        _log(rows.twinx(), at, [p["peak_mib_of_all_processes"] for p in points], "peak of all, MiB", "C3", "rows")
    for axes in (memory, rate, rows):
        axes.set_visible(bool(axes.lines))
    return _saved(figure, into / "growth_run.png")


def _log(axes: Axes, at: list[float], values: list[float], what: str, color: str, along: str) -> None:
    # Dashes let one line be seen under the other.
    axes.loglog(at, values, ".-" if color == "C0" else ".--", color=color)
    # The powers of ten that matplotlib writes by itself lie on top of each other where the points are few.
    axes.set_xticks(at, _labels(at))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.set_xlabel(along)
    axes.set_ylabel(what, color=color)
    low, high = min(values), max(values)
    # Two decades at least: what does not grow is to look like it.
    axes.set_ylim(low / 3, max(high * 2, low * 33))


def _labels(at: list[float]) -> list[str]:
    """Label the points, but for those that lie too near to the one before: 512, 1k, …; 1,024 is 1k, as 1,000 is."""
    labels, last = [], 0.0
    for value in at:
        size = 1024 if value % 1024 == 0 else 1000
        near = last > 0 and math.log(value / last) < math.log(at[-1] / at[0]) / 8
        large = f"{value / size:g}k" if value < size**2 else f"{value / size**2:g}M"
        labels.append("" if near else f"{value:g}" if value < 1000 else large)
        last = last if near else value
    return labels


def _saved(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path
