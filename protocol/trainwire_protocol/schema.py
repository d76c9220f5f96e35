"""The JSON Schema of the protocol, made from the types: one document for messages, commands and the config."""

from typing import Any

import msgspec

from .commands import COMMANDS, WORDS
from .config import SETTABLE, Config
from .errors import BY_CODE
from .events import EVENT_TYPES, TRANSPORT_TYPES, type_name
from .known import FEATURES, LOG_CODES
from .limits import MAX_LINE_IN, MAX_LINE_OUT, MINOR, PROTOCOL
from .results import RESULTS

Schema = dict[str, Any]
_REF = "#/$defs/"


def definition_name(wire_name: str, suffix: str) -> str:
    """Name the definition of a message or a command: `epoch_end` becomes EpochEndEvent."""
    return "".join(part.capitalize() for part in wire_name.split("_")) + suffix


def build_schema() -> Schema:
    """Make the document (JSON Schema 2020-12).

    A line that a worker prints matches `$defs/Message`, a JSON line that it takes matches `$defs/Command`.
    """
    definitions = _definitions()
    events = [definition_name(type_name(t), "Event") for t in EVENT_TYPES]
    transport = [definition_name(type_name(t), "") for t in TRANSPORT_TYPES]
    commands = [definition_name(cmd, "Command") for cmd in COMMANDS]
    definitions["Event"] = _one_of("An event: a line with `ts`, and with `seq` if it is in the log.", events)
    definitions["Message"] = _one_of("Any line that a worker prints.", events + transport)
    definitions["Command"] = _one_of("Any JSON line that a worker takes.", commands)
    definitions["Word"] = {
        "description": "A line that people type instead of a command.",
        "type": "string",
        "pattern": "^(" + "|".join(word for word in WORDS if word != "SET") + "|SET [a-z_]+=.*)$",
    }
    definitions["ErrorCode"] = {
        "description": "Known error codes; readers treat another one as `internal`.",
        "type": "string",
        "x-known": sorted(BY_CODE),
        "x-exit-codes": {c: e.exit_code for c, e in sorted(BY_CODE.items()) if e.exit_code is not None},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:trainwire:protocol:{PROTOCOL}",
        "title": "trainwire protocol",
        "description": "Lines between a front end and a trainwire worker. Readers ignore unknown fields and types.",
        "x-protocol": PROTOCOL,
        "x-minor": MINOR,
        "x-limits": {"max_line_in": MAX_LINE_IN, "max_line_out": MAX_LINE_OUT},
        "anyOf": [{"$ref": _REF + "Message"}, {"$ref": _REF + "Command"}],
        "$defs": dict(sorted(definitions.items())),
    }


def _one_of(description: str, names: list[str]) -> Schema:
    return {"description": description, "oneOf": [{"$ref": _REF + name} for name in names]}


def _definitions() -> dict[str, Schema]:
    """Make every definition, under the names of the wire instead of the classes'."""
    types = [*EVENT_TYPES, *TRANSPORT_TYPES, *COMMANDS.values(), *RESULTS.values(), Config]
    _, made = msgspec.json.schema_components(types, ref_template=_REF + "{name}")
    names = {t.__name__: definition_name(type_name(t), "Event") for t in EVENT_TYPES}
    names |= {kind.__name__: definition_name(cmd, "Command") for cmd, kind in COMMANDS.items()}
    definitions: dict[str, Schema] = {names.get(n, n): _tidy(s, names) for n, s in made.items()}
    for name, schema in definitions.items():
        schema["title"] = name
        for tag in ("type", "cmd"):
            if len(schema["properties"].get(tag, {}).get("enum", ())) == 1:
                schema["properties"][tag] = {"const": schema["properties"][tag]["enum"][0]}
        if "const" in schema["properties"].get("type", {}):
            _finish_message(schema)
    definitions["Config"]["description"] = "Everything a run is told; null stands for a default that is computed."
    definitions["SettableValues"] = _settable(definitions["Config"])
    definitions["ResolvedConfig"] = _resolved(definitions["Config"])
    _replace(definitions["SetCommand"], "values", "SettableValues")
    for name in ("StartCommand", "ValidateCommand"):
        _replace(definitions[name], "config", "Config")
    _replace(definitions["InitEvent"], "config", "ResolvedConfig")
    definitions["LogEvent"]["properties"]["code"]["x-known"] = sorted(LOG_CODES)
    definitions["Hello"]["properties"]["features"]["items"]["x-known"] = sorted(FEATURES)
    for name in ("ErrorEvent", "ErrorBody"):
        _replace(definitions[name], "code", "ErrorCode")
    for name in ("ErrorBody", "ValidateResult"):
        fields = definitions[name]["properties"]
        fields |= {
            key: _without_null(field) for key, field in fields.items() if key not in definitions[name]["required"]
        }
    definitions["Response"]["allOf"] = [
        {
            "if": {"properties": {"cmd": {"const": cmd}, "ok": {"const": True}}, "required": ["cmd", "ok"]},
            "then": {"properties": {"result": {"$ref": _REF + kind.__name__}}, "required": ["result"]},
        }
        for cmd, kind in RESULTS.items()
    ] + [{"if": {"properties": {"ok": {"const": False}}}, "then": {"required": ["error"]}}]
    return definitions


