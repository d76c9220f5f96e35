"""Starts runs: reads the config, writes rows to the run folder, spawns the worker."""

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import orjson

from trainwire_protocol.config import FIELDS, Config
from trainwire_protocol.config_load import build_config, read_config_file
from trainwire_protocol.errors import ConfigInvalid

from .errors import ClientError
from .process import DEFAULT_COMMAND, Shutdown
from .run import Run, Supervision

AnyConfig = Mapping[str, Any] | Config | str | os.PathLike[str]
Rows = Iterable[Mapping[str, Any]]
MAX_QUEUE = 4096
"""Waiting events beyond which step events are put together."""
HELLO_TIMEOUT = 30.0


def _read_config(config: AnyConfig) -> dict[str, Any]:
    """Give the keys that were written; a file's relative paths are made absolute, they start from its folder."""
    if isinstance(config, Config):
        return {key: v for key, v in msgspec.to_builtins(config).items() if v != FIELDS[key].default}
    if isinstance(config, Mapping):
        return dict(config)
    path = Path(config).expanduser().absolute()
    values = read_config_file(path)
    try:
        resolved = build_config(values, path.parent, run_name=path.stem)
    except ConfigInvalid:
        # The worker says what is wrong, as it does for a config that is no file.
        return values
    return {key: getattr(resolved, key) for key in (*values, "run_dir", "run_name")}


def _run_dir(config: dict[str, Any], cwd: str | os.PathLike[str] | None) -> Path:
    """Name the folder that the worker will use, as it computes it."""
    base = Path.cwd() if cwd is None else Path(cwd).absolute()
    folder = config.get("run_dir") or f"runs/{config.get('run_name') or 'run'}"
    return base / Path(folder).expanduser()


def _write_rows(rows: Rows, path: Path) -> str:
    """Write rows as JSON lines, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            count = 0
            for count, row in enumerate(rows, 1):
                if not isinstance(row, Mapping):
                    raise ClientError(f"Row {count} is no object but {type(row).__name__}.")
                try:
                    file.write(orjson.dumps(dict(row)) + b"\n")
                except TypeError as error:
                    raise ClientError(f"Row {count} cannot be written as JSON: {error}.") from None
            if not count:
                raise ClientError("rows is empty: there is nothing to train on.")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return str(path)


def _prepare(
    config: AnyConfig, rows: Rows | None, valid_rows: Rows | None, cwd: str | os.PathLike[str] | None
) -> tuple[dict[str, Any], Path]:
    values = _read_config(config)
    folder = _run_dir(values, cwd)
    for key, given, name in (("data", rows, "train"), ("valid_data", valid_rows, "valid")):
        if given is None:
            continue
        if values.get(key) is not None:
            raise ClientError(f"The config has {key} and rows were given: leave one of them out.")
        values[key] = _write_rows(given, folder / "rows" / f"{name}.jsonl")
        values["run_dir"] = str(folder)
    return values, folder


def launch(
    config: AnyConfig,
    *,
    rows: Rows | None = None,
    valid_rows: Rows | None = None,
    resume: str | None = None,
    overwrite: bool = False,
    linger: bool = False,
    command: Sequence[str] | None = None,
    worker_args: Sequence[str] = (),
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    supervise: bool | Supervision = False,
    shutdown: Shutdown | Mapping[str, float] | None = None,
    on_unknown: Callable[[dict[str, Any]], Any] | None = None,
    max_queue: int = MAX_QUEUE,
    hello_timeout: float = HELLO_TIMEOUT,
) -> Run:
    """Start a run and give its handle as soon as the worker has said hello.

    `config` is a mapping of the config's keys, a Config, or the path of a TOML file. `rows` and `valid_rows` are
    data given in memory: they are written to `rows/` in the run folder. `resume` ("auto", "never", a checkpoint's
    folder), `overwrite` and `linger` are those of the `start` command. `command` starts the worker (by default
    `python -m trainwire_worker`); `serve` is appended to it, then `worker_args`. `env` is added to the environment.
    With `supervise` a worker that died is started again and the run resumed, by default at most 5 times within
    180 s. Events of unknown types go to `on_unknown`, as dicts. Beyond `max_queue` events that wait to be consumed,
    step events are put together.

    The run is being prepared when this returns: `run.started()` waits until it trains. A start that is refused
    shows as an `error` event and a result with outcome "failed".

    Raises WorkerNotFound, WorkerDied, ProtocolMismatch, CommandTimeout if there is no worker to talk to, and
    ConfigInvalid if the file is no TOML.
    """
    values, folder = _prepare(config, rows, valid_rows, cwd)
    start = {"config": values, "resume": resume, "overwrite": overwrite or None, "linger": linger or None}
    supervision = Supervision() if supervise is True else supervise or None
    run = Run(
        start,
        run_dir=folder,
        command=DEFAULT_COMMAND if command is None else command,
        worker_args=worker_args,
        cwd=cwd,
        env=env,
        supervision=supervision,
        shutdown=_shutdown(shutdown),
        on_unknown=on_unknown,
        max_queue=max_queue,
    )
    run._wait_for_hello(hello_timeout)
    return run


def _shutdown(pace: Shutdown | Mapping[str, float] | None) -> Shutdown:
    return pace if isinstance(pace, Shutdown) else Shutdown(**(pace or {}))


def validate(
    config: AnyConfig,
    *,
    command: Sequence[str] | None = None,
    worker_args: Sequence[str] = (),
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = 600.0,
    hello_timeout: float = HELLO_TIMEOUT,
) -> dict[str, Any]:
    """Check a config and its data without training: `valid`, `issues`, the resolved config, the data report."""
    run = Run(
        {"config": _read_config(config)},
        run_dir=None,
        cmd="validate",
        command=DEFAULT_COMMAND if command is None else command,
        worker_args=worker_args,
        cwd=cwd,
        env=env,
        max_queue=MAX_QUEUE,
    )
    with run:
        run._wait_for_hello(hello_timeout)
        report: dict[str, Any] = run._first_answer(timeout)
        return report
