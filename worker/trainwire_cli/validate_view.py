"""What `trainwire validate` prints for a person: tables, a histogram, and rows with their trained parts marked."""

import shutil
from collections.abc import Iterator, Sequence
from typing import Any

from trainwire_protocol.errors import ConfigInvalid
from trainwire_protocol.printable import printable

from .terminal_time import as_clock

TRAINED, PLAIN, DIM = "\x1b[32m", "\x1b[0m", "\x1b[2m"
"""Green and dim of the terminal's own colours, legible on light and dark."""
OPEN, CLOSE = "\u27e6", "\u27e7"
"""Marks around trained text where there are no colours."""
_BAR = 40


def show(result: dict[str, Any], notes: Sequence[str], *, colour: bool) -> None:
    """Print a result of `validate` and notes about the run folder."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    if not result["valid"]:
        print("The run cannot begin:")
        for issue in result["issues"]:
            print(f"  {issue['path'] + ': ' if issue['path'] else ''}{printable(issue['message'])}")
        if any(issue["code"] == "unknown_key" for issue in result["issues"]):
            print(ConfigInvalid.advice)
    else:
        for line in _report(result):
            print(line)
        for sample in result.get("samples") or []:
            print(_sample(sample, width, colour=colour))
        for issue in result["issues"]:
            print(f"note: {printable(issue['message'])}")
    for note in notes:
        print(f"note: {note}")
    if result["valid"]:
        print("The run can begin." if _fits(result) else "The run can begin, but is likely to run out of memory.")


def _fits(result: dict[str, Any]) -> bool:
    estimate = result.get("estimate")
    return estimate is None or bool(estimate["peak_bytes"] <= estimate["available_bytes"])


def _report(result: dict[str, Any]) -> Iterator[str]:
    config = result["config"]
    yield (
        f"{config['model']}: {config['method']}, {result['trainable_parameters']:,} of"
        f" {result['total_parameters']:,} parameters"
    )
    splits = result["data"]
    names = ("rows read", "rows used", "rows dropped", "tokens", "trained tokens", "expected padding")
    table = [[name] for name in ("", *names)]
    for split in splits:
        dropped = sum(reason["count"] for reason in split["rows_dropped"].values())
        cells = (split["rows_read"], split["rows_used"], dropped, split["tokens"], split["trained_tokens"])
        column = [split["split"], *(f"{cell:,}" for cell in cells), f"{split['padding_fraction']:.0%}"]
        for row, cell in zip(table, column):
            row.append(cell)
    yield ""
    yield from _aligned(table)
    for split in splits:
        for reason, found in split["rows_dropped"].items():
            places = ", ".join(found["lines"][:3]) + (", …" if found["count"] > 3 else "")
            yield f"  {split['split']}: {found['count']:,} dropped, {reason.replace('_', ' ')}: {places}"
    yield ""
    yield "Tokens of a row (train)"
    yield from _histogram(splits[0]["length_histogram"])
    yield ""
    yield from _aligned([[name, value] for name, value in _plan(result)])
    yield ""


def _plan(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    config, estimate = result["config"], result.get("estimate")
    yield "updates", f"{result['total_steps']:,} of {config['batch_size']} rows"
    if estimate is None:
        return
    room, much = _bytes(estimate["available_bytes"]), "" if _fits(result) else ": more than there is"
    yield "peak memory", f"{_bytes(estimate['peak_bytes'])} of {room}{much}"
    yield "time per update", _seconds(estimate["update_seconds"])
    yield "time in all", _seconds(estimate["total_seconds"])
    largest = estimate["largest_micro_batch_tokens"]
    proposed = "none: not even the longest row fits" if largest is None else f"{largest:,}"
    yield "micro_batch_tokens", f"{config['micro_batch_tokens']:,}; the largest that is of use and fits: {proposed}"


def _aligned(table: list[list[str]]) -> Iterator[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*table)]
    for row in table:
        first, *rest = (
            cell.ljust(width) if not place or len(row) == 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths))
        )
        yield "  " + "   ".join([first, *rest]).rstrip()


def _histogram(bins: dict[str, int]) -> Iterator[str]:
    most = max(bins.values(), default=1)
    for bound, count in bins.items():
        bar = "█" * round(_BAR * count / most) or ("▏" if count else "")
        yield f"  ≤{int(bound):>7,} {bar} {count:,}"


def _sample(sample: dict[str, Any], width: int, *, colour: bool) -> str:
    start, end = (TRAINED, PLAIN) if colour else (OPEN, CLOSE)
    head = f"{sample['row']}: {sample['tokens']:,} tokens, {sample['trained_tokens']:,} trained"
    text = "".join(
        f"{start}{printable(segment['text'])}{end}" if segment["trained"] else printable(segment["text"])
        for segment in sample["segments"]
    )
    ruler = "─" * min(width, 60)
    return f"{DIM + ruler + PLAIN if colour else ruler}\n{head}\n{text.rstrip()}\n"


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _seconds(value: float) -> str:
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 100 else as_clock(value * 1000)
