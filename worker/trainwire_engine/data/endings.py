"""Finds out whether a model would learn where its turns end, by two short conversations."""

from __future__ import annotations

import functools

from trainwire_engine.data.conversations import Conversations
from trainwire_engine.data.turns import TurnNotFound
from trainwire_engine.messages import MessageForm
from trainwire_engine.template import Message, TemplateFailed
from trainwire_engine.tokenizer import Tokenizer


class Endings:
    """Whether a template ends the assistant's turns with an added token that is trained.

    Some templates write nothing after a tool call, and some leave the end mark out of their generation blocks: the
    model then goes on where it should wait.
    """

    def __init__(self, tokenizer: Tokenizer, form: MessageForm, conversations: Conversations) -> None:
        self._marks = sorted(tokenizer.marks, key=len, reverse=True)
        self._stops = set(tokenizer.stops)
        self._form = form
        self._conversations = conversations

    @functools.cached_property
    def open_turn(self) -> bool:
        """Whether a turn of plain content has no end mark."""
        return None in self._plain

    @functools.cached_property
    def open_call(self) -> bool:
        """Whether a turn that calls a tool ends with none of the marks that end another turn or a generation."""
        return any(mark not in self._plain | self._stops for mark in self._last_marks(self._form.tool_turn, [1]))

    @functools.cached_property
    def _plain(self) -> set[str | None]:
        pair = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
        return self._last_marks([*pair, *pair], [1, 3])

    def _last_marks(self, messages: list[Message], turns: list[int]) -> set[str | None]:
        """The mark at the end of each of the turns, None for one without; nothing where they are not found."""
        try:
            text, spans = self._conversations(messages, None, turns)
        except (TemplateFailed, TurnNotFound):
            return set()
        ends = [text[start:end].rstrip() for start, end in spans]
        return {next((mark for mark in self._marks if end.endswith(mark)), None) for end in ends}
