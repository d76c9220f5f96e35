"""Renders a template with stand-ins for the contents, and writes down all that the template asks about them.

Two conversations of the same structure whose contents give the same answers are rendered alike, so that the text of
the second follows from the first without running the template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from trainwire_engine.template import ChatTemplate, Message, chat_environment, to_json

# Letters and digits alone: no filter, escape or strip of a template changes them.
SIGN = re.compile(r"Qz([0-9]+)zQw7")

# The methods of a text: those that give a text, a fact, or a list of texts, and those that are not followed.
_TEXTS = "strip lstrip rstrip upper lower title capitalize replace removeprefix removesuffix"
_FACTS = "startswith endswith __contains__ find rfind count __len__ isdigit isalpha isspace isupper islower"
_LISTS = "split rsplit splitlines partition rpartition"
_LOST = (
    "__mod__ __rmod__ __mul__ __rmul__ __format__ __repr__ __hash__ __lt__ __le__ __gt__ __ge__ __reversed__ format"
    " format_map join translate maketrans encode index rindex center ljust rjust zfill expandtabs casefold swapcase"
    " isalnum isascii isdecimal isidentifier isnumeric isprintable istitle"
)

# Filters that either call the methods above, or look at lists and numbers only.
_FILTERS = {
    *("trim", "tojson", "length", "count", "string", "list", "items", "first", "last", "upper", "lower", "title"),
    *("capitalize", "replace", "default", "d", "selectattr", "rejectattr", "map", "int", "join", "dictsort"),
}


class Untraceable(Exception):
    """The template does something with a content that is not followed."""


def sign_text(number: int) -> str:
    """What stands for the content of a number."""
    return f"Qz{number}zQw7"


Step = tuple[str, str, tuple[Any, ...], Any]
"""A text with signs, a method of it, the arguments; and the answer, or a Pick for a new sign."""


class Pick:
    """The result is a new content: all of it, or one entry of a list."""

    def __init__(self, entry: int | None) -> None:
        self.entry = entry


class Recorder:
    """Knows what each sign stands for, and keeps every question in `steps`, in order.

    `owners` and `kinds` say for each sign whose message it is from (None: from several) and what it was there.
    """

    def __init__(self, contents: Sequence[str], owners: Sequence[int], kinds: Sequence[str]) -> None:
        self.values = list(contents)
        self.owners: list[int | None] = list(owners)
        self.kinds = list(kinds)
        self.roots = list(range(len(contents)))
        self.steps: list[Step] = []
        self._asked: dict[Any, Any] = {}

    def ask(self, text: str, name: str, args: tuple[Any, ...]) -> Any:
        """Answer as the contents would, and keep the question."""
        if any(isinstance(arg, Traced) for arg in args):
            raise Untraceable(name)
        key = (text, name, *map(repr, args))
        if key not in self._asked:
            self._asked[key] = self._answer(text, name, args)
        return self._asked[key]

    def _answer(self, text: str, name: str, args: tuple[Any, ...]) -> Any:
        try:
            answer = apply(value_of(text, self.values), name, args)
        except (TypeError, ValueError, LookupError):
            raise Untraceable(name) from None
        if isinstance(answer, str):
            return self._derived(text, name, args, None, answer)
        if isinstance(answer, list | tuple):
            self.steps.append((text, name, args, len(answer)))
            return type(answer)([self._derived(text, name, args, at, part) for at, part in enumerate(answer)])
        self.steps.append((text, name, args, answer))
        return answer

    def _derived(self, text: str, name: str, args: tuple[Any, ...], entry: int | None, value: str) -> Traced:
        numbers = [int(n) for n in SIGN.findall(text)]
        owners = {self.owners[n] for n in numbers}
        self.steps.append((text, name, args, Pick(entry)))
        self.values.append(value)
        self.owners.append(owners.pop() if len(owners) == 1 else None)
        single = SIGN.fullmatch(text)
        self.kinds.append(self.kinds[numbers[0]] if single else "mixed")
        self.roots.append(self.roots[numbers[0]] if single else len(self.values) - 1)
        return Traced(sign_text(len(self.values) - 1), self)


def value_of(text: str, values: Sequence[str]) -> str:
    """Put the contents in the place of their signs."""
    return SIGN.sub(lambda sign: values[int(sign[1])], text)


def apply(value: str, name: str, args: tuple[Any, ...]) -> Any:
    """Call a method of a text."""
    if name == "json":
        return json.dumps(value, ensure_ascii=args[0])[1:-1]
    if name == "__bool__":
        return bool(value)
    return getattr(value, name)(*args)


class Traced(str):
    """A text with signs in it: whatever is asked of it is asked of the contents, by the recorder."""

    recorder: Recorder

    def __new__(cls, text: str, recorder: Recorder) -> Traced:
        self = super().__new__(cls, text)
        self.recorder = recorder
        return self

    def plain(self) -> str:
        """The text with its signs, as an ordinary one."""
        return str.__getitem__(self, slice(None))

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        return bool(self.recorder.ask(self.plain(), "__bool__", ()))

    def __add__(self, other: str) -> Traced:
        return Traced(str.__add__(self, other), self.recorder)

    def __radd__(self, other: str) -> Traced:
        return Traced(str.__add__(other, self), self.recorder)

    def __eq__(self, other: object) -> bool:
        return bool(self.recorder.ask(self.plain(), "__eq__", (other,))) if isinstance(other, str) else False

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __getitem__(self, place: Any) -> Traced:
        if not isinstance(place, int | slice):
            raise TypeError(f"a text has no {place!r}")
        return self.recorder.ask(self.plain(), "__getitem__", (place,))

    def __iter__(self) -> Iterator[str]:
        # Templates ask whether a content is iterable; that alone is no question about it.
        return _refuse_items()


def _refuse_items() -> Iterator[str]:
    raise Untraceable("iteration")
    yield


def _asked(name: str) -> Callable[..., Any]:
    def method(self: Traced, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            raise Untraceable(name)
        return self.recorder.ask(self.plain(), name, args)

    return method


def _lost(name: str) -> Callable[..., Any]:
    def method(self: Traced, *args: Any, **kwargs: Any) -> NoReturn:
        raise Untraceable(name)

    return method


for _name in f"{_TEXTS} {_FACTS} {_LISTS}".split():
    setattr(Traced, _name, _asked(_name))
for _name in _LOST.split():
    setattr(Traced, _name, _lost(_name))


def _join(pieces: Iterable[Any]) -> str:
    pieces = list(pieces)
    text = "".join(pieces)
    return next((Traced(text, piece.recorder) for piece in pieces if isinstance(piece, Traced)), text)


def _join_filter(value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    if attribute is not None:
        raise Untraceable("join")
    pieces = [str(item) for item in value]
    return _join([part for piece in pieces for part in (d, piece)][1:])


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    recorders: list[Recorder] = []

    def signed(item: Any) -> Any:
        if isinstance(item, Traced):
            recorders.append(item.recorder)
            return item.recorder.ask(item.plain(), "json", (ensure_ascii,)).plain()
        if isinstance(item, dict):
            return {key: signed(entry) for key, entry in item.items()}
        return [signed(entry) for entry in item] if isinstance(item, list | tuple) else item

    text = to_json(signed(value), ensure_ascii, **options)
    return Traced(text, recorders[0]) if recorders else text


class _Joins(NodeTransformer):
    """Puts a filter in place of `~`, which joins out of reach of the environment."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes, lineno=node.lineno), "join", [], [], None, None, lineno=node.lineno)


