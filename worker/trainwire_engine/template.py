"""Renders chat templates with Jinja alone, under the rules that transformers documents for them."""

from __future__ import annotations

import contextlib
import json
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

Message = dict[str, Any]
Span = tuple[int, int]

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_tracking: ContextVar[bool] = ContextVar("tracking", default=False)

# Generation blocks are bracketed while rendering and the brackets are taken out afterwards: positions then hold
# also where a template collects its text in a variable first. Noncharacters cannot come from a JSON text's author
# by accident; a row that has them is not tracked.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
MARKS = re.compile(f"([{OPEN}{CLOSE}])")


class TemplateFailed(Exception):
    """A template refused a conversation or broke on it: its own message, and the template's line if known."""

    def __init__(self, message: str, line: int | None) -> None:
        super().__init__(message)
        self.message = message
        self.line = line


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`: what a template says the model writes."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        text: str = caller()
        return OPEN + text + CLOSE if _tracking.get() else text


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`, without the escapes for HTML that Jinja's own has."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Namespace(jinja2.utils.Namespace):
    """A namespace that keeps templates away from Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not store {name!r}")


class _Dict:
    """`dict(...)` for templates, without the class itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


def chat_environment(now: datetime | None = None) -> jinja2.Environment:
    """The sandbox that chat templates run in. `now` is the time that `strftime_now` tells."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda form: (now or datetime.now()).strftime(form),
        dict=_Dict(),
        namespace=_Namespace,
    )
    return environment


class ChatTemplate:
    """Turns messages into the text that a model was made to read.

    `variables` are what the template sees beside the messages: the special tokens and the config's
    `chat_template_args`. `now` is the time that `strftime_now` tells. Raises TemplateFailed if `source` does not
    compile.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], now: datetime | None = None) -> None:
        self.source = source
        self.variables = dict(variables)
        self.now = now
        self.tells_time = "strftime_now" in source
        self.has_generation_marks = bool(_MARKER.search(source))
        try:
            self._template = chat_environment(now).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateFailed(error.message or "syntax error", error.lineno) from None
        except (SyntaxError, RecursionError) as error:
            # Jinja lets some through, such as a break inside a macro, to the compiler of Python.
            raise TemplateFailed(str(error) or "syntax error", None) from None

    def context(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, add_generation_prompt: bool
    ) -> dict[str, Any]:
        """All that the template sees."""
        return {
            **self.variables,
            "messages": messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, add_generation_prompt: bool = False
    ) -> str:
        """Render a conversation as it stands. Raises TemplateFailed."""
        try:
            return self._template.render(self.context(messages, tools, add_generation_prompt))
        except RecursionError:
            raise TemplateFailed("the template recurses without an end", None) from None
        except Exception as error:
            raise TemplateFailed(_words(error), _template_line(error)) from None

    def render_marked(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> tuple[str, list[Span]]:
        """Render a conversation, and give the spans of its generation blocks in order."""
        with tracking():
            marked = self.render(messages, tools)
        text: list[str] = []
        spans: list[Span] = []
        at = start = depth = 0
        for piece in MARKS.split(marked):
            if piece == OPEN:
                start = start if depth else at
                depth += 1
            elif piece == CLOSE:
                depth -= 1
                if not depth:
                    spans.append((start, at))
            else:
                text.append(piece)
                at += len(piece)
        return "".join(text), spans


@contextlib.contextmanager
def tracking() -> Iterator[None]:
    """Have generation blocks bracketed by OPEN and CLOSE in what is rendered meanwhile."""
    token = _tracking.set(True)
    try:
        yield
    finally:
        _tracking.reset(token)


def _words(error: Exception) -> str:
    if isinstance(error, jinja2.TemplateError):
        return error.message or type(error).__name__
    return f"{type(error).__name__}: {error}"


def _template_line(error: Exception) -> int | None:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return lines[-1] if lines else None
