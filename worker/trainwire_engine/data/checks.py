"""Checks the parts of a row, and names the field that does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from trainwire_engine.data.parse import parse_strictly
from trainwire_engine.data.problems import RowError, kind_of


def check_message(message: Any, where: str) -> bool:
    """Check a message of a conversation; says whether it may be trained on. Raises RowError."""
    if type(message) is dict and len(message) == 2 and type(message.get("content")) is str:
        text_of(message, "role", where)
        return True
    role = text_of(typed(message, dict, where), "role", where)
    content = message.get("content")
    if isinstance(content, list):
        for index, part in enumerate(content):
            _check_part(part, f"{where}.content[{index}]")
    elif content is not None and not isinstance(content, str):
        raise RowError(f"{where}.content", f"it is {kind_of(content)}, not text")
    for index, call in enumerate(typed(message.get("tool_calls") or [], list, f"{where}.tool_calls")):
        _check_call(call, f"{where}.tool_calls[{index}]")
    for key in ("reasoning_content", "thinking", "reasoning"):
        if message.get(key) is not None:
            text_of(message, key, where)
    train = message.get("train", True)
    if not isinstance(train, bool):
        raise RowError(f"{where}.train", f"it is {kind_of(train)}, not true or false")
    weight = message.get("weight", 1)
    if weight not in (0, 1, None):
        raise RowError(f"{where}.weight", f"it is {weight!r}; a turn is trained (1) or not (0)")
    if role != "assistant" and message.get("train") is True:
        raise RowError(f"{where}.train", f"a {role} turn is not trained by itself", "Use train_on = all for that.")
    return train and weight != 0


def _check_part(part: Any, where: str) -> None:
    if isinstance(part, str):
        return
    kind = text_of(typed(part, dict, where), "type", where)
    if kind != "text":
        raise RowError(f"{where}.type", f"a part of type {kind!r} cannot be trained", "Only text parts are read.")
    text_of(part, "text", where)


def _check_call(call: Any, where: str) -> None:
    function = typed(call, dict, where).get("function", call)
    at = f"{where}.function" if "function" in call else where
    text_of(typed(function, dict, at), "name", at)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = json_text(arguments, f"{at}.arguments")
    if arguments is not None and not isinstance(arguments, dict):
        raise RowError(f"{at}.arguments", f"it is {kind_of(arguments)}, not an object")


def text_of(holder: Mapping[str, Any], key: str, where: str) -> str:
    """Give the text that stands under a key. Raises RowError."""
    path = f"{where}.{key}" if where else key
    if key not in holder:
        raise RowError(path, "it is missing")
    value = holder[key]
    if not isinstance(value, str):
        raise RowError(path, f"it is {kind_of(value)}, not text")
    return value


def integers(value: Any, where: str) -> list[int]:
    """Give a list of integers as such. Raises RowError."""
    for index, entry in enumerate(typed(value, list, where)):
        if type(entry) is not int:
            raise RowError(f"{where}[{index}]", f"it is {kind_of(entry)}, not an integer")
    return value


def typed(value: Any, kind: type, where: str) -> Any:
    """Give a value of a certain type. Raises RowError."""
    if not isinstance(value, kind):
        wanted = "a list" if kind is list else "an object"
        raise RowError(where, f"it is {kind_of(value)}, not {wanted}")
    return value


def json_text(text: str, where: str) -> Any:
    """Read JSON that a row has as a text; null where it is empty. Raises RowError."""
    if not text.strip():
        return None
    try:
        return parse_strictly(text)
    except orjson.JSONDecodeError as error:
        raise RowError(where, f"it is a text that is not JSON: {error.msg}") from None
    except RowError as error:
        reason = error.reason if error.field == "row" else f"its key {error.field!r} stands twice"
        raise RowError(where, reason, error.hint) from None
