"""What is wrong with a row or a file, in words: place, field, reason, and what to do."""

from __future__ import annotations

from typing import Any

from trainwire_protocol.errors import NO_PERMISSION, DatasetInvalid


class RowError(Exception):
    """A row that cannot be used: the field, the reason, and what to do about it."""

    def __init__(self, field: str, reason: str, hint: str | None = None) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason
        self.hint = hint


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


def unreadable(name: str, error: OSError) -> DatasetInvalid:
    """Say that the system does not let a file be read."""
    hint = NO_PERMISSION if isinstance(error, PermissionError) else "Look at the disk and at the path."
    return DatasetInvalid(f"{name} cannot be read: {error.strerror or error}.", hint=hint, path=name)
