"""Experiment trackers beside a run: processes that read its log, so that none of them can hold anything up."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}
"""What the built-in trackers need; another one is named `package.module:Class`."""
_LOOK_EVERY = 2.0
After = Callable[[float, Callable[[], None]], None]
"""Makes a call once, so many seconds from now."""


def problem_with(name: str) -> str | None:
    """Say why a tracker cannot be used; None if it can be tried."""
    if name not in PACKAGES and ":" not in name:
        return f"there is no tracker {name!r}: take tensorboard, wandb, or package.module:Class"
    package = PACKAGES.get(name) or name.partition(":")[0].partition(".")[0]
    if importlib.util.find_spec(package) is None:
        extra = f": pip install 'trainwire[{name}]'" if name in PACKAGES else ""
        return f"{name} needs the package {package}, which is not installed{extra}"
    return None


def start_trackers(
    names: list[str], run_dir: Path, first_seq: int, after: After, tell: Callable[[str, str, int], None]
) -> None:
    """Start a process for each tracker; it reads the log from `first_seq` and leaves by itself after the end.

    `tell` gets name, output file and exit status of one that fails while the run lives.
    """
    for name in names:
        _start(name, run_dir, first_seq, after, tell)


def _start(name: str, run_dir: Path, first_seq: int, after: After, tell: Callable[[str, str, int], None]) -> None:
    command = [sys.executable, "-m", "trainwire_cli", "track", str(run_dir), "--tracker", name]
    command += ["--from-seq", str(first_seq), "--parent", str(os.getpid())]
    output = run_dir / f"tracker-{name.replace(':', '.')}.log"
    # Its output is a file: a pipe would stay open for as long as the tracker takes to finish.
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    try:
        with output.open("ab") as file:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment)
    except OSError as error:
        tell(name, str(output), error.errno or 1)
        return

    def look() -> None:
        status = process.poll()
        if status is None:
            after(_LOOK_EVERY, look)
        elif status:
            tell(name, str(output), status)

    after(_LOOK_EVERY, look)
