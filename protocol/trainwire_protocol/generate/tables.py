"""The generated parts of the documents: tables of messages, commands, keys, codes, made from the types."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..commands import COMMANDS, WORDS
from ..config import FIELDS, ON_RESUME, SETTABLE, OnResume
from ..errors import BY_CODE
from ..events import EVENT_TYPES, TRANSPORT_TYPES, type_name
from ..known import FEATURES, LOG_CODES
from ..results import RESULTS
from ..schema import Schema, build_schema, definition_name
from . import examples

_MARKED = re.compile(r"(<!-- generated:([a-z-]+) -->\n).*?(<!-- end:\2 -->)", re.DOTALL)
ELSEWHERE = ("Config", "ResolvedConfig", "SettableValues", "ErrorCode")
"""Objects and texts that the page describes in another place than the other objects inside messages."""
_EVERY_EVENT = ("type", "seq", "ts", "cause", "replay", "truncated", "more", "non_finite")


_EVENT_NAMES = {definition_name(type_name(t), "Event"): type_name(t) for t in EVENT_TYPES}


def fill(document: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """Put the tables between their markers. Raises KeyError for a marker that no table belongs to."""
    return _MARKED.sub(lambda m: f"{m[1]}{tables[m[2]]()}{m[3]}", document)


def _target(field: Schema) -> str:
    """Give the name of the definition that a reference means."""
    return str(field["$ref"]).rsplit("/", 1)[-1]


def _references(value: Any) -> Iterator[str]:
    """Go through the names of the definitions that a schema refers to, in order."""
    if isinstance(value, dict):
        if "$ref" in value:
            yield _target(value)
        for part in value.values():
            yield from _references(part)
    elif isinstance(value, list):
        for part in value:
            yield from _references(part)


def _inner(definitions: Mapping[str, Schema]) -> list[str]:
    """Name the objects that occur inside messages, results and commands, each behind the one it occurs in."""
    outer = [*_EVENT_NAMES, *(definition_name(type_name(t), "") for t in TRANSPORT_TYPES)]
    outer += [definition_name(cmd, "Command") for cmd in COMMANDS] + [kind.__name__ for kind in RESULTS.values()]
    found: list[str] = []

    def visit(name: str) -> None:
        for inner in _references(definitions[name]):
            if inner not in outer and inner not in ELSEWHERE and inner not in found:
                found.append(inner)
                visit(inner)

    for name in outer:
        visit(name)
    return found


def _words(field: Schema) -> str:
    """Say a field's type in a few words."""
    if "$ref" in field:
        name = _target(field)
        return f"the event `{_EVENT_NAMES[name]}`" if name in _EVENT_NAMES else name
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_words(choice) for choice in field["anyOf"]))
    if field.get("type") == "array":
        return f"list of {_words(field['items'])}"
    if field.get("type") == "object":
        value = field.get("additionalProperties")
        return f"object of {_words(value)}" if isinstance(value, dict) else "object"
    kind = str(field.get("type", "any"))
    bounds = []
    for bound, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<")):
        if bound in field and abs(field[bound]) != 2**53 - 1 and (field[bound] != 0 or kind != "integer"):
            bounds.append(f"{sign} {field[bound]}")
    if "pattern" in field:
        bounds.append("`" + field["pattern"].replace("|", "\\|") + "`")
    return " ".join([kind, *bounds])


def _description(field: Schema) -> str:
    for part in (field, *field.get("anyOf", ())):
        if part.get("description"):
            return str(part["description"])
    return ""


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def _fields(definition: Schema, leave_out: tuple[str, ...]) -> list[tuple[str, ...]]:
    required = definition.get("required", ())
    return [
        (f"`{key}`" + ("" if key in required else " ?"), _words(field), _description(field))
        for key, field in definition["properties"].items()
        if key not in leave_out
    ]


def _message_tables(names: list[tuple[str, str]], leave_out: tuple[str, ...]) -> str:
    definitions, shown = build_schema()["$defs"], examples.messages()
    parts = []
    for wire_name, name in names:
        definition = definitions[name]
        parts.append(f"#### `{wire_name}`\n\n{definition['description']}\n\n")
        rows = _fields(definition, leave_out)
        parts.append(_table(("field", "type", ""), rows) + "\n" if rows else "")
        parts.append(examples.block([shown[wire_name]]) + "\n")
    return "\n" + "".join(parts)


def events() -> str:
    """Every event with its fields."""
    names = [(type_name(t), definition_name(type_name(t), "Event")) for t in EVENT_TYPES]
    return _message_tables(names, _EVERY_EVENT)


def transport() -> str:
    """Every transport line with its fields."""
    return _message_tables(
        [(type_name(t), definition_name(type_name(t), "")) for t in TRANSPORT_TYPES],
        _EVERY_EVENT[:2] + _EVERY_EVENT[5:],
    )


