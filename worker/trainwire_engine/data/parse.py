"""Reads the JSON of one row, and says in words what is wrong with it."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

from trainwire_engine.data.problems import RowError

_TOOL_KEYS = (b'"tool', b'"function', b"\\u00")
"""How a key begins that belongs to tools; its letters may be escaped."""
_LONG_NUMBER = re.compile(rb"[0-9]{19}")


def parse_row(data: bytes) -> Any:
    """Parse one row strictly, as `parse_strictly` does; it says where a row is broken. Raises RowError."""
    try:
        # Only what belongs to tools is written again; other numbers of a row are checked where they are used.
        return parse_strictly(data, long_numbers=not any(map(data.__contains__, _TOOL_KEYS)))
    except orjson.JSONDecodeError as error:
        raise RowError("row", *_diagnosis(data, error)) from None


def parse_strictly(data: bytes | str, long_numbers: bool = False) -> Any:
    """Parse JSON so that nothing of it is lost: no lone surrogate, NaN, key twice, or integer beyond 64 bits.

    With `long_numbers`, such integers are rounded.
    Raises orjson.JSONDecodeError, or RowError for a key or a number.
    """
    value = orjson.loads(data)
    data = data.encode() if isinstance(data, str) else data
    try:
        # A key that stands twice is lost in `value`. The slower look is only taken where the counts differ.
        if data.count(b'":') != _keys(value) or _has_late_colon(data):
            json.loads(data, object_pairs_hook=_refuse_repeated)
        if not long_numbers and _LONG_NUMBER.search(data):
            json.loads(data, parse_int=_refuse_long)
    except RecursionError:
        raise RowError("row", "it is nested too deeply", "Write the inner part as a text.") from None
    return value


def _has_late_colon(data: bytes) -> bool:
    """Whether a colon stands apart from the key that may be before it."""
    return b" :" in data or b"\t:" in data or b"\n:" in data or b"\r:" in data


def _refuse_long(digits: str) -> None:
    if not -(2**63) <= int(digits) < 2**64:
        raise RowError("row", f"the number {digits[:40]} does not fit into 64 bits", "Write it as a text.")


def _keys(value: Any) -> int:
    if type(value) is dict:
        return len(value) + sum(_keys(entry) for entry in value.values() if type(entry) is dict or type(entry) is list)
    if type(value) is list:
        return sum(_keys(entry) for entry in value if type(entry) is dict or type(entry) is list)
    return 0


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> None:
    seen = set()
    for key, _ in pairs:
        if key in seen:
            raise RowError(key, "the key stands twice in one object", "Keep one of the two.")
        seen.add(key)


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
    if error.pos >= len(data.decode("utf-8").rstrip()) - 1 and text[:1] in b"[{":
        return "the row does not end on its line", _ONE_A_LINE
    if "trailing" in error.msg or error.msg.startswith("unexpected content after"):
        return "there is more than one value on the line", "A .jsonl file has one row a line."
    if error.doc.startswith(("NaN", "Infinity"), error.pos):
        return "NaN and Infinity are not JSON", "Write null, or leave the key out."
    return f"this is not JSON: {error.msg}", None


_ONE_A_LINE = (
    "A .jsonl file has one row a line. Is it pretty-printed? `jq -c . FILE` puts each row on one line;"
    " an array goes into a .json file."
)


def _parses(data: bytes) -> bool:
    try:
        orjson.loads(data)
    except orjson.JSONDecodeError:
        return False
    return True
