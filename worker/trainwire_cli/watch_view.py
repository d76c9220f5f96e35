"""Draws the live view with rich and uniplot, in the terminal's own colours."""

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .overview import number
from .terminal_time import as_clock
from .watch_state import WatchState

_LEVELS = {"error": "bold red", "warn": "yellow", "info": "", "debug": "dim"}
_PHASES = {
    "running": "green",
    "paused": "yellow",
    "pausing": "yellow",
    "stopping": "yellow",
    "ended": "bold",
    "died": "red",
}


def _megabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _header(state: WatchState) -> RenderableType:
    line = Text()
    line.append(state.name or "trainwire", style="bold")
    line.append("  ")
    line.append(state.end.outcome if state.end else state.phase, style=_PHASES.get(state.phase, "cyan"))
    if state.activity not in ("none", "train"):
        line.append(f"  {state.activity}", style="dim")
    if state.total_epochs:
        line.append(f"  epoch {state.epoch} of {state.total_epochs}", style="dim")
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
    eta = f"ETA {as_clock(state.newest.eta_ms)}" if state.newest and state.end is None else ""
    grid.add_row("step", Bar(max(state.total_steps, 1), 0, step), f"{step}/{state.total_steps}  {eta}")
    return grid


def _metrics(state: WatchState, width: int) -> RenderableType:
    step = state.newest
    cells = [
        ("loss", number(step.loss) if step else "–"),
        ("valid loss", number(state.valid.valid_loss if state.valid else None)),
    ]
    if step is not None:
        accuracy = "–" if step.token_accuracy is None else f"{step.token_accuracy:.1%}"
        norm = "–" if step.grad_norm is None else f"{step.grad_norm:.3g}"
        cells += [
            ("accuracy", accuracy),
            ("learning rate", f"{step.learning_rate:.3g}"),
            ("grad norm", norm),
            ("tokens/s", f"{step.tokens_per_second:,.0f}"),
            ("padding", f"{step.padding_fraction:.0%}"),
            ("memory peak", _megabytes(step.peak_bytes)),
        ]
    columns = 4 if width >= 100 else 3
    grid = Table.grid(expand=True, padding=(0, 2))
    for _ in range(columns):
        grid.add_column(ratio=1, no_wrap=True)
    for start in range(0, len(cells), columns):
        row = [Text.assemble((f"{name} ", "dim"), value) for name, value in cells[start : start + columns]]
        grid.add_row(*row, *[""] * (columns - len(row)))
    return grid


def _chart(state: WatchState, width: int, height: int) -> RenderableType:
    if len(state.losses) < 2:
        return Text("The loss curve begins with the second update.", style="dim")
    from uniplot import plot_to_string

    xs, ys, lines, colours, names = [], [], [], [], []
    for points, line, colour, name in (
        # Two of the eight colours that are legible on dark and on light.
        (state.losses, True, "magenta", "training"),
        (state.valid_losses, True, "green", "validation"),
    ):
        if points:
            stride = max(1, len(points) // (2 * width))
            chosen = points[::-stride][::-1]
            xs.append([x for x, _ in chosen])
            ys.append([y for _, y in chosen])
            lines.append(line)
            colours.append(colour)
            names.append(name)
    drawn = plot_to_string(
        xs=xs, ys=ys, lines=lines, color=colours, legend_labels=names, width=max(20, width - 14), height=height
    )
    text = Text.from_ansi("\n".join(line.rstrip("\n") for line in _joined(drawn)))
    text.no_wrap = True
    return text


def _joined(drawn: object) -> list[str]:
    return drawn.splitlines() if isinstance(drawn, str) else [str(line) for line in drawn]  # type: ignore[attr-defined]


def _generations(state: WatchState, count: int, width: int) -> RenderableType:
    lines = Text(no_wrap=True, overflow="ellipsis")
    for said in list(state.generations)[-count:]:
        lines.append(f"step {said.step}  ", style="dim")
        prompt = " ".join(said.prompt.split())
        # The answer is what changes from one time to the next.
        lines.append(prompt if len(prompt) <= width // 3 else prompt[: width // 3] + "…", style="dim")
        lines.append(" → ", style="dim")
        lines.append(" ".join(said.completion.split()) + "\n")
    lines.rstrip()
    return lines


def _notices(state: WatchState, count: int) -> RenderableType:
    lines = []
    for level, message in list(state.notices)[-count:]:
        # What went wrong is shown whole.
        wraps = level == "error"
        lines.append(Text(message, _LEVELS.get(level, ""), no_wrap=not wraps, overflow="fold" if wraps else "ellipsis"))
    return Group(*lines)


def draw(state: WatchState, width: int, height: int, keys: str, remark: str) -> RenderableType:
    """Lay the view out for a terminal of so many columns and rows."""
    generations = min(3, len(state.generations))
    notices = min(4, len(state.notices))
    chart = max(5, height - 15 - generations - notices)
    parts: list[RenderableType] = [
        _header(state),
        _progress(state),
        _metrics(state, width),
        Panel(_chart(state, width - 4, chart), title="loss", title_align="left", border_style="dim", padding=(0, 1)),
    ]
    if generations:
        parts.append(_generations(state, generations, width))
    if notices:
        parts.append(_notices(state, notices))
    if state.end is not None:
        parts.append(Text(state.end.checkpoint or "no checkpoint", style="dim"))
    elif state.phase != "died":
        parts.append(Text(keys, style="dim", no_wrap=True, overflow="ellipsis"))
    if remark:
        parts.append(Text(remark, style="cyan", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)
