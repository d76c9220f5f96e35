"""Draws the live view with rich and uniplot, in the terminal's own colours, within the rows that there are.

Every part has its place whether it is filled or not, so that nothing jumps. What cannot be read on a light and on a
dark ground alike stands on a ground of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.bar import Bar
from rich.cells import cell_len, set_cell_size
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trainwire_protocol.printable import printable

from .overview import number
from .terminal_time import as_clock
from .watch_state import WatchState

_GOOD, _ATTENTION, _BAD = "black on green", "black on yellow", "white on red"
_PHASES = {
    "running": _GOOD,
    "paused": _ATTENTION,
    "pausing": _ATTENTION,
    "stopping": _ATTENTION,
    "completed": _GOOD,
    "failed": _BAD,
    "died": _BAD,
}
_TAGS = {"error": _BAD, "warn": _ATTENTION}
_LEAST_CHART, _GOOD_CHART = 9, 12
"""Rows of the chart with its frame: with fewer there is none; up to so many go before generations and log."""


@dataclass(frozen=True)
class _Plan:
    """Rows of the parts that can give way."""

    metrics: int
    chart: int
    generations: int
    notices: int


def _share_out(state: WatchState, height: int, metrics: int) -> _Plan:
    """Give rows to the parts by what matters most: the figures, a line of the log, the chart, the rest."""
    left = height - 4 - (state.progress is not None)
    metrics = max(1, min(metrics, left - 1))
    left -= metrics
    wanted = [4, 3 if state.generations else 0]
    if left - sum(wanted) < _GOOD_CHART:
        wanted = [2, 1 if state.generations else 0]
    chart = left - sum(wanted)
    if chart < _LEAST_CHART:
        notices = max(0, min(left, 4))
        return _Plan(metrics, 0, min(3, len(state.generations), max(0, left - notices)), notices)
    return _Plan(metrics, chart, wanted[1], wanted[0])


def _megabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _header(state: WatchState) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(_plain(state.name) or "trainwire", style="bold")
    phase = state.end.outcome if state.end else state.phase
    line.append("  ")
    line.append(f" {phase} ", style=_PHASES.get(phase, "reverse"))
    if state.activity not in ("none", "train"):
        line.append(f"  {state.activity}")
    if state.total_epochs:
        line.append(f"  epoch {state.epoch} of {state.total_epochs}")
    if state.model:
        line.append(f"  {_plain(state.model)}", style="dim")
    return line


def _progress(state: WatchState) -> RenderableType:
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    if state.progress is not None:
        work = state.progress
        grid.add_row(work.title, Bar(max(work.total, 1), 0, work.done), f"{work.done:,}/{work.total:,} {work.unit}")
    step = state.newest.step if state.newest else 0
    goes_on = state.end is None and state.phase != "died"
    eta = f"  ETA {as_clock(state.newest.eta_ms)}" if state.newest and goes_on else ""
    count = f"{step:,}/{state.total_steps:,}{eta}" if state.total_steps else ""
    grid.add_row("step", Bar(max(state.total_steps, 1), 0, step), count)
    return grid


def _figures(state: WatchState) -> list[tuple[str, str]]:
    """What is shown of the newest update, the most important first."""
    step = state.newest
    valid = number(state.valid.valid_loss if state.valid else None)
    if step is None:
        return [("loss", "–"), ("valid loss", valid)]
    return [
        ("loss", number(step.loss)),
        ("valid loss", valid),
        ("learning rate", f"{step.learning_rate:.3g}"),
        ("tokens/s", f"{step.tokens_per_second:,.0f}"),
        ("memory peak", _megabytes(step.peak_bytes)),
        ("accuracy", "–" if step.token_accuracy is None else f"{step.token_accuracy:.1%}"),
        ("grad norm", "–" if step.grad_norm is None else f"{step.grad_norm:.3g}"),
        ("padding", f"{step.padding_fraction:.0%}"),
    ]


def _metrics(figures: Sequence[tuple[str, str]], columns: int, rows: int) -> RenderableType:
    grid = Table.grid(expand=True, padding=(0, 1))
    for _ in range(columns):
        grid.add_column(ratio=1, no_wrap=True)
    cells = [Text.assemble((f"{name} ", "dim"), value, no_wrap=True, overflow="ellipsis") for name, value in figures]
    for start in range(0, rows * columns, columns):
        grid.add_row(*cells[start : start + columns])
    return grid


def _chart(state: WatchState, width: int, height: int, colour: bool) -> RenderableType:
    if len(state.losses) < 2:
        return Text("The loss curve begins with the second update.", style="dim")
    from uniplot import plot_to_string

    curves = [
        # Two of the eight colours that are legible on dark and on light.
        (points, tint, name)
        for points, tint, name in (
            (state.losses.points(), "magenta", "training"),
            (state.valid_losses.points(), "green", "validation"),
        )
        if points
    ]
    apart: dict[str, Any] = {"color": [tint for _, tint, _ in curves]}
    if not colour:
        # Without colours the signs have to tell the curves apart.
        apart = {"character_set": "ascii", "force_ascii_characters": ["·", "#"]}
    drawn = plot_to_string(
        xs=[[x for x, _ in points] for points, _, _ in curves],
        ys=[[y for _, y in points] for points, _, _ in curves],
        lines=[True] * len(curves),
        legend_labels=[name for _, _, name in curves],
        width=max(10, width - 10),
        line_length_hard_cap=width,
        height=height,
        **apart,
    )
    lines = drawn.splitlines() if isinstance(drawn, str) else [str(line) for line in drawn]
    text = Text.from_ansi("\n".join(lines))
    text.no_wrap = True
    return text


def _generations(state: WatchState, rows: int, width: int) -> RenderableType:
    lines = []
    for said in list(state.generations)[-rows:]:
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"step {said.step:,}  ", style="dim")
        prompt = _plain(said.prompt)
        # The answer is what changes from one time to the next.
        room = width // 3
        line.append(prompt if cell_len(prompt) <= room else set_cell_size(prompt, room).rstrip() + "…", style="dim")
        line.append(" → ", style="dim")
        line.append(_plain(said.completion))
        lines.append(line)
    return _filled(lines, rows)


def _notices(state: WatchState, rows: int, *, whole: bool) -> RenderableType:
    lines = []
    for level, message in list(state.notices)[-rows:]:
        # What went wrong is shown whole, once there is room below.
        wraps = level == "error" and whole
        line = Text(no_wrap=not wraps, overflow="fold" if wraps else "ellipsis")
        if level in _TAGS:
            line.append(f" {level} ", style=_TAGS[level])
            line.append(" ")
        line.append(printable(message) if wraps else _plain(message), style="dim" if level == "debug" else "")
        lines.append(line)
    return Group(*lines) if whole else _filled(lines, rows)


def _plain(text: str) -> str:
    """Show a text in one line."""
    return printable(" ".join(text.split()))


def _filled(lines: Sequence[Text], rows: int) -> RenderableType:
    return Group(*lines, *(Text("") for _ in range(rows - len(lines))))


def draw(
    state: WatchState, width: int, height: int, keys: str, remark: str, *, colour: bool = True, last: bool = False
) -> RenderableType:
    """Lay the view out for a terminal of so many columns and rows; `last` is what stays on it when all is over."""
    figures = _figures(state)
    if width < 50:
        figures = [(name.removeprefix("learning ").removesuffix(" peak"), value) for name, value in figures]
    columns = max(1, min(4, width // 24)) if width >= 50 else 2
    # What is left at the end has room for an error of some lines and for the prompt of the shell.
    plan = _share_out(state, height - 4 if last else height, -(-8 // columns))
    parts: list[RenderableType] = [_header(state), _progress(state), _metrics(figures, columns, plan.metrics)]
    if plan.chart and (state.losses or not last):
        chart = _chart(state, width - 4, plan.chart - 6, colour)
        frame = Panel(chart, title="loss", title_align="left", border_style="dim", padding=(0, 1), height=plan.chart)
        parts.append(frame)
    if plan.generations:
        parts.append(_generations(state, plan.generations, width))
    if last:
        parts.append(_notices(state, max(1, plan.notices), whole=True))
        if state.end is not None:
            parts.append(Text(state.end.checkpoint or "no checkpoint", style="dim", overflow="fold"))
        return Group(*parts)
    if plan.notices:
        parts.append(_notices(state, plan.notices, whole=False))
    parts.append(Text(_plain(remark), style="bold", no_wrap=True, overflow="ellipsis"))
    parts.append(Text(keys, style="dim", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)
