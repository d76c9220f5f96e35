"""Whole processes in tests: `trainwire run` with its lines checked against the schema."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
from tiny import tiny_model

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}


@cache
def message_validator() -> jsonschema.Draft202012Validator:
    """A validator of printed lines."""
    schema = json.loads((ROOT / "protocol" / "schema.json").read_bytes())
    return jsonschema.Draft202012Validator({"$ref": "#/$defs/Message", "$defs": schema["$defs"]})


@dataclass(frozen=True)
class Session:
    """What a finished worker said."""

    lines: list[dict[str, Any]]
    exit_code: int
    stderr: str

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The lines of one type."""
        return [line for line in self.lines if line["type"] == kind]

    def one(self, kind: str) -> dict[str, Any]:
        """The only line of a type."""
        (line,) = self.of(kind)
        return line

    @property
    def types(self) -> list[str]:
        """The types in order, each run of equal ones as one."""
        names = [line["type"] for line in self.lines]
        return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]

    @property
    def losses(self) -> dict[int, float]:
        """Loss by step."""
        return {line["step"]: line["loss"] for line in self.of("step")}


def parse(raw: bytes) -> list[dict[str, Any]]:
    """Read printed lines by the rules of the wire, each against the schema."""
    assert raw.endswith(b"\n")
    lines = []
    for line in raw[:-1].split(b"\n"):
        assert len(line) < 60_000
        assert line.startswith(b"{")
        assert all(0x20 <= byte <= 0x7E for byte in line)
        message = json.loads(line)
        message_validator().validate(message)
        lines.append(message)
    return lines


def trainwire(*words: str | Path, stdin: bytes = b"", cwd: Path | None = None, **env: str) -> Session:
    """Run the console script to its end."""
    command = [sys.executable, "-m", "trainwire_cli", *map(str, words)]
    done = subprocess.run(command, input=stdin, capture_output=True, cwd=cwd, env={**ENVIRONMENT, **env}, timeout=240)
    return Session(parse(done.stdout) if done.stdout else [], done.returncode, done.stderr.decode())


def write_config(path: Path, **values: Any) -> Path:
    """Write a config file; values are written as JSON, which TOML reads for these types."""
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()), encoding="utf-8")
    return path


def write_chat(path: Path, rows: int, *, words: str = "number") -> Path:
    """Write chat rows of different lengths."""
    with path.open("w", encoding="utf-8") as file:
        for i in range(rows):
            messages = [
                {"role": "user", "content": f"say {i}"},
                {"role": "assistant", "content": f"{words} {i} " * (1 + i % 5)},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def write_base(folder: Path) -> Path:
    """Fill a folder that no test changes: `model`, `chat.jsonl` (40 rows) and `valid.jsonl` (7 rows)."""
    tiny_model(folder / "model")
    write_chat(folder / "chat.jsonl", 40)
    write_chat(folder / "valid.jsonl", 7)
    return folder
