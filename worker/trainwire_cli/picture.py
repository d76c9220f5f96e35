"""Draws the curves of one or several runs with matplotlib: loss above, learning rate and speed below."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwire_client import Series

from .curves import Curves, smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours: told apart by most colour-blind people, and in grey.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_SMOOTH_FROM = 60
_MARKS = {"best": "*", "final": "D", "manual": "^", "emergency": "X"}
_ON_CURVE = ("best", "final", "emergency")
"""Kinds of checkpoints that are few; the others stand in a row below, where they cover no curve."""
_ROW = 0.025
_MAX_EPOCHS = 25
"""Lines for ends of epochs at most: more are a grey ground that tells nothing."""
_MAX_LEGEND, _MAX_NAME = 8, 40
_OTHER_SCRIPTS = (
    *(
        "Noto Sans CJK JP",
        "Noto Sans CJK SC",
        "Hiragino Sans",
        "PingFang SC",
        "Apple SD Gothic Neo",
        "Arial Unicode MS",
    ),
    *("Noto Sans", "Noto Sans Arabic", "Noto Sans Hebrew", "Noto Sans Devanagari", "WenQuanYi Zen Hei", "Unifont"),
)
"""Fonts for letters that matplotlib's own has not got, as far as they are installed."""


def _plain(series: Series) -> tuple[list[int], list[float]]:
    return series.steps, [math.nan if v is None else v for v in series.values]


def _dot(series: Series) -> str | None:
    """What lets a curve of one or two points be seen."""
    return "." if len(series.steps) < 3 else None


def _draw_loss(axes: Axes, run: Curves, colour: str, name: str | None) -> None:
    """Draw training and validation; `name` is None where there is no other run."""
    steps, values = _plain(run.loss)
    label = name or "training"
    if len(values) >= _SMOOTH_FROM:
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
        window = max(5, len(values) // 40)
        calm = [math.nan if v is None else v for v in smoothed(list(run.loss.values), window)]
        axes.plot(steps, calm, color=colour, linewidth=1.8, label=label)
    else:
        axes.plot(steps, values, color=colour, linewidth=1.8, label=label, marker=_dot(run.loss))
    if run.valid_loss.steps:
        steps, values = _plain(run.valid_loss)
        other = colour if name else _COLOURS[1]
        label = f"{name}, validation" if name else "validation"
        axes.plot(steps, values, color=other, linewidth=1.2, linestyle="--", marker="o", markersize=4, label=label)


def _mark_events(axes: Axes, run: Curves) -> None:
    """Mark where epochs ended and checkpoints were written."""
    each = -(-len(run.epochs) // _MAX_EPOCHS)
    named = "end of an epoch" if each == 1 else f"end of an epoch, one in {each}"
    for step in run.epochs[each - 1 :: each] if each else ():
        axes.axvline(step, color="#999999", linewidth=0.8, linestyle=":", label=named)
        named = "_"
    by_step = dict(zip(run.loss.steps, run.loss.values))
    seen: set[str] = set()
    for step, kind in run.checkpoints:
        near = min(run.loss.steps, key=lambda s: abs(s - step), default=None)
        height = by_step.get(near) if near is not None and kind in _ON_CURVE else None
        axes.plot(
            [step],
            [_ROW if height is None else height],
            transform=axes.get_xaxis_transform() if height is None else axes.transData,
            marker=_MARKS.get(kind, "s"),
            markersize=13 if kind == "best" else 6 if kind in _ON_CURVE else 4,
            markerfacecolor="white",
            markeredgecolor="#333333",
            linestyle="none",
            label="_" if kind in seen else f"checkpoint, {kind}",
        )
        seen.add(kind)


def names_of(runs: Sequence[Curves]) -> list[str]:
    """Name runs by their folders, and where those have one name by what lies above them too."""
    parts = [run.run_dir.parts for run in runs]
    found = []
    for own in parts:
        others = [other for other in parts if other != own]
        depth = next((n for n in range(1, len(own)) if all(o[-n:] != own[-n:] for o in others)), len(own))
        name = str(Path(*own[-depth:]))
        if name.startswith("_"):
            # Such a label is left out of a legend.
            name = f"./{name}"
        found.append(name if len(name) <= _MAX_NAME else f"…{name[1 - _MAX_NAME :]}")
    return found


def _frame(axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    axes.grid(visible=True, color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def draw(runs: Sequence[Curves]) -> Figure:
    """Draw runs into one figure; a single one also gets its epochs and checkpoints marked."""
    with _as_text():
        return _draw(runs)


def _draw(runs: Sequence[Curves]) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure = Figure(figsize=(10, 7), layout="constrained", facecolor="white")
    loss, rate, speed = figure.subplots(3, 1, sharex=True, height_ratios=(4, 1, 1))
    alone, names = len(runs) == 1, names_of(runs)
    for number, (run, name) in enumerate(zip(runs, names)):
        colour = _COLOURS[number % len(_COLOURS)]
        _draw_loss(loss, run, colour, None if alone else name)
        rate.plot(*_plain(run.learning_rate), color=colour, linewidth=1.4, marker=_dot(run.learning_rate))
        speed.plot(*_plain(run.tokens_per_second), color=colour, linewidth=1.0, marker=_dot(run.tokens_per_second))
    last = max((run.loss.steps[-1] for run in runs if run.loss.steps), default=0)
    if alone and last:
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
    speed.set_xlim(0, max(2.0, 1.03 * last))
    if not last:
        loss.text(0.5, 0.5, "no update yet", transform=loss.transAxes, ha="center", color="#666666")
        for axes in (loss, rate, speed):
            axes.set_yticks([])
    figure.align_ylabels()
    if last and (count := len(loss.get_legend_handles_labels()[0])):
        beside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if not alone and count > _MAX_LEGEND else {}
        loss.legend(frameon=False, fontsize=9, **beside)
    figure.suptitle(names[0] if alone else f"{len(runs)} runs", fontsize=13, fontweight="bold")
    return figure


@contextmanager
def _as_text() -> Iterator[None]:
    """While inside, names stand in a figure as they are: no formulas between dollars, other scripts where possible."""
    import matplotlib
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    families = ["DejaVu Sans", *(name for name in _OTHER_SCRIPTS if name in installed)]
    settings: dict[Any, Any] = {"text.parse_math": False, "font.family": families, "svg.hashsalt": "trainwire"}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield


def save(figure: Figure, out: Path) -> None:
    """Write a figure as a .png or .svg file. Raises OSError."""
    if out.suffix.lower() == ".svg":
        out.write_text(f'<?xml version="1.0" encoding="utf-8"?>\n{_svg(figure)}', encoding="utf-8")
        return
    with _as_text():
        figure.savefig(out, dpi=150)


def as_element(figure: Figure) -> str:
    """Give a figure as an SVG element to put into a page, where it needs no namespaces."""
    head, end, rest = _svg(figure).partition(">")
    return re.sub(r' xmlns(:xlink)?="[^"]*"', "", head) + end + rest


def _svg(figure: Figure) -> str:
    """Draw a figure as an SVG element that is the same for the same curves, without the drawer's data about itself."""
    buffer = io.StringIO()
    with _as_text():
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = buffer.getvalue()
    return text[text.index("<svg") :]
