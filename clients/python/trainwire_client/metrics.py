"""The history of a run's metrics, read from its log."""

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trainwire_protocol.coalesce import merge_steps
from trainwire_protocol.events import EvalEnd, Step

from .errors import ClientError
from .log import Timeline, decode_log_line, log_path


class Series(msgspec.Struct, frozen=True):
    """One metric over a run: `values[i]` belongs to update `steps[i]`; None where it was not finite."""

    steps: list[int]
    values: list[float | None]


class _Brief(msgspec.Struct):
    type: str = ""
    seq: int = 0
    step: int = 0


_brief_decoder = msgspec.json.Decoder(_Brief)
_EVAL_METRICS = tuple(f.name for f in msgspec.structs.fields(EvalEnd) if f.name in ("valid_loss", "tokens", "ms"))
_STEP_METRICS = tuple(
    f.name
    for f in msgspec.structs.fields(Step)
    if f.name not in ("truncated", "more", "non_finite", "seq", "cause", "replay", "step")
)
METRICS: tuple[str, ...] = (*_STEP_METRICS, *_EVAL_METRICS, "valid_perplexity", "valid_token_accuracy")
"""The names that `history` takes: the numbers of `step` events, and those of `eval_end`."""
_EVAL_FIELD = {"valid_perplexity": "perplexity", "valid_token_accuracy": "token_accuracy"}


def _valid_events(path: Path, kind: str, timeline: Timeline, size: int) -> Iterator[bytes]:
    """Give the valid lines of a kind among the first `size` bytes: a living run's log grows meanwhile."""
    mark = f'"type":"{kind}"'.encode()
    with path.open("rb") as file:
        for line in file:
            size -= len(line)
            if size < 0:
                return
            if mark in line and line.endswith(b"\n"):
                try:
                    brief = _brief_decoder.decode(line)
                except msgspec.MsgspecError:
                    continue
                if brief.type == kind and timeline.holds(brief.seq, brief.step):
                    yield line


def _decoded(lines: Iterator[bytes], kind: type[Any]) -> Iterator[Any]:
    return (event for event in map(decode_log_line, lines) if isinstance(event, kind))


def _chunks(events: Iterator[Any], size: int, join: Callable[[Any, Any], Any]) -> Iterator[Any]:
    while chunk := list(itertools.islice(events, size)):
        yield functools.reduce(join, chunk)


def history(
    run_dir: str | os.PathLike[str], metrics: Sequence[str] = ("loss",), max_points: int | None = None
) -> dict[str, Series]:
    """Read metrics of a run, living or over, from its log: for each name a Series along the valid timeline.

    `metrics` are names of METRICS: the fields of `step` events, and `valid_loss`, `valid_perplexity`,
    `valid_token_accuracy`, `tokens`, `ms` of evaluations. With `max_points`, neighbouring step events are put
    together (sums summed, means weighted by their tokens), and of neighbouring evaluations the last is kept.
    """
    path = log_path(run_dir)
    for name in metrics:
        if name not in METRICS:
            raise ClientError(f"There is no metric {name!r}. These are: {', '.join(METRICS)}.")
    size = path.stat().st_size
    timeline = Timeline.of(path)
    found: dict[str, Series] = {}
    for kind, type_, names, join in (
        ("step", Step, [m for m in metrics if m in _STEP_METRICS], merge_steps),
        ("eval_end", EvalEnd, [m for m in metrics if m not in _STEP_METRICS], lambda a, b: b),
    ):
        if not names:
            continue
        found.update((name, Series([], [])) for name in names)
        together = 1
        if max_points:
            together = max(1, -(-sum(1 for _ in _valid_events(path, kind, timeline, size)) // max_points))
        for point in _chunks(_decoded(_valid_events(path, kind, timeline, size), type_), together, join):
            for name in names:
                found[name].steps.append(point.step)
                found[name].values.append(getattr(point, _EVAL_FIELD.get(name, name)))
    return {name: found[name] for name in metrics}
