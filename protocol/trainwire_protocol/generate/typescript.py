"""TypeScript declarations of every message, command, result and of the config, made from the JSON Schema."""

from typing import Any

from ..commands import COMMANDS
from ..results import RESULTS
from ..schema import Schema, definition_name

_HEAD = "// Generated from the protocol's types by `make generate`; changes here are lost.\n"
LINE_FIELDS = ("truncated", "more", "non_finite")
EVENT_FIELDS = ("seq", "ts", "cause", "replay")
_WORDS = {"integer": "number", "number": "number", "string": "string", "boolean": "boolean", "null": "null"}


def typescript(schema: Schema) -> str:
    """Write the declarations of a schema's definitions."""
    definitions: dict[str, Schema] = schema["$defs"]
    example = definitions["PausedEvent"]
    line = {key: example["properties"][key] for key in LINE_FIELDS}
    event = {key: example["properties"][key] for key in EVENT_FIELDS}
    parts = [
        _HEAD,
        f"export type ProtocolVersion = {schema['x-protocol']};\n",
        _interface("LineBase", {"description": "What any printed line may carry.", "properties": line}),
        _interface(
            "EventBase",
            {"description": "What any event may carry.", "properties": event, "required": ["ts"]},
            " extends LineBase",
        ),
    ]
    for name, definition in definitions.items():
        if name not in ("Response", "Command", "Message", "Event", "Word", "ErrorCode"):
            parts.append(_interface(name, definition))
    parts.append(_error_code(definitions["ErrorCode"]))
    parts.append(_union("Event", definitions["Event"]))
    parts.append(_union("Message", definitions["Message"]))
    parts.append(_union("Command", definitions["Command"]))
    parts.append(_responses(definitions["Response"]))
    return "\n".join(parts)


def _comment(text: str | None, indent: str = "") -> str:
    return f"{indent}/** {text} */\n" if text else ""


def _interface(name: str, definition: Schema, extends: str = "") -> str:
    properties = definition["properties"]
    if not extends and all(key in properties for key in ("type", *LINE_FIELDS)):
        inherited: tuple[str, ...] = LINE_FIELDS
        extends = " extends LineBase"
        if all(key in properties for key in EVENT_FIELDS):
            inherited += EVENT_FIELDS
            extends = " extends EventBase"
        properties = {key: field for key, field in properties.items() if key not in inherited}
    lines = [_comment(definition.get("description")), f"export interface {name}{extends} {{\n"]
    required = definition.get("required", ())
    for key, field in properties.items():
        mark = "" if key in required else "?"
        lines.append(_comment(_describe(field), "  ") + f"  {key}{mark}: {_type(field)};\n")
    return "".join(lines) + "}\n"


def _describe(field: Schema) -> str | None:
    """Give a field's description, its range and its default in one line."""
    inner = [field, *field.get("anyOf", ())]
    parts = [part["description"] for part in inner if part.get("description")][:1]
    for part in inner:
        low, high = part.get("minimum", part.get("exclusiveMinimum")), part.get("maximum", part.get("exclusiveMaximum"))
        if "x-settable" in field and (low is not None or high is not None):
            above = "above " if "exclusiveMinimum" in part else "from "
            parts.append(" ".join(filter(None, [None if low is None else f"{above}{low}", _upper(part, high)])))
            break
    if "default" in field and field["default"] is not None:
        parts.append(f"default {_literal(field['default'])}")
    elif "x-computed-default" in field:
        parts.append(f"default: {field['x-computed-default']}")
    return "; ".join(parts).replace("*/", "* /") or None


def _upper(part: Schema, high: Any) -> str | None:
    if high is None or high == 2**53 - 1:
        return None
    return f"{'below' if 'exclusiveMaximum' in part else 'to'} {high}"


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _type(field: Schema) -> str:
    """Give the TypeScript type of a schema."""
    if "$ref" in field:
        return str(field["$ref"]).rsplit("/", 1)[-1]
    if "const" in field:
        return _literal(field["const"])
    if "enum" in field:
        return " | ".join(_literal(value) for value in field["enum"])
    if "anyOf" in field:
        return " | ".join(dict.fromkeys(_type(choice) for choice in field["anyOf"]))
    if field.get("type") == "array":
        item = _type(field["items"])
        return f"({item})[]" if " | " in item else f"{item}[]"
    if field.get("type") == "object":
        value = field.get("additionalProperties")
        return f"{{ [key: string]: {_type(value) if isinstance(value, dict) else 'unknown'} }}"
    return _WORDS.get(field.get("type", ""), "unknown")


def _error_code(definition: Schema) -> str:
    known = "\n".join(f'  | "{code}"' for code in definition["x-known"])
    text = _comment(definition["description"]) + f"export type ErrorCode =\n{known}\n  | (string & {{}});\n"
    return (
        text
        + "\n"
        + _comment("Exit code of the worker by the error that ended the run.")
        + (
            "export interface ExitCodes {\n"
            + "".join(f"  {code}: {status};\n" for code, status in definition["x-exit-codes"].items())
            + "}\n"
        )
    )


def _union(name: str, definition: Schema) -> str:
    choices = "\n".join(f"  | {_type(choice)}" for choice in definition["oneOf"])
    return _comment(definition["description"]) + f"export type {name} =\n{choices};\n"


def _responses(definition: Schema) -> str:
    """Write the response as a union, so that `ok` and `cmd` tell the type of `result`."""
    results = "".join(f"  {cmd}: {kind.__name__};\n" for cmd, kind in RESULTS.items())
    commands = "".join(f"  {cmd}: {definition_name(cmd, 'Command')};\n" for cmd in COMMANDS)
    shared = {k: v for k, v in definition["properties"].items() if k not in ("cmd", "ok", "result", "error")}
    base = _interface("ResponseBase", {"properties": shared, "required": definition["required"]})
    return f"""/** Commands by name. */
export interface Commands {{
{commands}}}

/** Results by the command's name. */
export interface Results {{
{results}}}

{base}
export interface OkResponse<C extends keyof Results> extends ResponseBase {{
  cmd: C;
  ok: true;
  result: Results[C];
}}

export interface ErrorResponse extends ResponseBase {{
  cmd: string | null;
  ok: false;
  error: ErrorBody;
}}

{_comment(definition["description"])}export type Response =
  | {{ [C in keyof Results]: OkResponse<C> }}[keyof Results]
  | ErrorResponse;
"""
