"""Checks what a worker printed against the rules of PROTOCOL.md: `python -m trainwire_protocol.conformance FILE`."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from .config import MAX_INT
from .errors import BY_CODE
from .events import EVENT_TYPES, Message, type_name
from .limits import MAX_LINE_OUT

_EVENTS = frozenset(type_name(kind) for kind in EVENT_TYPES)
_INTERRUPTED = frozenset({20, 21, 129, 130, 143})
_message = msgspec.json.Decoder(Message)

Line = dict[str, Any]


class Violation(msgspec.Struct, frozen=True):
    """A rule that a line breaks: `rule` is its id in PROTOCOL.md, `line` counts from 1."""

    rule: str
    line: int
    message: str


class Checker:
    """Follows a whole session line by line, from `hello` to `end`."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self._number = 0
        self._max_line = MAX_LINE_OUT
        self._before: Line | None = None
        self._seen: set[str] = set()
        self._seq = 0
        self._step = 0
        self._resumed_from = 0
        self._stopping = False
        self._epoch_updates = 0
        self._error: str | None = None
        self._phase = ""
        self._answered: set[int | str] = set()
        self._open_progress: dict[str, int] = {}
        self._gap = False

    def take(self, raw: bytes) -> None:
        """Check the next line, given with its line feed."""
        self._number += 1
        line = self._wire(raw)
        if line is None:
            return
        kind = line["type"]
        if self._number == 1 and kind != "hello":
            self._break("L-1", f"The first line is {kind} instead of hello.")
        if self._before is not None and self._before["type"] == "end":
            self._break("L-2", f"{kind} comes after end.")
        if kind == "hello":
            self._max_line = line["limits"]["max_line_out"]
        if kind == "gap":
            self._gap = True
        if kind == "response":
            self._response(line)
        elif kind in _EVENTS and not line.get("replay"):
            self._event(line)
        self._before = line

    def finish(self) -> list[Violation]:
        """Check what only the end tells, and give everything that was found."""
        if self._before is None or self._before["type"] != "end":
            self._break("L-2", "The last line is no end.")
        elif self._before["outcome"] == "completed" and self._open_progress:
            self._break("O-9", f"Progress was not closed: {', '.join(self._open_progress)}.")
        return self.violations

    def _break(self, rule: str, message: str) -> None:
        self.violations.append(Violation(rule, self._number, message))

    def _wire(self, raw: bytes) -> Line | None:
        """Check the bytes of a line, and give it as an object."""
        body = raw.removesuffix(b"\n")
        if body == raw or not body.startswith(b"{") or any(not 0x20 <= byte <= 0x7E for byte in body):
            self._break("W-1", "The line is not printable ASCII from { to one line feed.")
        try:
            line = json.loads(body, parse_constant=_refuse)
        except ValueError as error:
            self._break("W-1", f"The line is not JSON: {error}.")
            return None
        if not isinstance(line, dict) or not isinstance(line.get("type"), str):
            self._break("W-1", "The line is no object with a type.")
            return None
        if len(raw) > self._max_line:
            self._break("W-2", f"The line has {len(raw)} bytes, more than {self._max_line}.")
        if any(abs(number) > MAX_INT for number in _integers(line)):
            self._break("W-3", "An integer is beyond 2^53 - 1.")
        try:
            _message.decode(body)
        except msgspec.ValidationError as error:
            if "Invalid value '" not in str(error) or "$.type" not in str(error):
                self._break("M-1", f"{line['type']}: {error}.")
                return None
        return line

    def _response(self, line: Line) -> None:
        id_, seq = line["id"], line.get("at_seq")
        if id_ is not None:
            if id_ in self._answered:
                self._break("C-1", f"The command {id_!r} is answered twice.")
            self._answered.add(id_)
        if seq is not None and seq > self._seq and not self._gap:
            self._break("O-2", f"at_seq is {seq}, but the newest event is {self._seq}.")

    def _event(self, line: Line) -> None:
        kind, seq = line["type"], line.get("seq")
        if seq is None:
            if "attempt" in self._seen:
                self._break("M-2", f"{kind} carries no seq, although the log is open.")
        else:
            if seq <= self._seq:
                self._break("O-1", f"seq {seq} comes after {self._seq}.")
            self._seq = seq
            if "attempt" not in self._seen and kind != "attempt":
                self._break("O-3", f"{kind} comes before attempt.")
        if self._error is not None and kind != "end":
            self._break("O-8", f"{kind} comes between error and end.")
        if not self._gap:
            self._order(kind, line)
        self._seen.add(kind)

    def _order(self, kind: str, line: Line) -> None:
        before = {
            "init": "data",
            "epoch_start": "init",
            "step": "epoch_start",
            "epoch_end": "epoch_start",
            "complete": "epoch_end",
        }.get(kind)
        # Updates that an earlier attempt made and its log lacks come before those that are trained.
        told_again = kind == "step" and line["step"] <= self._resumed_from
        if before is not None and before not in self._seen and not told_again:
            self._break("O-4", f"{kind} comes before {before}.")
        check = getattr(self, f"_on_{kind}", None)
        if check is not None:
            check(line)

    def _on_attempt(self, line: Line) -> None:
        self._step = 0
        self._resumed_from = line.get("resumed_from_step") or 0
        self._seen -= {"data", "init", "epoch_start"}

    def _on_status(self, line: Line) -> None:
        self._phase = line["phase"]
        self._stopping = self._stopping or line["phase"] == "stopping"

    def _on_paused(self, line: Line) -> None:
        if self._phase != "paused" and not self._stopping:
            self._break("O-5", f"paused comes in the phase {self._phase}.")

    def _on_resumed(self, line: Line) -> None:
        if self._phase != "running" and not self._stopping:
            self._break("O-5", f"resumed comes in the phase {self._phase}.")

    def _on_step(self, line: Line) -> None:
        if line["step"] <= self._step:
            self._break("O-6", f"step {line['step']} comes after step {self._step}.")
        self._step = line["step"]

    def _on_config_changed(self, line: Line) -> None:
        if line["effective_step"] <= self._step:
            self._break("O-7", f"step {self._step} was reported before the values it used.")

    def _on_epoch_start(self, line: Line) -> None:
        self._epoch_updates = line["num_batches"]

    def _on_epoch_end(self, line: Line) -> None:
        if self._stopping and line["updates"] < self._epoch_updates:
            self._break("O-10", "epoch_end comes in the middle of an epoch, after the run was told to stop.")

    def _on_progress(self, line: Line) -> None:
        self._open_progress[line["id"]] = line["done"]
        if line["done"] >= line["total"]:
            del self._open_progress[line["id"]]

    def _on_error(self, line: Line) -> None:
        self._error = line["code"]

    def _on_end(self, line: Line) -> None:
        outcome, code = line["outcome"], line["exit_code"]
        if (outcome == "failed") is not (self._error is not None):
            self._break("O-8", f"The outcome is {outcome}, and the error before it is {self._error}.")
        known = BY_CODE.get(self._error or "")
        fits = {
            "completed": code == 0,
            "stopped": code == 0,
            "failed": known is None or code == known.exit_code,
            "interrupted": code in _INTERRUPTED,
        }
        if not fits[outcome]:
            self._break("E-1", f"The exit code of {outcome} ({self._error}) is {code}.")


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _integers(value: Any) -> Iterable[int]:
    if isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _integers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _integers(inner)


def violations(lines: Iterable[bytes]) -> list[Violation]:
    """Check a whole session: every line that a worker printed, each with its line feed."""
    checker = Checker()
    for line in lines:
        checker.take(line)
    return checker.finish()


def main() -> int:
    """Check the files that are named; 1 if one of them breaks a rule."""
    found = 0
    for name in sys.argv[1:]:
        with Path(name).open("rb") as file:
            for violation in violations(file):
                found += 1
                print(f"{name}:{violation.line}: [{violation.rule}] {violation.message}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