class TracedTemplate:
    """A template that renders stand-ins. Raises Untraceable where it uses something that is not followed."""

    def __init__(self, template: ChatTemplate) -> None:
        self._context = template.context
        environment = chat_environment(template.now)
        environment.concat = _join  # type: ignore[method-assign]
        environment.filters.update(tojson=_to_json, join=_join_filter)
        tree = environment.parse(template.source)
        _check(tree)
        _Joins().visit(tree)
        tree.set_environment(environment)
        code = environment.compile(tree)
        self._root = jinja2.Template.from_code(environment, code, environment.make_globals(None)).root_render_func
        self._environment = environment

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None, add_generation_prompt: bool) -> str:
        """Render; the result has signs where contents are. Raises Untraceable, and what the template raises."""
        template = self._environment
        context = jinja2.runtime.new_context(
            template, None, {}, self._context(messages, tools, add_generation_prompt), False, template.globals
        )
        text = _join(self._root(context))
        return text.plain() if isinstance(text, Traced) else text


def _check(tree: nodes.Template) -> None:
    for node in tree.find_all(nodes.Filter):
        if node.name not in _FILTERS:
            raise Untraceable(node.name)
    for compare in tree.find_all(nodes.Compare):
        # Python looks for the content in the text without asking the content.
        if any(op.op in ("in", "notin") and _is_text(op.expr) for op in compare.ops):
            raise Untraceable("in")
    for binary in tree.find_all(nodes.Mod):
        if _is_text(binary.left):
            raise Untraceable("%")
    for attribute in tree.find_all(nodes.Getattr):
        if attribute.attr in ("join", "format") and _is_text(attribute.node):
            raise Untraceable(attribute.attr)


def _is_text(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and isinstance(node.value, str)
