"""Finds in a rendered conversation the text of each turn that the model has to write."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from trainwire_engine.messages import REASONING_FIELDS
from trainwire_engine.template import ChatTemplate, Message, Span, TemplateFailed

# Letters and digits alone: no filter, escape or strip of a template changes them.
_SIGN = re.compile(r"Qz([0-9]+)zQw7")
_CACHED = 4096


class TurnNotFound(Exception):
    """It is not certain where a turn stands in the rendered text."""


@dataclass(frozen=True)
class _Sign:
    """Stands for one text of a conversation in a signed rendering."""

    message: int
    kind: str
    text: str


@dataclass(frozen=True)
class _Place:
    """A position: `offset` characters into the literal number `literal`."""

    literal: int
    offset: int


@dataclass(frozen=True)
class Skeleton:
    """A rendered conversation with signs for its contents: the text between them, and where the turns are."""

    literals: tuple[str, ...]
    signs: tuple[int, ...]
    turns: dict[int, tuple[_Place, _Place]]

    def fit(self, text: str, contents: Sequence[str]) -> dict[int, Span] | None:
        """Lay the skeleton over the real text; None if it differs anywhere."""
        at = 0
        starts = []
        for index, literal in enumerate(self.literals):
            if not text.startswith(literal, at):
                return None
            starts.append(at)
            at += len(literal)
            if index < len(self.signs):
                following = self.literals[index + 1]
                for form in _forms(contents[self.signs[index]]):
                    if text.startswith(form, at) and text.startswith(following, at + len(form)):
                        at += len(form)
                        break
                else:
                    return None
        if at != len(text):
            return None
        return {
            turn: (starts[first.literal] + first.offset, starts[last.literal] + last.offset)
            for turn, (first, last) in self.turns.items()
        }


def _forms(content: str) -> tuple[str, ...]:
    """What templates make of a content: nothing, or one of the usual trims."""
    return (
        content,
        content.strip(),
        content.lstrip(),
        content.rstrip(),
        content.strip("\n"),
        content.lstrip("\n"),
        content.rstrip("\n"),
    )


class TurnFinder:
    """Finds the turns of conversations under one template.

    The conversation is rendered a second time with a sign in place of each content, and so are its beginnings: up
    to the turn with a generation prompt, and up to the turn's end. What these share with the signed text says where
    a turn begins and ends. Signed texts depend on the structure of a conversation alone and are kept; each real
    text is compared with them to the last character. Where a content changes what the template does, the signs are
    put behind the contents instead. `marks` are the texts of the tokenizer's added tokens.
    """

    def __init__(self, template: ChatTemplate, marks: Sequence[str]) -> None:
        self._template = template
        self._kept: dict[bytes, Skeleton] = {}
        marks = [mark for mark in marks if mark.strip()]
        self._marks = re.compile("|".join(re.escape(m) for m in sorted(marks, key=len, reverse=True)) or r"(?!)")
        self._longest = max(map(len, marks), default=1)

    def find(
        self, text: str, messages: Sequence[Message], tools: Sequence[Any] | None, turns: Sequence[int]
    ) -> dict[int, Span]:
        """Give the span of each of the turns (indices of messages). Raises TurnNotFound."""
        signed, signs = _signed(messages)
        key = orjson.dumps([signed, tools, turns])
        skeleton = self._kept.get(key)
        if skeleton is None:
            try:
                skeleton = self._skeleton(signed, signs, tools, turns, behind=False)
            except (TemplateFailed, TurnNotFound):
                skeleton = None
            if skeleton is not None and len(self._kept) < _CACHED:
                self._kept[key] = skeleton
        spans = skeleton.fit(text, [sign.text for sign in signs]) if skeleton else None
        return spans if spans is not None else self._find_behind(text, messages, tools, turns)

    def _find_behind(
        self, text: str, messages: Sequence[Message], tools: Sequence[Any] | None, turns: Sequence[int]
    ) -> dict[int, Span]:
        if _SIGN.search(text):
            raise TurnNotFound("the text has words that are reserved for finding turns")
        for roles in (None, ("assistant",)):
            signed, signs = _signed(messages, behind=True, roles=roles)
            try:
                skeleton = self._skeleton(signed, signs, tools, turns, behind=True)
            except (TemplateFailed, TurnNotFound):
                continue
            spans = skeleton.fit(text, [""] * len(signs))
            if spans is not None:
                return spans
        raise TurnNotFound("the template changes the text around a turn in a way that hides where it begins or ends")

    def _skeleton(
        self,
        messages: Sequence[Message],
        signs: Sequence[_Sign],
        tools: Sequence[Any] | None,
        turns: Sequence[int],
        behind: bool,
    ) -> Skeleton:
        literals, order = _split(self._template.render(messages, tools))
        places = {}
        for turn in turns:
            own = [at for at, number in enumerate(order) if signs[number].message == turn]
            if not own or len(own) != own[-1] - own[0] + 1:
                raise TurnNotFound("the template leaves the turn out or takes it apart")
            first, last = own[0], own[-1]
            previous = order[first - 1] if first else None
            begin = self._begin(messages[:turn], tools, literals[first], previous, behind)
            if begin is None:
                if behind or signs[order[first]].kind != "content":
                    raise TurnNotFound("no role header is found before the turn")
                begin = len(literals[first])
            end = self._end(messages[: turn + 1], tools, literals[last + 1], order[last], turn + 1 == len(messages))
            places[turn] = (_Place(first, begin), _Place(last + 1, end))
        return Skeleton(tuple(literals), tuple(order), places)

    def _begin(
        self, before: Sequence[Message], tools: Sequence[Any] | None, literal: str, previous: int | None, behind: bool
    ) -> int | None:
        """How much of the text before a turn's first content the generation prompt would already have."""
        if not self._header:
            return None
        try:
            prompted, order = _split(self._template.render(before, tools, True))
            plain, _ = _split(self._template.render(before, tools))
        except TemplateFailed:
            return self._begin_by_header(literal)
        if (order[-1] if order else None) != previous:
            return self._begin_by_header(literal)
        length = self._shared(prompted[-1], literal)
        if length == len(prompted[-1]) or (length == len(literal) and not behind):
            return length
        # Only a part is shared: a header without what the prompt adds to it. It ends with a mark or a line.
        length = self._boundary(literal, length)
        return length if length > self._shared(plain[-1], literal) else None

    def _begin_by_header(self, literal: str) -> int | None:
        found = literal.count(self._header) == 1
        return literal.index(self._header) + len(self._header) if found else None

    @functools.cached_property
    def _header(self) -> str:
        """The generation prompt after one question; empty if the template has none."""
        question = [{"role": "user", "content": "q"}]
        try:
            prompted = self._template.render(question, None, True)
            plain = self._template.render(question, None)
        except TemplateFailed:
            return ""
        return prompted[len(plain) :] if prompted.startswith(plain) else prompted

    def _end(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, literal: str, sign: int, is_last: bool
    ) -> int:
        """How far the text after a turn's last content belongs to the turn: to its end mark."""
        length = len(literal)
        if not is_last:
            try:
                rendered, signs = _split(self._template.render(messages, tools))
            except TemplateFailed:
                rendered, signs = [], []
            if signs and signs[-1] == sign:
                length = self._shared(rendered[-1], literal)
            else:
                mark = self._marks.search(literal)
                if mark is None:
                    raise TurnNotFound("no end mark is found after the turn")
                length = mark.end()
        marks = list(self._marks.finditer(literal, 0, length))
        if marks and not literal[marks[-1].end() : length].strip():
            return marks[-1].end()
        return length

    def _shared(self, one: str, other: str) -> int:
        """Length of the common beginning of two texts, cut back where it would end inside a mark."""
        low, high = 0, min(len(one), len(other))
        while low < high:
            middle = (low + high + 1) // 2
            if one[low:middle] == other[low:middle]:
                low = middle
            else:
                high = middle - 1
        for text in (one, other):
            for mark in self._marks.finditer(text, max(0, low - self._longest), low + self._longest):
                if mark.start() < low < mark.end():
                    low = mark.start()
        return low

    def _boundary(self, literal: str, length: int) -> int:
        """The last end of a mark or a line at or before a position."""
        ends = [mark.end() for mark in self._marks.finditer(literal, 0, length)]
        return max([literal.rfind("\n", 0, length) + 1, *ends])


