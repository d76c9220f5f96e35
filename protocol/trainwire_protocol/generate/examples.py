"""Example lines of the documents, taken from the recorded sessions."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..commands import COMMANDS
from ..events import EVENT_TYPES, TRANSPORT_TYPES, type_name

SESSIONS = Path(__file__).resolve().parents[2] / "examples"
SHOWN_KEYS = 3
"""Keys of a longer object that an example shows; `…` stands for the rest."""
SHOWN_WHOLE = 8
PREFERRED = ("finished", "steered")
Line = dict[str, Any]


def session(name: str) -> list[Line]:
    """Give the lines of a recorded session."""
    path = SESSIONS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def _shorten(value: Any, depth: int = 0) -> Any:
    """Leave most of a large object out, as `init.config` is."""
    if isinstance(value, dict):
        items = list(value.items())
        if depth and len(items) > SHOWN_WHOLE:
            items = [*items[:SHOWN_KEYS], ("…", "…")]
        return {key: _shorten(inner, depth + 1) for key, inner in items}
    return value


def show(line: Line) -> str:
    """Write a line as it is on the wire, but for what `…` stands for."""
    return json.dumps(_shorten(line), ensure_ascii=False, separators=(",", ":")).replace('"…":"…"', "…")


def block(lines: list[str]) -> str:
    """Put lines into a code block."""
    return "```json\n" + "\n".join(lines) + "\n```\n"


def _all() -> Iterator[Line]:
    for name in (*PREFERRED, *sorted(path.stem for path in SESSIONS.glob("*.jsonl") if path.stem not in PREFERRED)):
        yield from session(name)


def messages() -> dict[str, str]:
    """Give one example of every type of message."""
    wanted = {type_name(kind) for kind in EVENT_TYPES} | {type_name(kind) for kind in TRANSPORT_TYPES}
    found: dict[str, str] = {}
    for line in _all():
        kind = line["type"]
        if kind in wanted and kind not in found and not line.get("replay") and kind != "response":
            found[kind] = show(line)
    refusal = next((line for line in session("steered") if line["type"] == "response" and not line["ok"]), None)
    found["response"] = "" if refusal is None else show(refusal)
    return found


def exchanges() -> dict[str, tuple[str, str]]:
    """Give, for every command, one as it was sent, and its response."""
    found: dict[str, tuple[str, str]] = {}
    for path in sorted((SESSIONS / "commands").glob("*.txt"), key=lambda path: path.stem != "steered"):
        responses = {line["id"]: line for line in session(path.stem) if line["type"] == "response" and line["ok"]}
        for text in path.read_text().splitlines():
            try:
                command = json.loads(text)
            except json.JSONDecodeError:
                continue
            cmd, response = command.get("cmd"), responses.get(command.get("id"))
            if cmd in COMMANDS and cmd not in found and response is not None and response["cmd"] == cmd:
                found[cmd] = (show(command), show(response))
    return found


def life() -> str:
    """Show the life of a run: the first line of each kind, in the order in which they came."""
    shown, lines = set(), []
    for line in session("finished"):
        key = (line["type"], line.get("phase"), line.get("kind"))
        if key not in shown:
            shown.add(key)
            lines.append(show(line))
    return block(lines)


def steering() -> str:
    """Show how a run is paused, changed and resumed: what is sent is marked with an arrow."""
    sent = [json.loads(text) for text in (SESSIONS / "commands" / "steered.txt").read_text().splitlines()[3:6]]
    lines = session("steered")
    first = next(n for n, line in enumerate(lines) if line["type"] == "command" and line.get("cmd") == "pause")
    last = next(n for n, line in enumerate(lines) if line.get("id") == 5 and line["type"] == "response")
    waiting = {command["id"]: f"→ {show(command)}" for command in sent}
    out = []
    for line in lines[first : last + 1]:
        id_ = line.get("cause", line.get("id"))
        if id_ in waiting:
            out.append(waiting.pop(id_))
        out.append(f"← {show(line)}")
    return "```\n" + "\n".join(out) + "\n```\n"