def every_event() -> str:
    """The fields that any event may carry."""
    definition = build_schema()["$defs"]["PausedEvent"]
    definition["properties"]["type"] = {"type": "string", "description": "what kind of event it is"}
    return _table(("field", "type", ""), _fields(definition, ("step",)))


def commands() -> str:
    """Every command with its parameters and the fields of its result."""
    definitions, exchanges = build_schema()["$defs"], examples.exchanges()
    parts = []
    for cmd in COMMANDS:
        definition = definitions[definition_name(cmd, "Command")]
        parts.append(f"#### `{cmd}`\n\n{definition['description']}\n\n")
        parameters = []
        for key, field in definition["properties"].items():
            if key not in ("id", "cmd"):
                default = field.get("default")
                text = "required" if key in definition["required"] else "" if default is None else f"`{_json(default)}`"
                words = _words(field).removesuffix(" or null")
                parameters.append((f"`{key}`", words, text, _description(field)))
        if parameters:
            parts.append(_table(("parameter", "type", "default", ""), parameters) + "\n")
        result = definitions[RESULTS[cmd].__name__]
        parts.append(f"{result['description']}\n\n")
        parts.append(_table(("result", "type", ""), _fields(result, ())) + "\n")
        parts.append(examples.block(list(exchanges[cmd])) + "\n")
    return "\n" + "".join(parts)


def words() -> str:
    """The words that people type."""
    return _table(
        ("word", "command"), [(f"`{w}`" + (" `key=value`" if c == "set" else ""), f"`{c}`") for w, c in WORDS.items()]
    )


def settable() -> str:
    """The keys that `set` changes, with their ranges."""
    values = build_schema()["$defs"]["SettableValues"]["properties"]
    return _table(("key", "type", ""), [(f"`{k}`", _words(values[k]), values[k]["description"]) for k in SETTABLE])


def error_codes() -> str:
    """Every error code, when it is given, and the exit code where it ends the run."""
    rows = []
    for code, error in BY_CODE.items():
        text = " ".join((error.__doc__ or "").split())
        rows.append((f"`{code}`", text, "" if error.exit_code is None else str(error.exit_code)))
    return _table(("code", "meaning", "exit code"), rows)


def exit_codes() -> str:
    """Every exit code of the worker."""
    by_status: dict[int, list[str]] = {}
    for code, error in BY_CODE.items():
        if error.exit_code is not None:
            by_status.setdefault(error.exit_code, []).append(f"`{code}`")
    rows = [("0", "completed, or stopped because a client asked")]
    rows += [(str(s), ", ".join(codes)) for s, codes in by_status.items()]
    rows += [
        ("2", "wrong arguments; nothing was printed on stdout"),
        ("20", "the front end is gone, the state is saved"),
        ("21", "a signal, the state is saved"),
        ("129, 130, 143", "a second SIGHUP, SIGINT or SIGTERM: left at once"),
    ]
    return _table(("exit code", "meaning"), sorted(rows, key=lambda row: int(row[0].split(",")[0])))


def resume_keys() -> str:
    """What becomes of each key of the config when its value differs on a resume."""
    meanings = {
        OnResume.FREE: "the new value counts",
        OnResume.OVERRIDE: "refused, unless `resume_override` names the key",
        OnResume.FIXED: "refused",
    }
    rows = []
    for rule, meaning in meanings.items():
        rows.append((meaning, ", ".join(f"`{key}`" for key in FIELDS if ON_RESUME[key] is rule)))
    return _table(("on a resume", "keys"), rows)


def types() -> str:
    """The objects that occur inside messages and results."""
    definitions = build_schema()["$defs"]
    parts = []
    for name in _inner(definitions):
        definition = definitions[name]
        parts.append(f"#### {name}\n\n{definition['description']}\n\n")
        parts.append(_table(("field", "type", ""), _fields(definition, ())) + "\n")
    return "\n" + "".join(parts)


def log_codes() -> str:
    """The codes of `log` events."""
    return _table(("code", "when"), [(f"`{code}`", text) for code, text in LOG_CODES.items()])


def features() -> str:
    """What `hello.features` may name."""
    return _table(("feature", "what the worker can do"), [(f"`{name}`", text) for name, text in FEATURES.items()])


def _json(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


TABLES: dict[str, Callable[[], str]] = {
    "every-event": every_event,
    "events": events,
    "transport": transport,
    "commands": commands,
    "words": words,
    "settable": settable,
    "error-codes": error_codes,
    "exit-codes": exit_codes,
    "log-codes": log_codes,
    "features": features,
    "resume-keys": resume_keys,
    "types": types,
    "life": examples.life,
    "steering": examples.steering,
}
"""Every generated part by the name in its markers."""
