"""A template that renders stand-ins, under a Jinja that lets nothing look at them without asking.

A template reaches a text by its methods and operators, by filters and tests, by functions, and as a key. The
stand-ins answer the first themselves; here is the rest. What is not surely safe raises Untraceable, and such a
template, or such a conversation, is rendered as it stands each time.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.runtime
import jinja2.utils
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from trainwire_engine.data.recorder import Recorder, Untraceable
from trainwire_engine.data.stand_in import StandIn, ask, is_plain, joined, plain
from trainwire_engine.template import ChatTemplate, Message, chat_environment, to_json

# Filters that only call methods of their first argument, or look at lists and numbers alone.
_ASKING = {
    *("trim", "length", "count", "string", "list", "items", "first", "last", "upper", "lower", "capitalize"),
    *("replace", "selectattr", "rejectattr", "map", "dictsort"),
}
# Filters that look at a text by other ways, which is no matter with a role or a number.
_LOOKING = {"title", "int"}
_TESTS = {
    *("defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number", "boolean", "true"),
    *("false", "integer", "float", "callable", "odd", "even", "divisibleby", "lower", "upper"),
    *("eq", "equalto", "==", "ne", "!="),
}
# What may be called with contents among the arguments: it passes them on, or compares them.
_CARRIERS = (
    *(jinja2.runtime.Macro, jinja2.runtime.LoopContext, jinja2.utils.Cycler, dict, list, tuple),
    *(StandIn, jinja2.utils.Namespace, jinja2.ext.Extension),
)

# What Jinja adds to a call inside of a loop or a block: its variables, for functions that ask for the context.
_SURROUNDINGS = ("_loop_vars", "_block_vars")


class TracedTemplate:
    """A template that renders stand-ins. Raises Untraceable where it uses something that is not followed."""

    def __init__(self, template: ChatTemplate) -> None:
        self._context = template.context
        self._environment = environment = _environment(template)
        tree = environment.parse(template.source)
        _check(tree)
        tree = _Rewritten().visit(tree)
        tree.set_environment(environment)
        code = environment.compile(tree)
        self._root = jinja2.Template.from_code(environment, code, environment.make_globals(None)).root_render_func

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None, add_generation_prompt: bool) -> str:
        """Render; the result has signs where contents are. Raises Untraceable, and what the template raises."""
        environment = self._environment
        context = jinja2.runtime.new_context(
            environment, None, {}, self._context(messages, tools, add_generation_prompt), False, environment.globals
        )
        return plain(joined(self._root(context)))


def _environment(template: ChatTemplate) -> jinja2.Environment:
    environment: Any = chat_environment(template.now)
    given, call, binop, getitem = environment.filters, environment.call, environment.call_binop, environment.getitem
    environment.concat = joined
    environment.filters = {
        **{name: _first_only(given[name]) for name in _ASKING},
        **{name: _none(given[name]) for name in _LOOKING},
        **dict.fromkeys(("default", "d"), given["default"]),
        "tojson": _to_json,
        "join": _join_filter,
        "in": _contains,
    }
    environment.tests = {**{name: environment.tests[name] for name in _TESTS}, "in": lambda x, seq: _contains(seq, x)}
    environment.intercepted_binops = frozenset("%")
    known_functions = [environment.globals[name] for name in ("dict", "namespace", "raise_exception")]

    def guarded_call(context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(function, "__self__", function)
        known = isinstance(owner, _CARRIERS) or owner in known_functions
        given = [value for name, value in kwargs.items() if name not in _SURROUNDINGS]
        if not known and not is_plain([*args, *given]):
            raise Untraceable("a function")
        return call(context, function, *args, **kwargs)

    def guarded_binop(context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, str) and not is_plain(right):
            raise Untraceable(operator)
        return binop(context, operator, left, right)

    def guarded_getitem(holder: Any, key: Any) -> Any:
        if isinstance(key, StandIn):
            raise Untraceable("a key")
        return getitem(holder, key)

    environment.call, environment.call_binop, environment.getitem = guarded_call, guarded_binop, guarded_getitem
    return environment


def _first_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a filter have a content as its value, not among its other arguments."""
    return _guarded(function, lambda value, rest: is_plain(rest))


def _none(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a filter have no content at all."""
    return _guarded(function, lambda value, rest: is_plain((value, rest)))


def _guarded(function: Callable[..., Any], allowed: Callable[[Any, Any], bool]) -> Callable[..., Any]:
    before = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)  # it also takes over what Jinja passes beside the value
    def guarded(*args: Any, **kwargs: Any) -> Any:
        value, rest = args[before], args[before + 1 :]
        if not allowed(value, (rest, kwargs)):
            raise Untraceable("a filter")
        return function(*args, **kwargs)

    return guarded


def _contains(container: Any, item: Any) -> bool:
    """`item in container`: a text would look for a content without asking it."""
    if isinstance(item, StandIn) and isinstance(container, str) and not isinstance(container, StandIn):
        raise Untraceable("in")
    return item in container


def _join_filter(value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    if attribute is not None:
        raise Untraceable("join")
    return joined([part for item in value for part in (d, str(item))][1:])


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    recorders: list[Recorder] = []

    def signed(item: Any) -> Any:
        if isinstance(item, StandIn):
            recorders.append(item._recorder)
            return plain(ask(item, "json", (ensure_ascii,)))
        if isinstance(item, dict):
            return {key: signed(entry) for key, entry in item.items()}
        if isinstance(item, types.GeneratorType):
            raise Untraceable("tojson")
        return [signed(entry) for entry in item] if isinstance(item, list | tuple) else item

    text = to_json(signed(value), ensure_ascii, **options)
    return StandIn(text, recorders[0]) if recorders else text


class _Rewritten(NodeTransformer):
    """Puts filters in place of `~` and `in`, which are out of reach of the environment."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter("join", nodes.List(node.nodes, lineno=node.lineno), [])

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        operators = [operand.op for operand in node.ops]
        if not {"in", "notin"} & set(operators):
            return node
        if len(operators) > 1:
            raise Untraceable("a chain of comparisons")
        found = _filter("in", node.ops[0].expr, [node.expr])
        return found if operators == ["in"] else nodes.Not(found, lineno=node.lineno)


def _filter(name: str, value: nodes.Expr, args: list[nodes.Expr]) -> nodes.Filter:
    return nodes.Filter(value, name, args, [], None, None, lineno=value.lineno)


def _check(tree: nodes.Template) -> None:
    for node in tree.find_all(nodes.Filter):
        if node.name not in {*_ASKING, *_LOOKING, "default", "d", "tojson", "join"}:
            raise Untraceable(node.name)
    for test in tree.find_all(nodes.Test):
        if test.name not in {*_TESTS, "in"}:
            raise Untraceable(test.name)
    if next(tree.find_all(nodes.EvalContextModifier), None) or next(
        tree.find_all(nodes.ScopedEvalContextModifier), None
    ):
        raise Untraceable("autoescape")
