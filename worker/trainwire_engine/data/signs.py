"""Puts signs in the place of the contents of a conversation, or behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from trainwire_engine.data.recorder import SIGN
from trainwire_engine.data.turns import Signed
from trainwire_engine.messages import REASONING_FIELDS
from trainwire_engine.template import Message


@dataclass(frozen=True)
class Source:
    """A content: its message, what it is there, and its text."""

    message: int
    kind: str
    text: str


def sources_of(messages: Sequence[Message]) -> list[Source]:
    """Every content of a conversation that a template may write, in a fixed order."""
    sources: list[Source] = []

    def collect(index: int, kind: str, text: str) -> str:
        sources.append(Source(index, kind, text))
        return text

    for index, message in enumerate(messages):
        with_contents(index, message, collect)
    return sources


def outline(messages: Sequence[Message]) -> tuple[list[str], list[Any]]:
    """The texts of `sources_of`, and all of the conversation that is not among them."""
    contents: list[str] = []
    rest: list[Any] = []

    def collect(index: int, kind: str, text: str) -> str:
        contents.append(text)
        return ""

    for message in messages:
        content = message.get("content")
        if len(message) == 2 and type(content) is str:
            contents.append(content)
            rest.append(message["role"])
        else:
            rest.append(orjson.dumps(with_contents(0, message, collect)))
    return contents, rest


def with_contents(index: int, message: Message, put: Callable[[int, str, str], str]) -> Message:
    """Copy a message with other contents: `put` gets the message's index, the kind and the text of each."""
    result = dict(message)
    reasoning = message.get(REASONING_FIELDS[0])
    if isinstance(reasoning, str):
        other = put(index, "reasoning", reasoning)
        for key in REASONING_FIELDS:
            if result.get(key) == reasoning:
                result[key] = other
    content = message.get("content")
    if isinstance(content, str):
        result["content"] = put(index, "content", content)
    elif isinstance(content, list):
        result["content"] = [
            put(index, "content", part)
            if isinstance(part, str)
            else {**part, "text": put(index, "content", part["text"])}
            for part in content
        ]
    if message.get("tool_calls"):
        result["tool_calls"] = [
            {**call, "function": _with_texts(call["function"], lambda text: put(index, "call", text))}
            for call in message["tool_calls"]
        ]
    return result


def _with_texts(value: Any, put: Callable[[str], str]) -> Any:
    """Copy a JSON value with other texts; keys, numbers and null stay."""
    if isinstance(value, str):
        return put(value)
    if isinstance(value, dict):
        return {key: _with_texts(entry, put) for key, entry in value.items()}
    return [_with_texts(entry, put) for entry in value] if isinstance(value, list) else value


def split(text: str) -> Signed:
    """Cut a text with signs into its literals and the signs."""
    pieces = SIGN.split(text)
    return Signed(pieces[::2], [int(number) for number in pieces[1::2]])
