"""Turns what people write (a TOML file, `key=value` words, a JSON object) into a Config, or says what is wrong."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from .codec import ascii_json
from .config import FIELDS, MAX_INT, SETTABLE, Config
from .errors import BadParams, ConfigInvalid, UnknownParam
from .foreign_keys import FOREIGN_KEYS

MAX_CONFIG_BYTES = 1 << 20
BESIDES_CONFIG = 2_048
"""Bytes that a line which tells a config keeps for everything else in it."""
_WORDS = {"yes": True, "on": True, "no": False, "off": False}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PATH_KEYS = ("model", "run_dir", "start_from", "cache_dir")


class Issue(msgspec.Struct, frozen=True):
    """One thing that is wrong with a config: `path` names the key, `code` the kind, `message` is a sentence."""

    path: str
    code: str
    message: str


def parse_assignment(word: str) -> tuple[str, Any]:
    """Split `key=value`; the value is parsed as TOML, else it is text. Raises ConfigInvalid without a `=`."""
    import tomllib  # a worker under `serve` reads no TOML

    key, equals, text = word.partition("=")
    key = key.strip()
    if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
        raise ConfigInvalid(f"{word!r} is not of the form key=value.", hint="Write for instance batch_size=4.")
    text = text.strip()
    if text.lower() in _WORDS:
        return key, _WORDS[text.lower()]
    try:
        return key, tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return key, text


def read_config_file(path: Path) -> dict[str, Any]:
    """Read one flat TOML table. Raises ConfigInvalid with the line that does not parse."""
    import tomllib

    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigInvalid(
            f"The config file {path} cannot be read: {error.strerror}.",
            hint="`trainwire config` prints a documented default file.",
        ) from None
    if len(raw) > MAX_CONFIG_BYTES:
        raise ConfigInvalid(f"The config file {path} is larger than 1 MiB.", hint="Is it the data file?")
    try:
        return tomllib.loads(raw.decode("utf-8-sig").replace("\r\n", "\n"))
    except UnicodeDecodeError:
        raise ConfigInvalid(f"The config file {path} is not UTF-8.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigInvalid(
            f"The config file {path} is not TOML: {error}.", hint='Text stands in quotes: model = "folder".'
        ) from None


def _allowed(key: str) -> str:
    """Say what a key's type allows, in words."""
    schema = msgspec.json.schema(FIELDS[key].type)
    parts = [_allowed_by(part) for part in schema.get("anyOf", [schema]) if part.get("type") != "null"]
    return " or ".join(parts)


def _allowed_by(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(str(v) for v in schema["enum"])
    kind = schema.get("type")
    if kind == "array":
        return "a list of texts"
    words = {
        "integer": "an integer",
        "number": "a finite number",
        "boolean": "true or false",
        "string": "a text",
    }
    text = words.get(str(kind), "a table")
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = " and ".join(f"{sign} {schema[bound]}" for bound, sign in signs.items() if bound in schema)
    return " ".join(part for part in (text, bounds) if part) + (", not empty" if schema.get("minLength") else "")


def _unfit(value: Any) -> str | None:
    """Say why a number inside a value cannot be told on the wire; None if all of them can."""
    if isinstance(value, float):
        return None if math.isfinite(value) else "numbers must be finite"
    if isinstance(value, int):
        return None if abs(value) <= MAX_INT else f"integers must be within ±{MAX_INT}"
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return next((reason for reason in map(_unfit, inner) if reason is not None), None)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _unknown(key: str, known: Sequence[str]) -> Issue:
    if key in FOREIGN_KEYS:
        return Issue(key, "foreign_key", f"{key} is no key of trainwire: {FOREIGN_KEYS[key]}")
    import difflib  # slow to import, and seldom needed

    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    hint = f" Did you mean {near[0]}?" if near else ""
    return Issue(key, "unknown_key", f"There is no key {_show(key)}.{hint}")


def convert_value(key: str, value: Any) -> Any | Issue:
    """Check one value against its key's type and range; the converted value, or what is wrong."""
    try:
        converted = msgspec.convert(value, FIELDS[key].type)
    except msgspec.ValidationError:
        return Issue(key, "invalid_value", f"{key} = {_show(value)} is not allowed: it must be {_allowed(key)}.")
    if (reason := _unfit(converted)) is not None:
        return Issue(key, "invalid_value", f"{key} = {_show(value)} is not allowed: {reason}.")
    return converted


def check(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Issue]]:
    """Check every key: the converted values, and all that is wrong with them."""
    converted: dict[str, Any] = {}
    issues: list[Issue] = []
    for key, value in values.items():
        if key not in FIELDS:
            issues.append(_unknown(key, tuple(FIELDS)))
            continue
        result = convert_value(key, value)
        if isinstance(result, Issue):
            issues.append(result)
        else:
            converted[key] = result
    for key, field in FIELDS.items():
        if field.required and key not in values:
            issues.append(Issue(key, "missing_key", f"{key} is missing: it must be {_allowed(key)}."))
    if not issues:
        issues = _cross_check(converted)
    return converted, issues


