"""`trainwire config`: the documented default config file."""

import argparse
import json
import textwrap
from typing import Any

import msgspec

from trainwire_protocol.config import FIELDS, ON_RESUME, OnResume, computed_default, key_meta

_REQUIRED = {"model": '"path/to/model"', "data": '"path/to/train.jsonl"'}


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def default_file() -> str:
    """Give the text: every key with its meaning and its default, those without a plain default commented out."""
    lines = ["# The config of a trainwire run. Relative paths start at this file's folder.", ""]
    for key, field in FIELDS.items():
        description = (key_meta(key).description or "").strip()
        notes = []
        if computed := computed_default(key):
            notes.append(f"default: {computed}")
        if key_meta(key).extra_json_schema and (key_meta(key).extra_json_schema or {}).get("x-settable"):
            notes.append("can be set while training")
        if ON_RESUME[key] is OnResume.FIXED:
            notes.append("fixed for the run")
        text = description + (f" ({'; '.join(notes)})" if notes else "")
        lines += textwrap.wrap(text, 110, initial_indent="# ", subsequent_indent="# ")
        if field.required:
            lines.append(f"{key} = {_REQUIRED[key]}")
        else:
            default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
            lines.append(f"# {key} =" if default is None else f"{key} = {_toml(default)}")
        lines.append("")
    return "\n".join(lines)


def run(words: list[str]) -> int:
    """Print the file."""
    argparse.ArgumentParser(prog="trainwire config", description=__doc__).parse_args(words)
    print(default_file(), end="")
    return 0
