"""The exit codes that README.md's table gives `run`, `demo` and `watch`, and `status` after them, by real processes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich", reason="rich is not installed: pip install 'trainwire[view]'")
pytest.importorskip("uniplot", reason="uniplot is not installed: pip install 'trainwire[view]'")

ENVIRONMENT = {**os.environ, "PYTHONSAFEPATH": "1"}
CLI = [sys.executable, "-m", "trainwire_cli"]
DEMO = "import sys; from trainwire_cli.demo import _run_worker; sys.exit(_run_worker(sys.argv[1:], {}))"
WAYS = {"run": CLI, "demo": [sys.executable, "-c", DEMO]}
"""How a worker is started: `demo` trains for real, so its part that starts a worker is given another run."""


def start(way: str, folder: Path, act: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start a scripted run in `folder/runs/c`, in which a second signal counts at once."""
    (folder / "c.toml").write_text('model = "m/m"\ndata = "d/d"\n')
    (folder / "script.json").write_text(json.dumps({"acts": [act]}))
    words = ["run", str(folder / "c.toml"), "--engine", "fake", "--script", str(folder / "script.json")]
    return subprocess.Popen(
        [*WAYS[way], *words, "--signal-grace", "0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )


def read_until(process: subprocess.Popen[bytes], kind: str, **fields: object) -> bytes:
    """Read lines up to an event with these fields."""
    assert process.stdout is not None
    read = b""
    for line in process.stdout:
        read += line
        event = json.loads(line)
        if event["type"] == kind and all(event[k] == v for k, v in fields.items()):
            return read
    pytest.fail(f"no {kind} event with {fields}: {process.communicate()[1].decode()}")


def seen(lines: bytes, run_dir: Path) -> tuple[int, int]:
    """The exit codes of a view at the end of a pipe with these lines, and of a later look at the run."""
    piped = run_dir.parent / "piped"
    piped.write_bytes(lines)
    ours, theirs = pty.openpty()
    with piped.open("rb") as pipe:
        view = subprocess.Popen(
            [*CLI, "watch"], stdin=pipe, stdout=theirs, stderr=theirs, env={**ENVIRONMENT, "TERM": "xterm"}
        )
    os.close(theirs)
    with os.fdopen(ours, "rb", buffering=0) as drawn, contextlib.suppress(OSError):  # Linux says EIO at the end.
        while drawn.read(1 << 16):
            pass
    done = subprocess.run([*CLI, "status", str(run_dir)], capture_output=True, env=ENVIRONMENT, timeout=240)
    return view.wait(240), done.returncode


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "code"), [("SIGHUP", 129), ("SIGINT", 130), ("SIGTERM", 143)])
def test_a_second_signal_ends_with_its_number(tmp_path: Path, way: str, name: str, code: int) -> None:
    process = start(way, tmp_path, {"do": "hang", "step": 3})
    lines = read_until(process, "step", step=2)
    process.terminate()
    lines += read_until(process, "status", phase="stopping")
    process.send_signal(getattr(signal, name))
    rest, told = process.communicate(timeout=240)
    assert (process.returncode, json.loads(rest.splitlines()[-1])["exit_code"]) == (code, code), told.decode()
    assert seen(lines + rest, tmp_path / "runs/c") == (code, 0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("error", "code"), [("internal", 1), ("out_of_memory", 5)])
def test_a_failed_run_ends_with_its_error_s_code(tmp_path: Path, way: str, error: str, code: int) -> None:
    process = start(way, tmp_path, {"do": "fail", "step": 3, "code": error, "message": "It failed."})
    lines, told = process.communicate(timeout=240)
    assert (process.returncode, json.loads(lines.splitlines()[-1])["exit_code"]) == (code, code), told.decode()
    assert seen(lines, tmp_path / "runs/c") == (code, 1)


@pytest.mark.parametrize(("way", "code"), [("run", -signal.SIGKILL), ("demo", 128 + signal.SIGKILL)])
def test_a_killed_worker_s_run_is_shown_as_dead(tmp_path: Path, way: str, code: int) -> None:
    process = start(way, tmp_path, {"do": "hang", "step": 3, "orphan_ms": 0})
    lines = read_until(process, "step", step=2)
    os.kill(json.loads((tmp_path / "runs/c/run.lock").read_bytes())["pid"], signal.SIGKILL)
    rest, told = process.communicate(timeout=240)
    assert process.returncode == code, told.decode()
    assert seen(lines + rest, tmp_path / "runs/c") == (1, 1)