def _cross_check(values: Mapping[str, Any]) -> list[Issue]:
    issues = []
    if values.get("method") == "full":
        for key in ("lora_rank", "lora_alpha", "lora_dropout", "lora_layers", "lora_keys"):
            if key in values and values[key] != FIELDS[key].default:
                issues.append(
                    Issue(
                        key,
                        "conflict",
                        f"{key} has no effect with method = 'full'. Leave it out, or use method = 'lora'.",
                    )
                )
    for key in values.get("resume_override", ()):
        if key not in FIELDS:
            issues.append(_unknown(key, tuple(FIELDS)))
    peak = values.get("learning_rate") or _default_peak(values.get("method"))
    floor = values.get("min_learning_rate", 0.0)
    if floor > peak:
        issues.append(
            Issue(
                "min_learning_rate",
                "conflict",
                f"min_learning_rate = {floor} is above learning_rate = {peak}.",
            )
        )
    if values.get("eval_every") == 0 and values.get("early_stopping_patience", 0) > 0:
        issues.append(
            Issue(
                "early_stopping_patience",
                "conflict",
                "early_stopping_patience needs evaluations: set eval_every.",
            )
        )
    return issues


def _default_peak(method: str | None) -> float:
    return 1e-5 if method == "full" else 1e-4


def check_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Check the values of a `set` command: all or nothing. Raises UnknownParam or BadParams."""
    if not values:
        raise BadParams("`set` needs at least one key in `values`.", allowed=list(SETTABLE))
    checked: dict[str, Any] = {}
    for key, value in values.items():
        if key not in SETTABLE:
            known = "cannot be changed while a run trains" if key in FIELDS else "is no key of the config"
            raise UnknownParam(f"{key} {known}. These can: {', '.join(SETTABLE)}.", key=key, allowed=list(SETTABLE))
        result = convert_value(key, value)
        if isinstance(result, Issue) or result is None:
            raise BadParams(f"{key} = {_show(value)} is not allowed: it must be {_allowed(key)}.", key=key)
        checked[key] = result
    return checked


def _absolute(text: str, base: Path, *, hub: bool = False) -> str:
    """Make a path absolute; with `hub`, a text that looks like a Hub id and is no path here stays as it is."""
    path = Path(text).expanduser()
    joined = path if path.is_absolute() else base / path
    if hub and not path.is_absolute() and not joined.exists() and _HUB_ID.fullmatch(text):
        return text
    return str(Path(*joined.parts) if ".." not in joined.parts else joined.resolve())


def _invalid(issues: Sequence[Issue], hint: str | None = None) -> ConfigInvalid:
    """Make the error that names the first of the issues, and holds all of them."""
    more = f" And {len(issues) - 1} more." if len(issues) > 1 else ""
    listed = [msgspec.to_builtins(issue) for issue in issues]
    return ConfigInvalid(issues[0].message + more, hint=hint, issues=listed)


def build_config(values: Mapping[str, Any], base: Path, *, run_name: str = "run") -> Config:
    """Make a Config with absolute paths and the defaults that need no model.

    `base` is the folder that relative paths start from: the config file's, or the worker's working folder.
    Raises ConfigInvalid; its details hold every issue.
    """
    converted, issues = check(values)
    if issues:
        raise _invalid(issues)
    base = Path(base).absolute()
    converted["run_name"] = name = converted.get("run_name") or run_name
    converted.setdefault("run_dir", None)
    if converted["run_dir"] is None:
        converted["run_dir"] = str(base / "runs" / name)
    for key in _PATH_KEYS:
        if converted.get(key):
            converted[key] = _absolute(converted[key], base, hub=key == "model")
    if converted.get("revision") and Path(converted["model"]).is_absolute():
        message = f"revision = {_show(converted['revision'])} has no effect: model is the folder {converted['model']}."
        raise _invalid([Issue("revision", "conflict", message)], "A revision belongs to a Hub id such as org/name.")
    for key in ("data", "valid_data"):
        value = converted.get(key)
        if isinstance(value, str):
            converted[key] = _absolute(value, base, hub=True)
        elif value is not None:
            converted[key] = [_absolute(v, base, hub=True) for v in value]
    if isinstance(converted.get("prompts"), str):
        converted["prompts"] = _absolute(converted["prompts"], base)
    if converted.get("resume", "auto") not in ("auto", "never", "latest"):
        converted["resume"] = _absolute(converted["resume"], base)
    template = converted.get("chat_template")
    if template and "{" not in template:
        converted["chat_template"] = _absolute(template, base)
    if converted.get("learning_rate") is None:
        converted["learning_rate"] = _default_peak(converted.get("method"))
    return Config(**converted)


def check_size(config: Config, max_line: int) -> None:
    """Refuse a config that does not fit into one line of `max_line` bytes, for `init` never cuts it.

    Raises ConfigInvalid, which names the longest key.
    """
    values = msgspec.to_builtins(config)
    # `init` says these three once more.
    size = len(ascii_json([values, config.model, config.run_dir, config.run_name])) + BESIDES_CONFIG
    if size > max_line:
        key, value = max(values.items(), key=lambda item: len(ascii_json(item[1])))
        message = (
            f"The config is too long to be told in one line of {max_line} bytes: "
            f"{key} alone takes {len(ascii_json(value))}."
        )
        hint = "Put prompts and chat templates into a file, name a folder of data, or start the worker with --max-line."
        raise _invalid([Issue(key, "too_long", message)], hint)
