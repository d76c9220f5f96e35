"""What a row of a data file may look like, and what is wrong with one that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainwire_engine.data.checks import check_message, integers, json_text, text_of, typed
from trainwire_engine.data.problems import RowError, kind_of

Row = Mapping[str, Any]
Message = dict[str, Any]

_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "function_call": "function_call",
}


@dataclass
class Chat:
    """A conversation; `train` says for each message whether its row allows training on it."""

    messages: list[Message]
    tools: list[Any] | None = None
    train: list[bool] = field(default_factory=list)


@dataclass
class Text:
    """Plain text; a prompt and its completion are joined at the character `completion_at`."""

    text: str
    completion_at: int | None = None


@dataclass
class Tokens:
    """Token ids made by somebody else; `labels` equals `ids` where a token is trained, and is -100 elsewhere."""

    ids: list[int]
    labels: list[int]


Example = Chat | Text | Tokens


def shape_of(row: Any) -> Shape:
    """Tell a row's shape by its keys. Raises RowError if it has none of those known."""
    if not isinstance(row, dict):
        raise _no_object(row)
    for shape in SHAPES:
        if all(key in row for key in shape.keys):
            return shape
    keys = ", ".join(sorted(str(key) for key in row)[:8]) or "nothing"
    known = "; ".join(" + ".join(shape.keys) for shape in SHAPES)
    raise RowError("row", f"it has {keys}, and fits none of the known shapes", f"A row has one of: {known}.")


def _messages(row: Row, templated: bool) -> Chat:
    return _chat(row["messages"], "messages", row)


def _conversations(row: Row, templated: bool) -> Chat:
    turns = typed(row["conversations"], list, "conversations")
    if any(isinstance(turn, dict) and "from" not in turn and "role" in turn for turn in turns):
        return _chat(turns, "conversations", row)
    messages: list[Message] = []
    for index, turn in enumerate(turns):
        where = f"conversations[{index}]"
        speaker = text_of(typed(turn, dict, where), "from", where)
        role = _SPEAKERS.get(speaker)
        if role is None:
            raise RowError(f"{where}.from", f"{speaker!r} is no known speaker", f"Known: {', '.join(_SPEAKERS)}.")
        value = text_of(turn, "value", where)
        kept = {key: turn[key] for key in ("train", "weight") if key in turn}
        if role == "function_call":
            messages.append({"role": "assistant", "tool_calls": _parsed_calls(value, f"{where}.value"), **kept})
        else:
            messages.append({"role": role, "content": value, **kept})
    system = row.get("system")
    if system and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, {"role": "system", "content": text_of(row, "system", "")})
    return _chat(messages, "conversations", row)


def _parsed_calls(value: str, where: str) -> list[Any]:
    parsed = json_text(value, where)
    if not isinstance(parsed, dict | list):
        raise RowError(where, "a function_call is a JSON text with name and arguments")
    calls: list[Any] = parsed if isinstance(parsed, list) else [parsed]
    return calls


def _prompt_completion(row: Row, templated: bool) -> Example:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) or isinstance(completion, list):
        before = _as_messages(prompt, "prompt", "user")
        after = _as_messages(completion, "completion", "assistant")
        chat = _chat(before + after, "messages", row)
        chat.train[: len(before)] = [False] * len(before)
        return chat
    prompt, completion = text_of(row, "prompt", ""), text_of(row, "completion", "")
    if not templated:
        return Text(prompt + completion, len(prompt))
    pair = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    return _chat(pair, "messages", row)


def _as_messages(value: Any, where: str, role: str) -> list[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    messages: list[Any] = typed(value, list, where)
    return messages


def _instruction(row: Row, templated: bool) -> Chat:
    prompt, output = text_of(row, "instruction", ""), text_of(row, "output", "")
    if row.get("input"):
        prompt = f"{prompt}\n\n{text_of(row, 'input', '')}" if prompt else text_of(row, "input", "")
    messages = [{"role": "system", "content": text_of(row, "system", "")}] if row.get("system") else []
    for index, pair in enumerate(typed(row.get("history") or [], list, "history")):
        where = f"history[{index}]"
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise RowError(where, "an entry is a pair of texts: what was asked and what was answered")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": output}]
    return _chat(messages, "messages", row)


def _input_ids(row: Row, templated: bool) -> Tokens:
    ids = integers(row["input_ids"], "input_ids")
    labels = integers(row["labels"], "labels")
    if len(ids) != len(labels):
        raise RowError("labels", f"it has {len(labels)} entries, input_ids has {len(ids)}")
    if any(value == 0 for value in integers(row.get("attention_mask") or [], "attention_mask")):
        raise RowError("attention_mask", "it has zeros", "Leave padding out of the rows.")
    for index, (token, label) in enumerate(zip(ids, labels)):
        if label not in (-100, token):
            raise RowError(
                f"labels[{index}]",
                f"it is {label}, but input_ids[{index}] is {token}",
                "A label is the token at its own place, or -100 where the token is not trained.",
            )
        if not 0 <= token < 2**31:
            raise RowError(f"input_ids[{index}]", f"{token} is no token id")
    return Tokens(ids, labels)


def _plain_text(row: Row, templated: bool) -> Text:
    return Text(text_of(row, "text", ""))


@dataclass(frozen=True)
class Shape:
    """One way to write a row: the keys it is known by, and how it is read."""

    keys: tuple[str, ...]
    read: Callable[[Row, bool], Example]

    def parse(self, row: Any, templated: bool) -> Example:
        """Read a row of this shape. Raises RowError."""
        if not isinstance(row, dict):
            raise _no_object(row)
        for key in self.keys:
            if key not in row:
                first = " + ".join(self.keys)
                raise RowError(key, f"it is missing, while the file's first row has {first}", _ONE_SHAPE)
        return self.read(row, templated)


def _no_object(row: Any) -> RowError:
    return RowError("row", f"it is {kind_of(row)}, not an object", 'A row is an object such as {"messages": […]}.')


_ONE_SHAPE = "All rows of one file have the same shape; other shapes go into other files."

SHAPES = (
    Shape(("messages",), _messages),
    Shape(("conversations",), _conversations),
    Shape(("prompt", "completion"), _prompt_completion),
    Shape(("instruction", "output"), _instruction),
    Shape(("input_ids", "labels"), _input_ids),
    Shape(("text",), _plain_text),
)
"""The known shapes; a row that fits several is of the first of them."""


def _chat(messages: Any, where: str, row: Row) -> Chat:
    checked = typed(messages, list, where)
    train = [check_message(message, f"{where}[{index}]") for index, message in enumerate(checked)]
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = json_text(tools, "tools")
    if tools is not None:
        tools = typed(tools, list, "tools")
        for index, tool in enumerate(tools):
            typed(tool, dict, f"tools[{index}]")
    return Chat(checked, tools or None, train)