def _split(text: str) -> tuple[list[str], list[int]]:
    """Cut a signed text into the literals between the signs, and the signs' numbers."""
    pieces = _SIGN.split(text)
    return pieces[::2], [int(number) for number in pieces[1::2]]


def _signed(
    messages: Sequence[Message], behind: bool = False, roles: tuple[str, ...] | None = None
) -> tuple[list[Message], list[_Sign]]:
    """Sign every text that a template may write: in place of the text, or behind it."""
    signs: list[_Sign] = []

    def sign(index: int, kind: str, text: str) -> str:
        body = text.rstrip()
        if not body:
            return text
        mark = f"Qz{len(signs)}zQw7"
        signs.append(_Sign(index, kind, text))
        return body + mark + text[len(body) :] if behind else mark

    signed = []
    for index, message in enumerate(messages):
        if roles is not None and message["role"] not in roles:
            signed.append(message)
            continue
        message = dict(message)
        reasoning = message.get(REASONING_FIELDS[0])
        if isinstance(reasoning, str):
            mark = sign(index, "reasoning", reasoning)
            message.update({key: mark for key in REASONING_FIELDS if message.get(key) == reasoning})
        content = message.get("content")
        if isinstance(content, str):
            message["content"] = sign(index, "content", content)
        elif isinstance(content, list):
            message["content"] = [
                sign(index, "content", part)
                if isinstance(part, str)
                else {**part, "text": sign(index, "content", part["text"])}
                for part in content
            ]
        if message.get("tool_calls"):
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "name": sign(index, "call", call["function"]["name"])}}
                for call in message["tool_calls"]
            ]
        signed.append(message)
    return signed, signs
