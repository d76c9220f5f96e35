"""Every rule of PROTOCOL.md has a test that exists, and every test that is named for a rule has its rule."""

import ast
import functools
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BULLET = re.compile(r"^- \[([A-Z]-\d+)\] (.*(?:\n  .+)*)", re.MULTILINE)
EXPLAINED = "A sentence with MUST is a rule with an id"


def document() -> str:
    return (ROOT / "PROTOCOL.md").read_text(encoding="utf-8")


def rules() -> list[tuple[str, str]]:
    return BULLET.findall(document())


def mapping() -> dict[str, list[str]]:
    path = Path(__file__).with_name("requirements.toml")
    return {rule: tests for group in tomllib.loads(path.read_text()).values() for rule, tests in group.items()}


@functools.cache
def functions_of(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(node.name for node in functions)


def test_every_rule_has_a_test() -> None:
    known = mapping()
    assert [rule for rule, _ in rules() if not known.get(rule)] == []


def test_every_test_of_a_rule_has_its_rule() -> None:
    ids = {rule for rule, _ in rules()}
    assert [rule for rule in mapping() if rule not in ids] == []


@pytest.mark.parametrize("rule", sorted(mapping()))
def test_the_tests_of_a_rule_exist(rule: str) -> None:
    for node in mapping()[rule]:
        path, _, name = node.partition("::")
        assert (ROOT / path).is_file(), node
        assert name in functions_of(path), node


def test_every_must_is_a_rule_and_every_rule_says_must() -> None:
    assert [rule for rule, text in rules() if "MUST" not in text] == []
    rest = BULLET.sub("", document())
    assert [line for line in rest.splitlines() if "MUST" in line and EXPLAINED not in line] == []


def test_no_id_is_given_twice() -> None:
    ids = [rule for rule, _ in rules()]
    assert len(ids) == len(set(ids))
    assert len(ids) > 90


def test_the_rules_of_the_checker_are_those_of_the_page() -> None:
    source = (ROOT / "protocol" / "trainwire_protocol" / "conformance.py").read_text()
    named = set(re.findall(r'self\._break\("([A-Z]-\d+)"', source))
    assert named
    assert named <= {rule for rule, _ in rules()}
