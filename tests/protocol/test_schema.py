"""The JSON Schema says what the types say: every printed line fits it, and every command that is taken."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from trainwire_protocol.codec import Refusal, decode_command, encode_line
from trainwire_protocol.commands import COMMANDS, WORDS
from trainwire_protocol.config import FIELDS, ON_RESUME, SETTABLE, computed_default
from trainwire_protocol.config_load import check_settings
from trainwire_protocol.errors import BY_CODE, TrainwireError
from trainwire_protocol.events import EVENT_TYPES, TRANSPORT_TYPES, Response, type_name
from trainwire_protocol.generate.__main__ import generated_files
from trainwire_protocol.generate.tables import ELSEWHERE, TABLES, fill
from trainwire_protocol.known import FEATURES, LOG_CODES
from trainwire_protocol.results import RESULTS
from trainwire_protocol.schema import build_schema, definition_name

SCHEMA = build_schema()
DEFINITIONS = SCHEMA["$defs"]
FAST = settings(
    derandomize=True,
    deadline=None,
    max_examples=300,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
LEVELS = ("debug", "info", "warn", "error")
Made = Callable[[list[type[Any]]], st.SearchStrategy[Any]]


def validator(name: str) -> Any:
    return jsonschema.Draft202012Validator({**SCHEMA, "anyOf": [{"$ref": f"#/$defs/{name}"}]})


MESSAGE, COMMAND = validator("Message"), validator("Command")


def test_the_document_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_the_generated_files_are_current() -> None:
    for path, wanted in generated_files().items():
        assert path.read_text(encoding="utf-8") == wanted, f"{path} is stale: run `make generate`"


def test_the_check_fails_on_a_stale_file_and_says_what_to_run(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from trainwire_protocol.generate import __main__ as m;"
        f"m.ROOT = pathlib.Path({str(tmp_path)!r}); m.generated_files.__defaults__ = (m.ROOT,);"
        "sys.exit(m.main())"
    )
    stale = subprocess.run([sys.executable, "-c", code, "--check"], capture_output=True, text=True, check=False)
    assert stale.returncode == 1
    assert "make generate" in stale.stderr
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
    assert subprocess.run([sys.executable, "-c", code, "--check"], capture_output=True, check=False).returncode == 0


def test_a_marker_without_a_table_is_an_error() -> None:
    with pytest.raises(KeyError):
        fill("<!-- generated:nothing -->\n<!-- end:nothing -->", TABLES)


@given(data=st.data())
@FAST
def test_every_line_that_can_be_printed_fits_the_schema(data: st.DataObject, made: Made) -> None:
    kind = data.draw(st.sampled_from([*EVENT_TYPES, *TRANSPORT_TYPES]))
    message = data.draw(made([kind]))
    if type_name(kind) == "init":
        message.config = msgspec.to_builtins(data.draw(made([_config_type()])))
    if isinstance(message, Response):
        cmd = data.draw(st.sampled_from(list(RESULTS)))
        message.cmd, message.ok = cmd, data.draw(st.booleans())
        message.result = msgspec.to_builtins(data.draw(made([RESULTS[cmd]]))) if message.ok else None
        message.error = None if message.ok else data.draw(made([_error_type()]))
    line = json.loads(encode_line(message, 1 << 24))
    MESSAGE.validate(line)
    validator(definition_name(type_name(kind), "Event" if kind in EVENT_TYPES else "")).validate(line)


def _config_type() -> type[Any]:
    from trainwire_protocol.config import Config

    return Config


def _error_type() -> type[Any]:
    from trainwire_protocol.events import ErrorBody

    return ErrorBody


@given(data=st.data())
@FAST
def test_the_schema_takes_what_the_worker_takes(data: st.DataObject, made: Made, finite: Callable[[Any], bool]) -> None:
    command = data.draw(made([kind for cmd, kind in COMMANDS.items() if cmd not in ("set", "start", "validate")]))
    built = json.loads(json.dumps(msgspec.to_builtins(command)))
    both = built["cmd"] == "generate" and (built.get("prompt") is None) == (built.get("messages") is None)
    if finite(built) and not both:
        decode_command(json.dumps(built).encode())
        COMMAND.validate(built)


@pytest.mark.parametrize(
    "line",
    [
        {"cmd": "ping", "loud": True},
        {"cmd": "pong"},
        {"id": 1.5, "cmd": "ping"},
        {"id": "x" * 129, "cmd": "ping"},
        {"id": 2**53, "cmd": "ping"},
        {"cmd": "resume", "steps": 0},
        {"cmd": "checkpoint", "name": "../x"},
        {"cmd": "checkpoint", "name": "a\n"},
        {"cmd": "stop", "save": "yes"},
        {"cmd": "generate", "prompt": "a", "max_tokens": 0},
        {"cmd": "generate", "messages": [{"role": "user", "content": "a", "x": 1}]},
        {"cmd": "generate", "messages": []},
        {"cmd": "start"},
        {"cmd": "replay", "from_seq": 0},
    ],
    ids=str,
)
def test_what_the_worker_refuses_the_schema_refuses(line: dict[str, Any]) -> None:
    with pytest.raises(Refusal):
        decode_command(json.dumps(line).encode())
    assert not COMMAND.is_valid(line)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"learning_rate": 0},
        {"learning_rate": None},
        {"learning_rate": "fast"},
        {"max_steps": -1},
        {"log_every": 0},
        {"sample_display": "some"},
        {"batch_size": 4},
        {"nothing": 1},
    ],
    ids=str,
)
def test_values_that_set_refuses_the_schema_refuses(values: dict[str, Any]) -> None:
    with pytest.raises(TrainwireError):
        check_settings(values)
    assert not COMMAND.is_valid({"cmd": "set", "values": values})


@pytest.mark.parametrize(
    "values", [{"learning_rate": 1e-9}, {"max_steps": 0, "save_every": 7}, {"sample_display": "all"}]
)
def test_values_that_set_takes_the_schema_takes(values: dict[str, Any]) -> None:
    assert check_settings(values) == values
    COMMAND.validate({"cmd": "set", "values": values})


def test_a_message_may_have_fields_of_a_later_version_and_a_command_may_not() -> None:
    MESSAGE.validate({"type": "paused", "seq": 1, "ts": 2, "step": 3, "x_new": 4})
    assert not COMMAND.is_valid({"cmd": "pause", "x_new": 4})


def test_an_event_needs_its_time() -> None:
    assert not MESSAGE.is_valid({"type": "paused", "step": 3})


def test_a_response_has_a_result_or_an_error() -> None:
    assert MESSAGE.is_valid({"type": "response", "id": 1, "cmd": "ping", "ok": True, "result": {"ts": 1}})
    assert not MESSAGE.is_valid({"type": "response", "id": 1, "cmd": "ping", "ok": True})
    assert not MESSAGE.is_valid({"type": "response", "id": 1, "cmd": "ping", "ok": True, "result": {}})
    assert not MESSAGE.is_valid({"type": "response", "id": 1, "cmd": "ping", "ok": False})


def test_every_key_of_the_config_has_its_description_default_and_marks() -> None:
    for key, field in FIELDS.items():
        schema = DEFINITIONS["Config"]["properties"][key]
        assert schema["description"]
        assert schema["x-settable"] is (key in SETTABLE)
        assert schema["x-on-resume"] == ON_RESUME[key].value
        assert schema.get("x-computed-default") == computed_default(key)
        assert ("default" in schema) is not (key in DEFINITIONS["Config"]["required"])
        assert field.required is (key in DEFINITIONS["Config"]["required"])


def test_the_settable_keys_have_the_ranges_of_the_config() -> None:
    values = DEFINITIONS["SettableValues"]["properties"]
    assert tuple(values) == SETTABLE
    assert values["learning_rate"]["exclusiveMinimum"] == 0
    assert values["learning_rate"]["type"] == "number"
    assert values["log_every"]["minimum"] == 1
    assert values["sample_display"]["enum"] == ["all", "best_worst"]


def test_every_command_has_a_result() -> None:
    assert set(RESULTS) == set(COMMANDS)


def test_error_codes_and_words_are_those_of_the_package() -> None:
    assert set(DEFINITIONS["ErrorCode"]["x-known"]) == set(BY_CODE)
    word = jsonschema.Draft202012Validator(DEFINITIONS["Word"])
    for text in WORDS:
        assert word.is_valid("SET learning_rate=1" if text == "SET" else text)
    assert not word.is_valid("PAUSE now")


def test_every_reference_has_its_definition() -> None:
    def references(value: Any) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            return own + [r for v in value.values() for r in references(v)]
        return [r for v in value for r in references(v)] if isinstance(value, list) else []

    assert {r.removeprefix("#/$defs/") for r in references(SCHEMA)} <= set(DEFINITIONS)


def test_every_object_that_the_page_names_is_described_on_it_or_in_the_schema() -> None:
    page = (Path(__file__).resolve().parents[2] / "PROTOCOL.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| `\w+`(?: \?)? \| (.*?) \|", page, re.MULTILINE)
    kinds = (re.fullmatch(r"(?:(?:list|object) of )?([A-Z]\w+)(?: or null)?", cell) for cell in tables)
    named = {kind[1] for kind in kinds if kind}
    assert {"Estimate", "Sample", "Queue", "ErrorBody", "ChatMessage"} <= named
    described = set(re.findall(r"^#### ([A-Z]\w+)$", page, re.MULTILINE))
    assert named - described == set(ELSEWHERE)
    assert set(ELSEWHERE) <= set(DEFINITIONS)


def test_every_code_of_a_log_event_in_the_sources_is_on_the_list_and_the_other_way_round() -> None:
    worker = Path(__file__).resolve().parents[2] / "worker"
    said: set[str] = set()
    anywhere: set[str] = set()
    for file in worker.glob("trainwire_[wef]*/**/*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        anywhere |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and _is_code(node.value)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("log", "Log", "Notice"):
                given = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "code")]
                said |= {arg.value for arg in given if isinstance(arg, ast.Constant) and _is_code(arg.value)}
    assert said - set(LOG_CODES) == {"flood"}, "that one comes from scripts alone"
    assert set(LOG_CODES) - anywhere - set(BY_CODE) == set()
    assert set(DEFINITIONS["LogEvent"]["properties"]["code"]["x-known"]) == set(LOG_CODES)


def _is_code(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[a-z]+(_[a-z]+)*", value) is not None and value not in LEVELS


def test_the_features_of_a_worker_are_on_the_page_and_in_the_schema() -> None:
    page = (Path(__file__).resolve().parents[2] / "PROTOCOL.md").read_text(encoding="utf-8")
    assert all(f"| `{feature}` |" in page for feature in FEATURES)
    assert DEFINITIONS["Hello"]["properties"]["features"]["items"]["x-known"] == sorted(FEATURES)
