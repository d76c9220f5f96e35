"""The recorded sessions: every type of message, no broken rule, and what workers say today."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import msgspec
import pytest

from trainwire_protocol.codec import Refusal, decode_command, decode_message
from trainwire_protocol.commands import COMMANDS
from trainwire_protocol.conformance import violations
from trainwire_protocol.events import EVENT_TYPES, TRANSPORT_TYPES, type_name
from trainwire_protocol.schema import build_schema

PROTOCOL = Path(__file__).resolve().parents[2] / "protocol"
EXAMPLES = PROTOCOL / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.jsonl"))
BY_CHANCE = ("slow-reader",)
Edit = Callable[[list[dict[str, Any]]], None]


def lines_of(name: str) -> list[bytes]:
    return (EXAMPLES / f"{name}.jsonl").read_bytes().splitlines(keepends=True)


def test_every_session_is_recorded_by_the_script(recorder: ModuleType) -> None:
    assert sorted(recorder.RECORDS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_session_decodes_fits_the_schema_and_breaks_no_rule(name: str) -> None:
    schema = build_schema()
    message = jsonschema.Draft202012Validator({**schema, "anyOf": [{"$ref": "#/$defs/Message"}]})
    lines = lines_of(name)
    for line in lines if name not in BY_CHANCE else lines[:100] + lines[-100:]:
        assert isinstance(decode_message(line), msgspec.Struct)
        message.validate(json.loads(line))
    assert violations(lines) == []


@pytest.mark.parametrize("name", [name for name in NAMES if name not in BY_CHANCE])
def test_a_session_that_is_recorded_again_is_the_same(name: str, recorder: ModuleType) -> None:
    recorded, sent = recorder.record(name)
    again = "if that is meant, run `python protocol/record_examples.py` and `make generate`"
    assert recorded.splitlines() == [line.rstrip(b"\n") for line in lines_of(name)], again
    commands = EXAMPLES / "commands" / f"{name}.txt"
    assert sent == (commands.read_bytes() if commands.exists() else b"")


def test_every_type_of_message_occurs() -> None:
    found = {json.loads(line)["type"] for name in NAMES for line in lines_of(name)}
    assert found == {type_name(kind) for kind in (*EVENT_TYPES, *TRANSPORT_TYPES)}


def test_every_command_occurs_and_decodes() -> None:
    found, refused = set(), set()
    for path in (EXAMPLES / "commands").glob("*.txt"):
        for line in path.read_bytes().splitlines():
            try:
                decoded = decode_command(line)
            except Refusal as refusal:
                refused.add(refusal.error.code)
            else:
                assert decoded is not None
                found.add(str(decoded[0].__struct_config__.tag))
    assert refused == {"bad_line", "unknown_command"}
    assert found == set(COMMANDS)


def find(lines: list[dict[str, Any]], kind: str, **fields: Any) -> int:
    return next(n for n, v in enumerate(lines) if v["type"] == kind and all(v.get(k) == x for k, x in fields.items()))


def swap(lines: list[dict[str, Any]], a: int, b: int) -> None:
    """Change the places of two events, and let each place keep its number."""
    lines[a], lines[b] = lines[b], lines[a]
    lines[a]["seq"], lines[b]["seq"] = lines[b]["seq"], lines[a]["seq"]


def before(kind: str, other: str, **fields: Any) -> Edit:
    def edit(lines: list[dict[str, Any]]) -> None:
        swap(lines, find(lines, other), find(lines, kind, **fields))

    return edit


def put(kind: str, **changes: Any) -> Edit:
    def edit(lines: list[dict[str, Any]]) -> None:
        lines[find(lines, kind)].update(changes)

    return edit


def drop(kind: str, key: str | None = None) -> Edit:
    def edit(lines: list[dict[str, Any]]) -> None:
        if key is None:
            del lines[find(lines, kind)]
        else:
            del lines[find(lines, kind)][key]

    return edit


def late_epoch_end(lines: list[dict[str, Any]]) -> None:
    lines.insert(-1, {"type": "epoch_end", "ts": 1, "seq": lines[-1]["seq"], "epoch": 1, "avg_loss": 1.0,
                      "epoch_time_secs": 1.0, "updates": 1})  # fmt: skip
    lines[-1]["seq"] += 1


BROKEN: list[tuple[str, str, Edit]] = [
    ("L-1", "finished", drop("hello")),
    ("L-2", "finished", drop("end")),
    ("L-2", "finished", lambda lines: lines.append(lines[-1] | {"seq": lines[-1]["seq"] + 1})),
    ("W-2", "finished", put("generation", completion="x" * 70_000)),
    ("W-2", "finished", put("data", x_more="x" * 70_000)),
    ("W-2", "finished", put("init", x_more="x" * 70_000)),
    ("W-3", "finished", put("data", x_big=2**53)),
    ("M-1", "finished", put("step", loss="low")),
    ("M-1", "finished", drop("step", "updates")),
    ("M-2", "finished", drop("step", "seq")),
    ("C-1", "steered", lambda lines: lines.insert(9, lines[1])),
    ("O-1", "finished", put("init", seq=1)),
    ("O-2", "steered", put("response", at_seq=1000)),
    ("O-3", "finished", before("status", "attempt", phase="loading")),
    ("O-4", "finished", before("epoch_start", "init")),
    ("O-5", "steered", lambda lines: swap(lines, find(lines, "paused"), find(lines, "status", phase="paused"))),
    ("O-5", "steered", lambda lines: swap(lines, find(lines, "resumed"), find(lines, "resumed") - 1)),
    ("O-6", "finished", put("step", step=3)),
    ("O-7", "steered", put("config_changed", effective_step=3)),
    ("O-8", "out-of-memory", drop("error")),
    ("O-8", "out-of-memory", before("error", "checkpoint")),
    ("O-9", "finished", put("progress", total=49, id="open")),
    ("O-10", "stopped", late_epoch_end),
    ("E-1", "out-of-memory", put("end", exit_code=1)),
    ("E-1", "interrupted", put("end", exit_code=0)),
    ("E-1", "finished", put("end", exit_code=3)),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "name", "edit"), BROKEN, ids=[f"{r}-{n}" for n, (r, _, _) in enumerate(BROKEN)])
def test_a_session_that_breaks_a_rule_is_found_out(rule: str, name: str, edit: Edit) -> None:
    lines = [json.loads(line) for line in lines_of(name)]
    edit(lines)
    found = violations(json.dumps(line).encode() + b"\n" for line in lines)
    assert rule in {violation.rule for violation in found}


@pytest.mark.parametrize(
    "line",
    [
        b'{"type":"paused","ts":1,"seq":1,"step":"\xc3\xbc"}\n',
        b'{"type":"paused","ts":1,"seq":1,"step":1}',
        b'{"type":"paused","ts":1,"seq":1,"step":1}\r\n',
        b' {"type":"paused","ts":1,"seq":1,"step":1}\n',
        b'{"type":"paused","ts":NaN,"seq":1,"step":1}\n',
        b'{"ts":1}\n',
        b"Loading...\n",
    ],
)
def test_a_line_that_is_not_of_the_wire_is_found_out(line: bytes) -> None:
    assert "W-1" in {violation.rule for violation in violations([line])}


def test_an_epoch_that_the_last_update_of_a_stopped_run_completes_breaks_no_rule() -> None:
    lines = [json.loads(line) for line in lines_of("stopped")]
    lines[find(lines, "epoch_start")]["num_batches"] = 4
    late_epoch_end(lines)
    lines[-2]["updates"] = 4
    assert violations(json.dumps(line).encode() + b"\n" for line in lines) == []


def test_a_message_of_an_unknown_type_breaks_no_rule() -> None:
    lines = lines_of("finished")
    lines.insert(5, b'{"type":"from_the_future","x":1}\n')
    assert violations(lines) == []
