"""Renders conversations and finds their turns; what was learnt from one serves all others of the same structure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from trainwire_engine.data.recorder import SIGN, Untraceable, sign_text
from trainwire_engine.data.recording import Recording, record
from trainwire_engine.data.signs import outline, sources_of, split, with_contents
from trainwire_engine.data.traced_template import TracedTemplate
from trainwire_engine.data.turns import Contents, Signed, TurnFinder, TurnNotFound, choose_blocks
from trainwire_engine.template import MARKS, ChatTemplate, Message, Span, TemplateFailed
from trainwire_protocol.errors import Internal

_STRUCTURES = 4096
_PER_STRUCTURE = 16
_CHECKED_EVERY = 256

Key = tuple[Any, ...]


class Conversations:
    """Renders conversations under one template, and says where the turns to be trained stand in the text.

    `marks` are the texts of the tokenizer's added tokens, `stops` those of them that end a generation.
    """

    def __init__(self, template: ChatTemplate, marks: Sequence[str], stops: Sequence[str] = ()) -> None:
        self._template = template
        self._finder = TurnFinder(template, marks, stops)
        self._kept: dict[Key, list[Recording]] = {}
        self._constant = template.source + repr(template.variables)
        try:
            self._traced: TracedTemplate | None = TracedTemplate(template)
        except Untraceable:
            self._traced = None

    def __call__(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, turns: Sequence[int]
    ) -> tuple[str, list[Span]]:
        """Render a conversation: its text, and the spans of the turns (indices of messages), in order.

        Raises TemplateFailed, or TurnNotFound if it is not certain where a turn stands.
        """
        contents, rest = outline(messages)
        key = (*rest, orjson.dumps(tools) if tools else None, *turns)
        kept = self._kept.get(key, [])
        for recording in kept:
            replayed = recording.replay(contents)
            if replayed is not None:
                recording.uses += 1
                if _is_checked(recording.uses) and self._template.render(messages, tools) != replayed[0]:
                    raise Internal("A chat template was followed wrongly: its text differs from what it renders.")
                return replayed
        text = self._template.render(messages, tools)
        room = len(kept) < _PER_STRUCTURE and (len(self._kept) < _STRUCTURES or key in self._kept)
        # Turns are found in the same way whether there is room or not: masks depend on the row alone.
        if self._traced is not None and (room or turns) and not self._has_signs(messages, tools):
            new = record(self._traced, self._finder, messages, tools, turns, sources_of(messages))
            replayed = new.replay(contents) if new else None
            if new is not None and replayed is not None and replayed[0] == text:
                if room:
                    self._kept.setdefault(key, []).append(new)
                return replayed
        return text, self._found(text, messages, tools, turns) if turns else []

    def _has_signs(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> bool:
        """Whether a text that is no content looks like a sign or a bracket, and so would be taken for one."""
        bare = [with_contents(0, message, lambda *_: "") for message in messages]
        around = orjson.dumps([bare, tools]).decode() + self._constant
        return bool(SIGN.search(around) or MARKS.search(around))

    def _found(
        self, text: str, messages: Sequence[Message], tools: Sequence[Any] | None, turns: Sequence[int]
    ) -> list[Span]:
        """Find turns where the template cannot be followed: by its own marks, or by signs behind the contents."""
        if self._template.has_generation_marks:
            if MARKS.search(text):
                raise TurnNotFound("the text has characters that are reserved for generation blocks")
            _, blocks = self._template.render_marked(messages, tools)
            if blocks:
                return choose_blocks(blocks, messages, turns)
        if SIGN.search(text):
            raise TurnNotFound("the text has words that are reserved for finding turns")
        for roles in (None, ("assistant",)):
            try:
                spans = self._by_signs(text, messages, tools, turns, roles)
            except (TemplateFailed, TurnNotFound):
                continue
            if spans is not None:
                return spans
        raise TurnNotFound("the template changes the text around a turn in a way that hides where it begins or ends")

    def _by_signs(
        self,
        text: str,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        turns: Sequence[int],
        roles: tuple[str, ...] | None,
    ) -> list[Span] | None:
        owners: list[int] = []
        kinds: list[str] = []

        def sign(index: int, kind: str, content: str) -> str:
            body = content.rstrip()
            if not body:
                return content
            owners.append(index)
            kinds.append(kind)
            return body + sign_text(len(owners) - 1) + content[len(body) :]

        signed = [
            with_contents(index, message, sign) if roles is None or message["role"] in roles else message
            for index, message in enumerate(messages)
        ]

        def render(count: int, prompt: bool) -> Signed:
            return split(self._template.render(signed[:count], tools, prompt))

        whole = render(len(messages), False)
        if "".join(whole.literals) != text:
            return None
        numbers = range(len(owners))
        contents = Contents(owners, kinds, numbers, [frozenset([(n, ())]) for n in numbers], behind=True)
        found = self._finder.find(whole, render, len(messages), turns, contents)
        replayed = Recording(whole, [found[turn] for turn in sorted(found)], []).replay([""] * len(owners))
        return None if replayed is None else replayed[1]


def _is_checked(uses: int) -> bool:
    """The first uses of a recording are checked often, the later ones now and then."""
    return uses & (uses - 1) == 0 or uses % _CHECKED_EVERY == 0
