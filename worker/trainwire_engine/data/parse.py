"""Reads the JSON of one row, and says in words what is wrong with it."""

from __future__ import annotations

from typing import Any

import orjson

from trainwire_engine.data.rows import RowError


def parse_row(data: bytes) -> Any:
    """Parse one row strictly: UTF-8, no lone surrogates, no NaN. Raises RowError."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise RowError("row", *_diagnosis(data, error)) from None


def _diagnosis(data: bytes, error: orjson.JSONDecodeError) -> tuple[str, str | None]:
    text = data.strip()
    if not text.strip(b"\0"):
        return "the line is NUL bytes", "The file has a hole: copy it again."
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as broken:
        return f"the text is not UTF-8 (byte {broken.start + 1} of the row)", "Store the file as UTF-8."
    if "surrogate" in error.msg:
        return "half of a surrogate pair stands alone", "Such an escape is no character: take it out."
    if text.endswith(b",") and _parses(text[:-1]):
        return "a comma follows the row", "A .jsonl file has one row a line and no commas between them."
    if text in (b"[", b"{") or (text[:1] in b"[{" and error.pos >= len(data.rstrip()) - 1):
        return (
            "the row does not end on its line",
            "A .jsonl file has one row a line. Is it pretty-printed? `jq -c . FILE` writes it so; an array goes"
            " into a .json file.",
        )
    if text.startswith(b"{") and b"}" in text and "trailing" in error.msg:
        return "there is more than one value on the line", "A .jsonl file has one row a line."
    return f"this is not JSON: {error.msg}", None


def _parses(data: bytes) -> bool:
    try:
        orjson.loads(data)
    except orjson.JSONDecodeError:
        return False
    return True
