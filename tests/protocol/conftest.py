"""Makes any message or command of the protocol, from its types."""

import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from msgspec import inspect

ENCODERS_OWN = ("truncated", "more", "non_finite")
Strategy = st.SearchStrategy[Any]
FLOATS = st.floats(allow_nan=True, allow_infinity=True)
TEXT = st.text(max_size=20) | st.sampled_from(["\ud800", "\udc00a", "\x00", "\x7f", "\u2028\n\r", "\ufeff", "'\"\\"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=4,
)


def _integers(kind: inspect.IntType) -> Strategy:
    low = kind.ge if kind.ge is not None else -(2**53) + 1
    high = kind.le if kind.le is not None else 2**53 - 1
    return st.integers(low, high)


def _floats(kind: inspect.FloatType) -> Strategy:
    low, high = kind.gt if kind.ge is None else kind.ge, kind.lt if kind.le is None else kind.le
    if low is None and high is None:
        return st.floats(allow_nan=False, allow_infinity=False)
    bounds = {"exclude_min": kind.gt is not None, "exclude_max": kind.lt is not None}
    return st.floats(low, high, allow_nan=False, allow_infinity=False, **bounds)


def _bare(kind: inspect.Type) -> inspect.Type:
    return _bare(kind.type) if isinstance(kind, inspect.Metadata) else kind


def _is_any_float(kind: inspect.Type) -> bool:
    return isinstance(kind, inspect.FloatType) and kind == inspect.FloatType()


def strategy(kind: inspect.Type) -> Strategy:
    """Give a strategy for the values of a type; numbers may be non-finite where they may be null."""
    match kind:
        case inspect.Metadata():
            return strategy(kind.type)
        case inspect.NoneType():
            return st.none()
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType():
            return _integers(kind)
        case inspect.FloatType():
            return _floats(kind)
        case inspect.StrType():
            if kind.pattern:
                return st.from_regex(kind.pattern, fullmatch=True).map(lambda text: text.rstrip("\n"))
            return TEXT.map(lambda text: text[: kind.max_length or sys.maxsize].ljust(kind.min_length or 0, "x"))
        case inspect.LiteralType():
            return st.sampled_from(sorted(kind.values, key=str))
        case inspect.ListType():
            return st.lists(strategy(kind.item_type), min_size=kind.min_length or 0, max_size=4)
        case inspect.DictType():
            return st.dictionaries(TEXT, strategy(kind.value_type), max_size=4)
        case inspect.UnionType():
            # Only a number that may be null may also be none that is finite.
            nullable = any(isinstance(choice, inspect.NoneType) for choice in kind.types)
            choices = [_bare(choice) for choice in kind.types]
            return st.one_of([FLOATS if nullable and _is_any_float(c) else strategy(c) for c in choices])
        case inspect.AnyType():
            return JSON
        case inspect.StructType():
            # What the encoder itself adds to a line is never part of a message.
            fields = {f.name: strategy(f.type) for f in kind.fields if f.name not in ENCODERS_OWN}
            if "ts" in fields:
                fields["ts"] = st.integers(1, 2**53 - 1)
            return st.builds(kind.cls, **fields)
    raise NotImplementedError(kind)


@pytest.fixture(scope="session")
def made() -> Callable[[Sequence[type[msgspec.Struct]]], Strategy]:
    """Give the strategy for messages or commands of any of these types."""
    cache: dict[type[Any], Strategy] = {}

    def make(kinds: Sequence[type[msgspec.Struct]]) -> Strategy:
        for kind in kinds:
            if kind not in cache:
                cache[kind] = strategy(inspect.type_info(kind))
        return st.one_of([cache[kind] for kind in kinds])

    return make


def finite(value: Any) -> bool:
    """Say whether every number inside is finite and every text can be encoded."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):
        return not any("\ud800" <= character <= "\udfff" for character in value)
    if isinstance(value, dict):
        return all(finite(k) and finite(v) for k, v in value.items())
    return not isinstance(value, list) or all(map(finite, value))


@pytest.fixture(scope="session", name="finite")
def _finite() -> Callable[[Any], bool]:
    return finite


@pytest.fixture(scope="session")
def recorder() -> ModuleType:
    """Give the script that records sessions; it starts and steers workers."""
    path = Path(__file__).resolve().parents[2] / "protocol" / "record_examples.py"
    spec = importlib.util.spec_from_file_location("record_examples", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
