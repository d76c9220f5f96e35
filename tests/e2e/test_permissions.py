"""Files that may not be read or written: each is a typed error that names the file, before anything is written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from whole import ENVIRONMENT, Session, parse, write_config

from trainwire_protocol.errors import NO_PERMISSION

# Root reads everything, unless it gives up the right to.
AS_SOMEBODY = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
pytestmark = pytest.mark.skipif(
    bool(AS_SOMEBODY) and shutil.which("setpriv") is None, reason="as root it needs setpriv"
)


@pytest.fixture
def place(base: Path, tmp_path: Path) -> Path:
    """A folder with a model, data and a config of its own, whose rights a test takes away."""
    shutil.copytree(base / "model", tmp_path / "model")
    for name in ("train", "valid"):
        (tmp_path / "data").mkdir(exist_ok=True)
        shutil.copy(base / ("chat.jsonl" if name == "train" else "valid.jsonl"), tmp_path / "data" / f"{name}.jsonl")
    (tmp_path / "runs").mkdir()
    return tmp_path


def run(place: Path, data: str = "data/train.jsonl", valid: str = "data/valid.jsonl") -> Session:
    """Train two updates without the right to read what the modes forbid."""
    paths = {"model": "model", "data": data, "valid_data": valid, "cache_dir": "cache", "run_dir": "runs/r"}
    values = {key: str(place / path) for key, path in paths.items()}
    if (place / data).is_dir():
        del values["valid_data"]
    config = write_config(place / "c.toml", **values, max_steps=2, learning_rate=1e-3)
    command = [*AS_SOMEBODY, sys.executable, "-m", "trainwire_cli", "run", str(config)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, env=ENVIRONMENT, timeout=240, check=False
    )
    return Session(parse(done.stdout), done.returncode, done.stderr.decode())


def folder_of(name: str) -> Callable[[Path], Session]:
    return lambda place: run(place, data=name)


@pytest.mark.parametrize(
    ("forbidden", "start", "code", "status"),
    [
        ("data/train.jsonl", run, "dataset_invalid", 3),
        ("data/train.jsonl", folder_of("data"), "dataset_invalid", 3),
        ("data", folder_of("data"), "dataset_invalid", 3),
        ("data/valid.jsonl", run, "dataset_invalid", 3),
        ("model", run, "model_load_failed", 4),
        ("model/config.json", run, "model_load_failed", 4),
        ("model/model.safetensors", run, "model_load_failed", 4),
        ("model/tokenizer.json", run, "model_load_failed", 4),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_may_not_be_read_is_named_with_what_to_do(
    place: Path, forbidden: str, start: Callable[[Path], Session], code: str, status: int
) -> None:
    (place / forbidden).chmod(0)
    try:
        session = start(place)
    finally:
        (place / forbidden).chmod(0o755)
    error = session.one("error")
    assert (error["code"], session.exit_code) == (code, status)
    assert str(place / forbidden) in error["message"]
    assert "permission denied" in error["message"].lower()
    assert error["hint"] == NO_PERMISSION
    assert error["details"]["path"] == str(place / forbidden)
    assert not session.of("step")


def test_a_run_folder_that_cannot_be_made_is_named(place: Path) -> None:
    (place / "runs").chmod(0o555)
    session = run(place)
    error = session.one("error")
    assert (error["code"], session.exit_code) == ("io_error", 7)
    assert str(place / "runs/r") in error["message"]
    assert list((place / "runs").iterdir()) == []


def test_a_cache_that_cannot_be_written_costs_two_notices(place: Path) -> None:
    (place / "cache").mkdir()
    (place / "cache").chmod(0o555)
    session = run(place)
    assert session.one("end")["outcome"] == "completed"
    assert [line["code"] for line in session.of("log")] == ["no_cache"] * 2
