"""Checks the parts of a row, and names the field that does not fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trainwire_protocol.errors import DatasetInvalid


class RowError(Exception):
    """A row that cannot be used: the field, the reason, and what to do about it."""

    def __init__(self, field: str, reason: str, hint: str | None = None) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason
        self.hint = hint


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
        try:
            arguments = json.loads(arguments) if arguments.strip() else None
        except ValueError:
            hint = "Arguments are an object, or the JSON text of one."
            raise RowError(f"{at}.arguments", "it is a text that is not JSON", hint) from None
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


def kind_of(value: Any) -> str:
    """Name the type of a JSON value."""
    names = {
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return "null" if value is None else names.get(type(value), type(value).__name__)


def file_invalid(name: str, line: int, reason: str, hint: str | None, field: str | None = None) -> DatasetInvalid:
    """Say what is wrong at a line of a file, and in which field."""
    what = f"{field}: {reason}" if field else reason
    details = {"path": name, "line": line, "reason": reason, **({"field": field} if field else {})}
    return DatasetInvalid(f"{name}:{line}: {what}.", hint=hint, **details)


def row_invalid(name: str, line: int, error: RowError) -> DatasetInvalid:
    """Say where a row stands that cannot be used, and why."""
    return file_invalid(name, line, error.reason, error.hint, error.field)
