"""`trainwire validate`: whether a config, its model and its data can be trained, and what that would take."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from trainwire_client import ClientError, validate
from trainwire_protocol.config_load import build_config, parse_assignment, read_config_file
from trainwire_protocol.errors import ConfigInvalid

from .overview import look_at
from .validate_view import show


def run(words: list[str]) -> int:
    """Check and show; 0 if the run can begin, else 3. A run that the folder holds already is a note."""
    parser = argparse.ArgumentParser(prog="trainwire validate", description=__doc__, allow_abbrev=False)
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file")
    parser.add_argument("assignments", nargs="*", default=[], metavar="key=value", help="keys that win over the file")
    parser.add_argument("--json", action="store_true", help="print the result of the `validate` command")
    parser.add_argument("--offline", action="store_true", help="download nothing from the Hub")
    parser.add_argument("--engine", choices=("mlx", "fake"), default="mlx", help=argparse.SUPPRESS)
    chosen, rest = parser.parse_known_args(words)
    late = [word for word in rest if "=" in word and not word.startswith("-")]
    if late != rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        values = read_config_file(chosen.config)
        values.setdefault("run_name", chosen.config.stem)
        values.update(parse_assignment(word) for word in [*chosen.assignments, *late])
    except ConfigInvalid as error:
        print(f"trainwire: {error}", file=sys.stderr)
        return 3
    arguments = [*(["--offline"] if chosen.offline else []), "--engine", chosen.engine]
    folder = chosen.config.absolute().parent
    note = "Loading the model, reading the data, trying the largest update …"
    if waits := sys.stderr.isatty():
        print(note, end="\r", file=sys.stderr, flush=True)
    try:
        result = validate(values, worker_args=arguments, cwd=folder, timeout=None)
    except KeyboardInterrupt:
        return 130
    except ClientError as error:
        print(f"trainwire: {error}", file=sys.stderr)
        return 3
    finally:
        if waits:
            print(" " * len(note), end="\r", file=sys.stderr, flush=True)
    _allow_busy(result)
    if chosen.json:
        print(json.dumps(result, indent=2, ensure_ascii=not sys.stdout.encoding.lower().startswith("utf")))
    else:
        show(result, _notes(values, folder), colour=sys.stdout.isatty())
    return 0 if result["valid"] else 3


def _allow_busy(result: dict[str, Any]) -> None:
    """Take a run that is under way in the folder for what it is: no fault of the config, and over some time."""
    faults = [issue for issue in result["issues"] if issue["code"] != "busy"]
    if not result["valid"] and len(faults) < len(result["issues"]) and result.get("total_steps") is not None:
        result["valid"] = True
        result["issues"] = faults


def _notes(values: dict[str, Any], folder: Path) -> list[str]:
    """Say what the run folder holds already; it is no fault of the config."""
    try:
        config = build_config(values, folder, run_name="run")
    except ConfigInvalid:
        return []
    overview = look_at(Path(config.run_dir or "."))
    if overview is None:
        return []
    if overview.alive:
        return [f"{overview.run_dir} is busy: process {overview.pid} trains there, at step {overview.step}."]
    if overview.state == "completed":
        return [
            f"{overview.run_dir} holds a finished run of {overview.step} updates; more num_epochs or max_steps"
            " go on from its end, --overwrite with resume=never begins anew."
        ]
    return [
        f"{overview.run_dir} holds a run that {overview.state} at step {overview.step}: `trainwire run` goes on"
        " from its last checkpoint."
    ]
