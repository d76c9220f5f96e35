"""Turns a parsed row into the text to tokenize and the spans of it that are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainwire_engine.data.conversations import Conversations
from trainwire_engine.data.endings import Endings
from trainwire_engine.data.problems import RowError
from trainwire_engine.data.rows import Chat, Text, Tokens
from trainwire_engine.data.turns import TurnNotFound
from trainwire_engine.messages import MessageForm
from trainwire_engine.template import ChatTemplate, Message, Span, TemplateFailed
from trainwire_engine.tokenizer import Tokenizer


class RowDropped(Exception):
    """A row that is well formed, but leaves nothing certain to train on; `reason` is a word for the report."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class Rendered:
    """Text with its trained spans in characters; `ends` adds the tokenizer's marks of a plain text."""

    text: str
    spans: list[Span]
    ends: bool = False


@dataclass
class _Templated:
    template: ChatTemplate
    form: MessageForm
    conversations: Conversations
    endings: Endings


@dataclass
class Renderer:
    """Renders rows under one tokenizer and one `train_on`; None stands for the default of each kind of row.

    `used` collects what was trained: the values of `train_on`, and `labels` of rows that say it themselves.
    `notices` are words for what a person should know.
    """

    tokenizer: Tokenizer
    train_on: str | None
    notices: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    _templates: dict[int, _Templated] = field(default_factory=dict)

    def __call__(self, example: Chat | Text | Tokens) -> Rendered | Tokens:
        """Render one example. Raises RowError or RowDropped."""
        if isinstance(example, Tokens):
            self.used.add("labels")
            return example
        plain = isinstance(example, Text) and example.completion_at is None
        self.used.add(self.train_on or ("all" if plain else "assistant"))
        if isinstance(example, Text):
            return self._text(example)
        return self._chat(example)

    def _text(self, example: Text) -> Rendered:
        start = example.completion_at or 0
        if self.train_on == "all":
            start = 0
        elif self.train_on is not None and example.completion_at is None:
            raise RowError(
                "text",
                f"plain text has no turns, so train_on = {self.train_on} trains none of it",
                "Set train_on = all.",
            )
        if not example.text[start:].strip():
            raise RowDropped("empty")
        if self.tokenizer.eos_id is None:
            self.notices.add("no_end_mark")
        return Rendered(example.text, [(start, len(example.text))], ends=True)

    def _chat(self, chat: Chat) -> Rendered:
        if not chat.messages:
            raise RowDropped("empty")
        try:
            kit = self._kit(chat)
            messages = kit.form(chat.messages)
            if any(message.get("tool_calls") for message in messages):
                if not kit.form.writes_tool_calls:
                    raise RowDropped("tool_calls_not_in_template")
                if kit.endings.open_call:
                    self.notices.add("no_end_of_tool_call")
            if kit.endings.open_turn:
                self.notices.add("no_end_of_turn")
            if chat.tools and not kit.form.writes_tools:
                self.notices.add("tools_not_in_template")
            if any("reasoning_content" in message for message in messages) and not kit.form.writes_reasoning:
                self.notices.add("reasoning_not_in_template")
            return self._render(kit, messages, chat)
        except TemplateFailed as error:
            where = f" (line {error.line} of the template)" if error.line else ""
            raise RowError("messages", f"the chat template refuses it: {error.message}{where}", _hint(error)) from None
        except TurnNotFound:
            raise RowDropped("turn_not_found") from None

    def _kit(self, chat: Chat) -> _Templated:
        template, form = self.tokenizer.template_for(chat.tools)
        kit = self._templates.get(id(template))
        if kit is None:
            conversations = Conversations(template, self.tokenizer.marks, self.tokenizer.stops)
            kit = _Templated(template, form, conversations, Endings(self.tokenizer, form, conversations))
            self._templates[id(template)] = kit
        return kit

    def _render(self, kit: _Templated, messages: list[Message], chat: Chat) -> Rendered:
        replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if self.train_on == "all":
            quiet = [i for i, train in enumerate(chat.train) if not train]
            if any(i not in replies for i in quiet):
                raise RowError("train", "with train_on = all, only assistant turns can be switched off")
            text, spans = kit.conversations(messages, chat.tools, _with_content(messages, quiet))
            return Rendered(text, _without(len(text), spans))
        if not replies:
            raise RowDropped("no_assistant_turn")
        turns = [i for i in (replies[-1:] if self.train_on == "last" else replies) if chat.train[i]]
        if not kit.template.has_generation_marks:
            turns = _with_content(messages, turns)
        return Rendered(*kit.conversations(messages, chat.tools, turns))


def _with_content(messages: Sequence[Message], turns: Sequence[int]) -> list[int]:
    """Leave out turns without a word: they would teach only to end at once."""
    return [i for i in turns if any(messages[i].get(k) for k in ("content", "reasoning_content", "tool_calls"))]


def _without(length: int, spans: Sequence[Span]) -> list[Span]:
    kept, at = [], 0
    for start, end in spans:
        kept.append((at, start))
        at = end
    return [*kept, (at, length)]


def _hint(error: TemplateFailed) -> str:
    if "no chat template" in error.message:
        return "Set chat_template to a template's text or file, or use rows of plain text."
    return "Change the row, or set chat_template to a template that takes it."
