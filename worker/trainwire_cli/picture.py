"""Draws the curves of one or several runs with matplotlib: loss above, learning rate and speed below."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainwire_client import Series

from .curves import Curves, smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours: told apart by most colour-blind people, and in grey.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_SMOOTH_FROM = 60
_MARKS = {"best": "*", "final": "D", "manual": "^", "emergency": "X"}


def _plain(series: Series) -> tuple[list[int], list[float]]:
    return series.steps, [math.nan if v is None else v for v in series.values]


def _dot(series: Series) -> str | None:
    """What lets a curve of one or two points be seen."""
    return "." if len(series.steps) < 3 else None


def _draw_loss(axes: Axes, run: Curves, colour: str, *, alone: bool) -> None:
    steps, values = _plain(run.loss)
    label = "training" if alone else run.name
    if len(values) >= _SMOOTH_FROM:
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
        window = max(5, len(values) // 40)
        calm = [math.nan if v is None else v for v in smoothed(list(run.loss.values), window)]
        axes.plot(steps, calm, color=colour, linewidth=1.8, label=label)
    else:
        axes.plot(steps, values, color=colour, linewidth=1.8, label=label, marker=_dot(run.loss))
    if run.valid_loss.steps:
        steps, values = _plain(run.valid_loss)
        other = _COLOURS[1] if alone else colour
        label = "validation" if alone else f"{run.name}, validation"
        axes.plot(steps, values, color=other, linewidth=1.2, linestyle="--", marker="o", markersize=4, label=label)


def _mark_events(axes: Axes, run: Curves) -> None:
    """Mark where epochs ended and checkpoints were written."""
    for number, step in enumerate(run.epochs, 1):
        axes.axvline(
            step, color="#999999", linewidth=0.8, linestyle=":", label="end of an epoch" if number == 1 else None
        )
    by_step = dict(zip(run.loss.steps, run.loss.values))
    seen: set[str] = set()
    for step, kind in run.checkpoints:
        near = min(run.loss.steps, key=lambda s: abs(s - step), default=None)
        height = by_step.get(near) if near is not None else None
        if height is not None:
            axes.plot(
                [step],
                [height],
                marker=_MARKS.get(kind, "s"),
                markersize=13 if kind == "best" else 6,
                markerfacecolor="white",
                markeredgecolor="#333333",
                linestyle="none",
                label=None if kind in seen else f"checkpoint, {kind}",
            )
            seen.add(kind)


def _frame(axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    axes.grid(visible=True, color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def draw(runs: Sequence[Curves]) -> Figure:
    """Draw runs into one figure; a single one also gets its epochs and checkpoints marked."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure = Figure(figsize=(10, 7), layout="constrained", facecolor="white")
    loss, rate, speed = figure.subplots(3, 1, sharex=True, height_ratios=(4, 1, 1))
    for number, run in enumerate(runs):
        colour = _COLOURS[number % len(_COLOURS)]
        _draw_loss(loss, run, colour, alone=len(runs) == 1)
        rate.plot(*_plain(run.learning_rate), color=colour, linewidth=1.4, marker=_dot(run.learning_rate))
        speed.plot(*_plain(run.tokens_per_second), color=colour, linewidth=1.0, marker=_dot(run.tokens_per_second))
    if len(runs) == 1:
        _mark_events(loss, runs[0])
    _frame(loss, "loss (nats per trained token)")
    _frame(rate, "learning rate")
    _frame(speed, "tokens/s")
    rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    peak = max((v for run in runs for v in run.learning_rate.values if v is not None), default=0.0)
    rate.set_ylim(0, 1.1 * peak or 1.0)
    speed.set_ylim(bottom=0)
    speed.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value / 1000:g}k" if value >= 1000 else f"{value:g}")
    )
    speed.set_xlabel("step (updates)")
    speed.xaxis.set_major_locator(MaxNLocator(integer=True))
    last = max((run.loss.steps[-1] for run in runs if run.loss.steps), default=0)
    speed.set_xlim(0, max(2.0, 1.03 * last))
    if not last:
        loss.text(0.5, 0.5, "no update yet", transform=loss.transAxes, ha="center", color="#666666")
    figure.align_ylabels()
    if last and loss.get_legend_handles_labels()[0]:
        loss.legend(frameon=False, fontsize=9)
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    figure.suptitle(title, fontsize=13, fontweight="bold")
    return figure


def as_svg(figure: Figure) -> str:
    """Give a figure as an SVG element to put into a page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    return text[text.index("<svg") :]
