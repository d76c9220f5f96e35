"""The tokenizer of a model folder and its chat template, read without transformers where a tokenizer.json exists."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from functools import cached_property
from pathlib import Path
from typing import Any

from trainwire_engine.messages import MessageForm
from trainwire_engine.template import ChatTemplate, Message, TemplateFailed
from trainwire_engine.tokenizer_folder import chosen_template, model_eos_ids, read_backend, read_json, read_templates
from trainwire_protocol.errors import ConfigInvalid

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
)
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to token ids and back, and messages to text.

    `backend` is the `tokenizers.Tokenizer`, without truncation, padding and post-processing: what a row needs at
    its ends is written by the template, or is `text_prefix` and `eos_id` for rows of plain text. `eos_ids` end a
    generation; `eos_id`, `bos_id` may be None; `pad_id` always is an id, and never a trained one. `template` is
    None for models without one.
    """

    def __init__(
        self,
        backend: Any,
        settings: Mapping[str, Any],
        templates: Mapping[str, str],
        *,
        chat_template_args: Mapping[str, Any] | None = None,
        eos_ids: Sequence[int] = (),
        folder: Path | None = None,
        now: datetime | None = None,
        recipe: Mapping[str, Any] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.text_prefix = _text_prefix(backend, settings)
        # It only adds tokens that are not wanted here, and moves the offsets of tokens that begin with a space.
        backend.post_processor = None
        self.backend = backend
        self.folder = folder
        self.recipe = recipe
        self.special_tokens = {name: text for name in _NAMED if (text := _token_text(settings.get(name)))}
        self.bos_id = self._id("bos_token")
        own_eos = self._id("eos_token")
        self.eos_ids = frozenset([*eos_ids, *([] if own_eos is None else [own_eos])])
        self.eos_id: int | None = own_eos if own_eos is not None else next(iter(eos_ids), None)
        if self.eos_id is not None:
            self.special_tokens.setdefault("eos_token", backend.id_to_token(self.eos_id) or "")
        pad = self._id("pad_token")
        self.pad_id: int = next((i for i in (pad, self.eos_id) if i is not None), 0)
        self.now = now or datetime.combine(date.today(), time())
        variables = {**self.special_tokens, **(chat_template_args or {})}
        self.template_sources = dict(templates)
        self._templates = {name: _compile(source, variables, self.now) for name, source in templates.items()}
        self._forms = {name: MessageForm(template) for name, template in self._templates.items()}

    @classmethod
    def from_folder(
        cls,
        path: str | Path,
        chat_template: str | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> Tokenizer:
        """Read the tokenizer of a model folder.

        `chat_template` replaces the folder's own: a template's text, a file that holds one, or the name of one of
        the folder's templates. `now` is the time that a template may ask for, else the day's beginning: a run
        that is resumed on another day gives the first day's, so that its rows stay the same. Raises ModelLoadFailed
        or ConfigInvalid.
        """
        folder = Path(path)
        settings = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
        templates = read_templates(folder, settings)
        if chat_template:
            templates = {"default": chosen_template(chat_template, templates)}
        return cls(
            read_backend(folder, settings),
            settings,
            templates,
            chat_template_args=chat_template_args,
            eos_ids=model_eos_ids(folder),
            folder=folder,
            now=now,
            recipe={
                "path": str(folder),
                "chat_template": chat_template,
                "chat_template_args": dict(chat_template_args or {}),
                "now": now.isoformat() if now else None,
            },
        )

    @classmethod
    def from_recipe(cls, recipe: Mapping[str, Any]) -> Tokenizer:
        """Make the tokenizer again that another process has: `recipe` is that one's."""
        now = recipe["now"] and datetime.fromisoformat(recipe["now"])
        return cls.from_folder(recipe["path"], recipe["chat_template"], recipe["chat_template_args"], now)

    def template_for(self, tools: Any) -> tuple[ChatTemplate, MessageForm]:
        """Give the template that a conversation with or without tools uses. Raises TemplateFailed without one."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise TemplateFailed("the tokenizer has no chat template", None)
        return self._templates[name], self._forms[name]

    @property
    def has_template(self) -> bool:
        """Whether messages can be rendered."""
        return "default" in self._templates

    @property
    def tells_time(self) -> bool:
        """Whether the text of a conversation depends on `now`."""
        return any(template.tells_time for template in self._templates.values())

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, add_generation_prompt: bool = False
    ) -> str:
        """Write messages as the model reads them. Raises TemplateFailed."""
        template, form = self.template_for(tools)
        return template.render(form(messages), tools, add_generation_prompt)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; special tokens count only where the text has them."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        text: str = self.backend.decode([int(i) for i in ids], skip_special_tokens=False)
        return text

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer's files and the template in use, so that the folder works with mlx-lm."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        if self.folder is not None:
            for name in _FILES:
                if (self.folder / name).is_file():
                    shutil.copyfile(self.folder / name, target / name)
        if not (target / "tokenizer.json").exists():
            self.backend.save(str(target / "tokenizer.json"))
        if "default" in self.template_sources:
            (target / "chat_template.jinja").write_text(self.template_sources["default"], encoding="utf-8")

    @cached_property
    def digest(self) -> str:
        """Changes with anything that changes tokens: vocabulary, templates, their arguments, the day they tell."""
        file = self.folder / "tokenizer.json" if self.folder else None
        content = file.read_bytes() if file and file.is_file() else self.backend.to_str().encode()
        parts: list[Any] = [hashlib.blake2b(content).hexdigest(), self.marks, self.text_prefix, self.eos_id]
        for name, template in sorted(self._templates.items()):
            parts += [name, template.source, sorted((k, repr(v)) for k, v in template.variables.items())]
        if self.tells_time:
            parts.append(self.now.isoformat())
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    @cached_property
    def marks(self) -> tuple[str, ...]:
        """The texts of all added tokens: what no turn boundary may cut through."""
        return tuple(token.content for token in self.backend.get_added_tokens_decoder().values())

    @cached_property
    def stops(self) -> tuple[str, ...]:
        """The texts of the added tokens that end a generation."""
        added = self.backend.get_added_tokens_decoder()
        return tuple(added[index].content for index in sorted(self.eos_ids) if index in added)

    def _id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)


def _compile(source: str, variables: Mapping[str, Any], now: datetime) -> ChatTemplate:
    try:
        return ChatTemplate(source, variables, now)
    except TemplateFailed as error:
        where = f" in line {error.line}" if error.line else ""
        raise ConfigInvalid(
            f"The chat template does not compile{where}: {error.message}.", hint="Set chat_template to a working one."
        ) from None


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value if isinstance(value, str) else None


def _text_prefix(backend: Any, settings: Mapping[str, Any]) -> list[int]:
    """The ids that the tokenizer puts before a plain text, such as a begin-of-text mark."""
    with_marks = backend.encode("a", add_special_tokens=True).ids
    plain = backend.encode("a", add_special_tokens=False).ids
    starts = [i for i in range(len(with_marks)) if with_marks[i : i + len(plain)] == plain]
    prefix: list[int] = with_marks[: starts[0]] if starts else []
    add_bos = settings.get("add_bos_token")
    if add_bos is None:
        return prefix
    bos = backend.token_to_id(_token_text(settings.get("bos_token")) or "")
    return [bos] if add_bos and bos is not None else []