def _tidy(schema: Any, names: dict[str, str]) -> Any:
    """Follow the renamed definitions, and put descriptions on one line."""
    if isinstance(schema, list):
        return [_tidy(part, names) for part in schema]
    if not isinstance(schema, dict):
        return schema
    tidy = {key: _tidy(value, names) for key, value in schema.items()}
    if isinstance(tidy.get("$ref"), str):
        name = tidy["$ref"].removeprefix(_REF)
        tidy["$ref"] = _REF + names.get(name, name)
    if isinstance(tidy.get("description"), str):
        tidy["description"] = " ".join(tidy["description"].split())
    return tidy


def _finish_message(schema: Schema) -> None:
    """Say of a printed line what its type cannot: `ts` is always there, and an absent field is no null."""
    properties: dict[str, Schema] = schema["properties"]
    if "ts" in properties and "seq" in properties:
        properties["ts"].pop("default", None)
        schema["required"].insert(1, "ts")
    for name, field in properties.items():
        if "default" in field and field["default"] is None:
            properties[name] = _without_null(field)


def _without_null(field: Schema) -> Schema:
    """Drop null from a field that is left out instead; a number may still be null, and `non_finite` names it."""
    field = {key: value for key, value in field.items() if key != "default"}
    choices = [c for c in field.get("anyOf", []) if c.get("type") != "null"]
    if any(choice.get("type") == "number" for choice in choices) or not choices:
        return field
    return _only(field)


def _only(field: Schema) -> Schema:
    """Drop null from the choices of a field."""
    choices = [c for c in field["anyOf"] if c.get("type") != "null"]
    rest = {key: value for key, value in field.items() if key != "anyOf"}
    return {**rest, **choices[0]} if len(choices) == 1 else {**rest, "anyOf": choices}


def _settable(config: Schema) -> Schema:
    """The `values` of `set`: the keys of the config that can change while a run trains."""
    return {
        "title": "SettableValues",
        "description": "Keys that `set` changes while a run trains.",
        "type": "object",
        "properties": {key: _given(config["properties"][key]) for key in SETTABLE},
        "minProperties": 1,
        "additionalProperties": False,
    }


def _given(field: Schema) -> Schema:
    """The schema of a value that is given, not left to its default."""
    field = {key: value for key, value in field.items() if key not in ("default", "x-computed-default")}
    return _only(field) if "anyOf" in field else field


def _resolved(config: Schema) -> Schema:
    """The config as `init` tells it: every key is there, and a newer worker may have more."""
    resolved = {key: value for key, value in config.items() if key != "additionalProperties"}
    return {
        **resolved,
        "title": "ResolvedConfig",
        "description": "The config of a run with every default filled in, paths absolute.",
        "required": list(config["properties"]),
    }


def _replace(schema: Schema, field: str, name: str) -> None:
    """Give a field the type of another definition."""
    before = schema["properties"][field]
    description = {key: before[key] for key in ("description",) if key in before}
    schema["properties"][field] = {"$ref": _REF + name, **description}
