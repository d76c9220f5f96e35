"""docs/python-client.md names what there is, as it is."""

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

import trainwire_client as tw
from trainwire_client import aio, testing
from trainwire_client.testing import fake_worker
from trainwire_protocol.events import EVENT_TYPES

PAGE = Path(__file__).parents[3] / "docs" / "python-client.md"
TEXT = PAGE.read_text(encoding="utf-8")
CODE = " ".join(re.findall(r"```.*?```|`[^`\n]+`", TEXT, re.DOTALL))
HANDLES = (tw.Run, tw.AttachedRun)


def signature(name: str, function: Any) -> str:
    """Write a signature as the page does: names and defaults."""
    whole = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in whole.parameters.values() if p.name != "self"]
    return name + str(whole.replace(parameters=parameters, return_annotation=whole.empty))


def members(kind: type) -> dict[str, Any]:
    return {name: value for name, value in inspect.getmembers(kind) if not name.startswith("_")}


def methods() -> list[tuple[str, Any]]:
    found = {
        (name, signature(name, value)): value
        for kind in HANDLES
        for name, value in members(kind).items()
        if inspect.isfunction(value)
    }
    return [(text, value) for (_, text), value in found.items()]


def is_documented(word: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(word)}(?!\w)", CODE) is not None


@pytest.mark.parametrize(
    "name", [*tw.__all__, "aio", "AsyncRun", "AsyncAttachedRun", "fake_worker", "LINES", "FAKE_WORKER"]
)
def test_every_public_name_is_on_the_page(name: str) -> None:
    assert is_documented(name)


@pytest.mark.parametrize("function", [tw.launch, tw.attach, tw.validate, tw.history, tw.latest_checkpoint, fake_worker])
def test_every_function_s_signature_is_on_the_page(function: Any) -> None:
    assert signature(function.__name__, function) in TEXT


@pytest.mark.parametrize("text", [text for text, _ in methods()])
def test_every_method_s_signature_is_on_the_page(text: str) -> None:
    assert f"`{text}`" in TEXT or f" {text}" in TEXT


def test_every_property_of_a_handle_is_on_the_page() -> None:
    for kind in HANDLES:
        for name, value in members(kind).items():
            if isinstance(value, property):
                assert f"`{name}`" in TEXT, name


def test_every_field_of_answers_results_and_settings_is_on_the_page() -> None:
    kinds = [getattr(tw, name) for name in tw.__all__ if inspect.isclass(getattr(tw, name))]
    for kind in kinds:
        if issubclass(kind, msgspec.Struct) and kind not in (*EVENT_TYPES, tw.Gap):
            for field in msgspec.structs.fields(kind):
                assert is_documented(field.name), f"{kind.__name__}.{field.name}"


def test_every_attribute_of_an_error_is_on_the_page_in_its_row() -> None:
    for name, kind in inspect.getmembers(tw.errors, inspect.isclass):
        if not issubclass(kind, tw.ClientError) or kind is tw.ClientError:
            continue
        (row,) = [line for line in TEXT.splitlines() if line.startswith(f"| `{name}` |")]
        attributes = [p for p in inspect.signature(kind.__init__).parameters if p not in ("self", "message")]
        assert re.findall(r"`(\w+)`", row.split("|")[2]) == attributes


def test_the_page_names_no_method_and_no_option_that_there_is_not() -> None:
    known = {name for kind in (*HANDLES, tw.Result, tw.Channel) for name in members(kind)}
    assert set(re.findall(r"\brun\.(\w+)", CODE)) <= known
    rows = TEXT[TEXT.index("| parameter |") : TEXT.index("The worker runs in a session")]
    named = {word for row in rows.splitlines()[2:] if row for word in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == set(inspect.signature(tw.launch).parameters)


def test_the_asyncio_twin_has_every_command_with_the_same_parameters() -> None:
    for name, value in members(tw.Run).items():
        twin = getattr(aio.AsyncRun, name, None)
        if inspect.isfunction(value) and name != "detach":
            assert signature(name, value) == signature(name, twin), name
    assert inspect.signature(aio.launch).parameters == inspect.signature(tw.launch).parameters
    assert inspect.signature(aio.attach).parameters == inspect.signature(tw.attach).parameters


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))
def test_every_example_parses_and_names_what_there_is(block: str) -> None:
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom):
            module = {"trainwire_client": tw, "trainwire_client.testing": testing}[str(node.module)]
            assert all(hasattr(module, alias.name) for alias in node.names)


def test_the_first_example_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    block = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0]
    command = fake_worker([{"hello": {}}, {"start": {}}, {"steps": 2}, {"finish": {}}])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tw, "launch", lambda config, **options: tw.launching.launch(config, command=command, **options))
    exec(compile(block, str(PAGE), "exec"), {})
    assert capsys.readouterr().out.splitlines()[:2] == ["1 2.0", "2 2.0"]
