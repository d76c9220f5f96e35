"""Finds where the turns of a conversation begin and end, by what its renderings have in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from trainwire_engine.data.patterns import any_of
from trainwire_engine.data.recorder import Origin, overlap
from trainwire_engine.template import ChatTemplate, Message, TemplateFailed


class TurnNotFound(Exception):
    """It is not certain where a turn stands in the rendered text."""


@dataclass(frozen=True)
class Place:
    """A position in a rendered text with signs: `offset` characters into the literal number `literal`."""

    literal: int
    offset: int


@dataclass(frozen=True)
class Signed:
    """A rendered text whose contents are signs: the literals around them, and the signs in their order."""

    literals: list[str]
    signs: list[int]

    def last(self, roots: Sequence[int]) -> int | None:
        """The content that the last sign stands for."""
        return roots[self.signs[-1]] if self.signs else None


SignedRender = Callable[[int, bool], Signed]
"""Renders the first that many messages, with or without a generation prompt."""


@dataclass(frozen=True)
class Contents:
    """What is known of each sign: its message (None: several), what it is there, and what it was made of.

    `roots` are the contents that signs come from, `origins` the parts of them. With `behind`, signs stand behind the
    contents, else in their place.
    """

    owners: Sequence[int | None]
    kinds: Sequence[str]
    roots: Sequence[int]
    origins: Sequence[frozenset[Origin]]
    behind: bool = False


class TurnFinder:
    """Finds turns under one template.

    What the beginning of a conversation with a generation prompt shares with the whole one says where a turn
    begins, and what the beginning up to the turn shares with it says where the turn ends. `marks` are the texts of
    the tokenizer's added tokens: no turn begins or ends inside one. `stops` are those that end a generation: a turn
    goes on behind none.
    """

    def __init__(self, template: ChatTemplate, marks: Sequence[str], stops: Sequence[str] = ()) -> None:
        marks = [mark for mark in marks if mark.strip()]
        self._stops = re.compile(any_of(stops) if stops else "(?!)")
        self._marks = re.compile(any_of(marks) if marks else "(?!)")
        self._longest = max(map(len, marks), default=1)
        self._header = _generation_prompt(template)
        opening = self._marks.match(self._header)
        self._opening = opening[0] if opening else ""
        # The role stands in the header up to the next mark, or to the end of the line.
        rest = self._header[len(self._opening) :]
        self._role_end = len(self._opening) + len(self._marks.split(rest, maxsplit=1)[0].split("\n")[0])

    def find(
        self, whole: Signed, render: SignedRender, messages: int, turns: Sequence[int], contents: Contents
    ) -> dict[int, tuple[Place, Place]]:
        """Give the begin and the end of each of the turns, which are indices of messages. Raises TurnNotFound."""
        return {turn: self._turn(whole, render, messages, turn, contents) for turn in turns}

    def _turn(
        self, whole: Signed, render: SignedRender, messages: int, turn: int, contents: Contents
    ) -> tuple[Place, Place]:
        own = [at for at, sign in enumerate(whole.signs) if contents.owners[sign] == turn]
        if not own or len(own) != own[-1] - own[0] + 1:
            raise TurnNotFound("the template leaves the turn out or takes it apart")
        _check_once(whole, turn, contents)
        first, last = own[0], own[-1]
        begin = self._begin(whole, render, turn, first, contents)
        if begin is None:
            if contents.behind or contents.kinds[whole.signs[first]] != "content":
                raise TurnNotFound("no role header is found before the turn")
            begin = len(whole.literals[first])
        return Place(first, begin), Place(last + 1, self._end(whole, render, turn, messages, last, contents))

    def _begin(self, whole: Signed, render: SignedRender, turn: int, first: int, contents: Contents) -> int | None:
        """How much of the text before a turn's first content the generation prompt would already have."""
        literal = whole.literals[first]
        previous = contents.roots[whole.signs[first - 1]] if first else None
        try:
            prompted, plain = render(turn, True), render(turn, False)
        except TemplateFailed:
            return self._begin_by_header(literal)
        if prompted.last(contents.roots) != previous:
            return self._begin_by_header(literal)
        prompt = prompted.literals[-1]
        length = self._shared(prompt, literal)
        if not self._header:
            # The model begins where the question ends, and the space before its answer is its own.
            return length if length == len(prompt) and not literal[length:].strip() else None
        if length == len(prompt) or (length == len(literal) and not contents.behind):
            return length
        # Only a part is shared: a header without what the prompt adds to it. It ends with a mark or a line.
        length = self._boundary(literal, length)
        return length if length >= self._shared(plain.literals[-1], literal) + self._role_end else None

    def _begin_by_header(self, literal: str) -> int | None:
        if not self._header or literal.count(self._header) != 1:
            return None
        return literal.index(self._header) + len(self._header)

    def _end(self, whole: Signed, render: SignedRender, turn: int, messages: int, last: int, contents: Contents) -> int:
        """How far the text after a turn's last content belongs to the turn: to its end mark."""
        literal = whole.literals[last + 1]
        length = len(literal)
        if turn + 1 < messages or last + 1 < len(whole.signs):
            try:
                until = render(turn + 1, False)
            except TemplateFailed:
                until = Signed([""], [])
            _check_once(until, turn, contents)
            if until.last(contents.roots) == contents.roots[whole.signs[last]]:
                length = self._shared(until.literals[-1], literal)
                length = self._other_mark(until.literals[-1], literal, length)
            elif mark := self._marks.search(literal):
                length = mark.end()
            else:
                raise TurnNotFound("no end mark is found after the turn")
        if stop := self._stops.search(literal, 0, length):
            return stop.end()
        marks = list(self._marks.finditer(literal, 0, length))
        if marks and not literal[marks[-1].end() : length].strip():
            return marks[-1].end()
        return length

    def _other_mark(self, until: str, literal: str, length: int) -> int:
        """Take the mark in where the last turn of a conversation ends with another one than those before."""
        mark = self._marks.match(literal, length)
        if mark and mark[0] == self._opening:
            return length
        if mark and self._marks.match(until, length) and not self._marks.search(literal, 0, length):
            return mark.end()
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


def _check_once(signed: Signed, turn: int, contents: Contents) -> None:
    """Refuse a turn of which a part stands twice in the text: which one the model writes is not known."""
    origins = [contents.origins[sign] for sign in signed.signs]
    for at, sign in enumerate(signed.signs):
        if contents.owners[sign] == turn and any(overlap(origins[at], o) for i, o in enumerate(origins) if i != at):
            raise TurnNotFound("the template writes a part of the turn twice")


_Block = TypeVar("_Block")


def choose_blocks(blocks: list[_Block], messages: Sequence[Message], turns: Sequence[int]) -> list[_Block]:
    """Choose the generation blocks of some turns. Raises TurnNotFound where they cannot be told apart."""
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if list(turns) == replies:
        return blocks
    if len(blocks) != len(replies):
        raise TurnNotFound("the template's generation blocks are not one for each assistant turn")
    return [block for block, reply in zip(blocks, replies) if reply in turns]


def _generation_prompt(template: ChatTemplate) -> str:
    """What the template adds after one question; empty if it adds nothing."""
    question = [{"role": "user", "content": "q"}]
    try:
        prompted, plain = template.render(question, None, True), template.render(question, None)
    except TemplateFailed:
        return ""
    return prompted[len(plain) :] if prompted.startswith(plain) else prompted
