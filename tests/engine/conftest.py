"""Shared by the engine's tests: tiny model folders, made once per session, and configs for them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_model

from trainwire_engine import native, open_tasks
from trainwire_protocol.config import Config


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Give the folder of a tiny model; the same arguments give the same folder."""
    made: dict[str, Path] = {}

    def make(family: str = "qwen3", **options: Any) -> Path:
        key = repr((family, sorted(options.items(), key=repr)))
        if key not in made:
            made[key] = tiny_model(tmp_path_factory.mktemp(family), family, **options)
        return made[key]

    return make


@pytest.fixture(scope="session", autouse=True)
def fast_products() -> None:
    """Compute with what a run computes with, or with the BLAS that test_both_ways.py asks for."""
    native.prepare(os.environ.get("TRAINWIRE_TEST_BLAS", "auto"))


@pytest.fixture(scope="session", autouse=True)
def room_for_lanes(fast_products: None) -> None:
    """Let as much be open as an engine lets, whichever test comes first."""
    open_tasks.allow(2)


@pytest.fixture(autouse=True)
def lanes_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget, before and after a test, the lanes that a resumed run in this process was given."""
    monkeypatch.setattr(native, "_lanes", None)


@pytest.fixture
def config(tiny: Callable[..., Path]) -> Callable[..., Config]:
    """Make a config for a tiny model; keys of the config by name, `model` may be a folder."""

    def make(**keys: Any) -> Config:
        model = keys.pop("model", None) or tiny()
        return Config(**{"model": str(model), "data": "unused", "learning_rate": 1e-3, **keys})

    return make
