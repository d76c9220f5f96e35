"""Plays the worker inside the test's own process: orders come at chosen reports, so a run is the same each time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trainwire_engine import run
from trainwire_protocol import channel as ch
from trainwire_protocol import events as ev
from trainwire_protocol.config_load import build_config

Rule = Callable[[Any], Sequence[ch.AnyOrder] | None]


class ScriptedChannel:
    """The engine's end of a channel whose other end is a function from reports to orders."""

    def __init__(self, first: ch.AnyOrder, rule: Rule = lambda report: None) -> None:
        self._waiting: list[ch.AnyOrder] = [first]
        self._rule = rule
        self.reports: list[Any] = []
        self.closed = False

    def send(self, report: Any) -> None:
        if self.closed:
            return
        # What cannot cross the real channel must not pass here either.
        report = ch.decode_report(ch.encode(report)[4:])
        self.reports.append(report)
        orders = self._rule(report)
        if orders is not None:
            self._waiting.extend(orders)

    def hang_up(self) -> None:
        self.closed = True

    def pending(self) -> bool:
        return self.closed or bool(self._waiting)

    def peek(self) -> tuple[ch.AnyOrder, ...]:
        return tuple(self._waiting)

    def next(self, *, block: bool) -> ch.AnyOrder | None:
        if self._waiting:
            return self._waiting.pop(0)
        if block and not self.closed:
            raise AssertionError(f"the engine waits for an order that never comes; last: {self.reports[-3:]}")
        return None


class Result:
    """What a run said: its reports and its exit status."""

    def __init__(self, reports: list[Any], status: int) -> None:
        self.reports = reports
        self.status = status

    def of(self, kind: type) -> list[Any]:
        """Every report of a kind."""
        return [report for report in self.reports if isinstance(report, kind)]

    def one(self, kind: type) -> Any:
        """The only report of a kind."""
        (found,) = self.of(kind)
        return found

    @property
    def losses(self) -> dict[int, float]:
        """The loss of each update."""
        return {step.step: step.loss for step in self.of(ev.Step)}

    def answer(self, order: int) -> ch.Answer:
        """The one answer to an order."""
        (found,) = [r for r in self.of(ch.Answer) if r.order == order]
        return found

    def logged(self, code: str) -> list[ev.Log]:
        """The log events with a code."""
        return [log for log in self.of(ev.Log) if log.code == code]


def play(
    config: Mapping[str, Any],
    base: Path,
    rule: Rule = lambda report: None,
    *,
    prepared: Callable[[ScriptedChannel], None] | None = None,
    **begin: Any,
) -> Result:
    """Run the engine in this process until it leaves."""
    built = msgspec.to_builtins(build_config(config, base))
    first = ch.Begin(order=1, config=built, **{"run_id": "test", "attempt": 1, **begin})
    channel = ScriptedChannel(first, rule)
    if prepared is not None:
        prepared(channel)
    status = run.serve(channel)  # type: ignore[arg-type]
    return Result(channel.reports, status)


def at_step(step: int, *orders: ch.AnyOrder) -> Rule:
    """Give orders right after an update was reported."""
    return lambda report: orders if isinstance(report, ev.Step) and report.step == step else None


def on(kind: type, *orders: ch.AnyOrder) -> Rule:
    """Give orders at the first report of a kind."""
    left = [orders]
    return lambda report: left.pop() if left and isinstance(report, kind) else None


def both(*rules: Rule) -> Rule:
    """Follow several rules."""
    return lambda report: [order for rule in rules for order in rule(report) or ()]


def write_rows(path: Path, count: int, longest: int = 9) -> Path:
    """Write chat rows of several lengths."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"what is step {i}"},
                {
                    "role": "assistant",
                    "content": f"the step {i} is an update of the model" + " run" * (i * 7 % longest),
                },
            ]
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
