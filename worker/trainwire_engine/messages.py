"""Brings messages into the form that a chat template takes, so that one conversation always gives one text."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

from trainwire_engine.template import ChatTemplate, Message, TemplateFailed

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
TRAINER_FIELDS = ("train", "weight")
"""Fields of a message that tell the trainer something and that no template sees."""

_MISSING = object()
_WORD = "qzprobeqz"


class MessageForm:
    """Finds out by small trials how a template takes tool calls, empty content and content in parts.

    Templates differ: some want a tool call's arguments as an object, some as a text; some print a null content as
    the word "None", some lose the tool calls of a message whose content is empty.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def __call__(self, messages: Sequence[Message]) -> list[Message]:
        """Give the messages as the template takes them; the given ones are left alone."""
        return [self._message(message) for message in messages]

    def _message(self, message: Message) -> Message:
        if len(message) == 2 and type(message.get("content")) is str:
            return message
        result = {key: value for key, value in message.items() if value is not None and key not in TRAINER_FIELDS}
        reasoning = next((result[key] for key in REASONING_FIELDS if key in result), None)
        if reasoning is not None:
            result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
        calls = result.get("tool_calls")
        if calls:
            result["tool_calls"] = [_call(call, self.arguments_as_object) for call in calls]
        else:
            result.pop("tool_calls", None)
        content = result.get("content")
        if isinstance(content, list):
            if not self.takes_parts:
                content = "".join(part if isinstance(part, str) else part.get("text") or "" for part in content)
            result["content"] = content
        if not content:
            empty = self.empty_content if calls else ""
            if empty is _MISSING:
                result.pop("content", None)
            else:
                result["content"] = empty
        return result

    @functools.cached_property
    def takes_parts(self) -> bool:
        """Whether content may be a list of parts; joined texts are given otherwise."""
        part = [{"type": "text", "text": _WORD}]
        text = self._try([{"role": "user", "content": part}])
        return text is not None and _WORD in text and "'type'" not in text and '"type"' not in text

    @functools.cached_property
    def arguments_as_object(self) -> bool:
        """Whether a tool call's arguments are given as an object; as JSON text otherwise."""
        for empty in ("", None, _MISSING):
            text = self._try(_tool_turn(empty, as_object=True))
            if text is not None and "qzargument" in text:
                return "'qzargument'" not in text
        return False

    @functools.cached_property
    def empty_content(self) -> Any:
        """What stands for the content of a message that only calls tools."""
        for empty in ("", None, _MISSING):
            text = self._try(_tool_turn(empty, self.arguments_as_object))
            if text is not None and _WORD in text and "None" not in text:
                return empty
        return ""

    @functools.cached_property
    def writes_tool_calls(self) -> bool:
        """Whether a tool call reaches the text at all."""
        text = self._try(self.tool_turn)
        return text is not None and _WORD in text

    @property
    def tool_turn(self) -> list[Message]:
        """A question, a tool call and its result, as the template takes them."""
        return _tool_turn(self.empty_content, self.arguments_as_object)

    @functools.cached_property
    def writes_tools(self) -> bool:
        """Whether the description of the tools reaches the text."""
        tool = {"type": "function", "function": {"name": _WORD, "description": "d", "parameters": {"type": "object"}}}
        text = self._try([{"role": "user", "content": "q"}], [tool])
        return text is not None and _WORD in text

    @functools.cached_property
    def writes_reasoning(self) -> bool:
        """Whether a turn's reasoning reaches the text, in the last turn at least."""
        reply = {"role": "assistant", "content": "a", "reasoning_content": _WORD, "thinking": _WORD}
        text = self._try([{"role": "user", "content": "q"}, reply])
        return text is not None and _WORD in text

    def _try(self, messages: list[Message], tools: list[Any] | None = None) -> str | None:
        try:
            return self._template.render(messages, tools)
        except TemplateFailed:
            return None


def _tool_turn(content: Any, as_object: bool) -> list[Message]:
    call = {"id": "qzcall123", "type": "function", "function": {"name": _WORD, "arguments": {"qzargument": "v"}}}
    reply: Message = {"role": "assistant", "content": content, "tool_calls": [_call(call, as_object)]}
    if content is _MISSING:
        del reply["content"]
    answer = {"role": "tool", "content": "r", "name": _WORD, "tool_call_id": "qzcall123"}
    return [{"role": "user", "content": "q"}, reply, answer]


def _call(call: dict[str, Any], as_object: bool) -> dict[str, Any]:
    """Bring a call into the shape {type, function: {name, arguments}}, with the arguments as the template wants."""
    function = call.get("function")
    if not isinstance(function, dict):
        function = {key: call[key] for key in ("name", "arguments") if key in call}
        call = {key: value for key, value in call.items() if key not in ("name", "arguments")}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = json.loads(arguments) if arguments.strip() else {}
    form: Callable[[Any], Any] = _same if as_object else _text
    function = {**function, "arguments": form({} if arguments is None else arguments)}
    return {"type": "function", **{k: v for k, v in call.items() if v is not None}, "function": function}


def _same(value: Any) -> Any:
    return value


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
