"""What happens before the engine starts: the config is checked, the run folder locked, the checkpoint chosen."""

import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import orjson

from trainwire_protocol.config import ON_RESUME, Config, OnResume
from trainwire_protocol.config_load import build_config, parse_assignment, read_config_file
from trainwire_protocol.errors import Busy, ConfigInvalid, DatasetInvalid, IoError, ModelLoadFailed, ResumeRefused
from trainwire_protocol.rundir import (
    ABANDONED_NAME,
    FINAL_NAME,
    LOCK_NAME,
    LOG_NAME,
    TEMPORARY_PREFIX,
    CheckpointInfo,
    LockInfo,
    defect,
    newest_whole_checkpoint,
    read_manifest,
)

from .engine_link import check_engine_installed
from .eventlog import EventLog, Past, RunLock, read_past
from .options import Options, check_paths

CONFIG_NAME = "config.json"
"""Copy of the config in the run folder, by which a run can be resumed without the file it came from."""
_OURS = (LOG_NAME, LOCK_NAME, CONFIG_NAME, FINAL_NAME, ABANDONED_NAME)


@dataclass
class Request:
    """What is to be run: the checked config, and how to treat a run that the folder holds."""

    config: Config
    overwrite: bool
    linger: bool
    resume_args: list[str]
    remark: str | None = None


@dataclass
class Prepared:
    """A run that is locked and logged, ready for an engine."""

    request: Request
    lock: RunLock
    log: EventLog
    run_id: str
    attempt: int
    resume_from: CheckpointInfo | None
    passed_over: list[tuple[Path, str]] = field(default_factory=list)


def request_from_arguments(options: Options) -> Request:
    """Read the config of `trainwire run`. Raises ConfigInvalid."""
    path = options.config
    assert path is not None
    if path.suffix == ".json":
        values = _read_json(path)
    else:
        values = read_config_file(path)
    for word in options.assignments:
        key, value = parse_assignment(word)
        values[key] = value
    if options.resume is not None:
        values["resume"] = options.resume
    config = build_config(values, path.absolute().parent, run_name=path.stem)
    arguments = ["run", str(path.absolute()), *options.assignments]
    return Request(config, options.overwrite, options.linger, arguments)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ConfigInvalid(f"The config file {path} cannot be read: {error.strerror}.") from None
    except orjson.JSONDecodeError as error:
        raise ConfigInvalid(f"The config file {path} is not JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ConfigInvalid(f"The config file {path} holds no JSON object.")
    return values


def request_from_command(
    values: Mapping[str, Any], options: Options, *, resume: str | None, overwrite: bool, linger: bool
) -> Request:
    """Check the config of a `start` or `validate` command. Raises ConfigInvalid or ForbiddenPath."""
    merged = {**values, **({"resume": resume} if resume is not None else {})}
    config = build_config(merged, Path.cwd())
    paths = [config.model, config.run_dir, config.start_from, config.cache_dir]
    for data in (config.data, config.valid_data):
        paths += data if isinstance(data, list) else [data]
    if isinstance(config.prompts, str):
        paths.append(config.prompts)
    if config.resume not in ("auto", "never", "latest"):
        paths.append(config.resume)
    if config.chat_template and "{" not in config.chat_template:
        paths.append(config.chat_template)
    check_paths([path for path in paths if path is not None], options.root)
    assert config.run_dir is not None
    return Request(config, overwrite, linger, ["run", str(Path(config.run_dir) / CONFIG_NAME)])


def check_inputs(config: Config) -> None:
    """Find what is plainly missing before an engine is started. Raises ModelLoadFailed or DatasetInvalid."""
    model = Path(config.model)
    if model.is_absolute():
        if not model.is_dir():
            raise ModelLoadFailed(
                f"There is no model folder {model}.",
                hint="Give a folder in mlx-lm or transformers layout, or a Hub id.",
            )
        if not (model / "config.json").is_file():
            raise ModelLoadFailed(
                f"The model folder {model} has no config.json.", hint="Is it an adapter? Give the base model instead."
            )
    for key, value in (("data", config.data), ("valid_data", config.valid_data)):
        for text in value if isinstance(value, list) else [value]:
            if text is not None and key == "data" and Path(text).is_absolute():
                _check_data(Path(text))


def _check_data(path: Path) -> None:
    if not path.exists():
        raise DatasetInvalid(
            f"There is no data file or folder {path}.", hint="Relative paths start at the config file."
        )
    if not os.access(path, os.R_OK):
        raise DatasetInvalid(f"The data {path} cannot be read: permission denied.")
    if path.is_file() and path.stat().st_size == 0:
        raise DatasetInvalid(f"The data file {path} is empty.", hint="It needs one JSON object a line.")


def prepare(
    request: Request, options: Options, cancelled: Callable[[], bool], announce: Callable[[str], None]
) -> Prepared | None:
    """Lock the run folder and choose where to go on; None if it was cancelled meanwhile.

    Nothing is written into a folder that is refused. Raises the errors of the protocol.
    """
    config = request.config
    assert config.run_dir is not None
    run_dir = Path(config.run_dir)
    if options.engine == "mlx":
        check_engine_installed()
        check_inputs(config)
    _check_folder(run_dir, config)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise IoError(f"The run folder {run_dir} cannot be made: {error.strerror}.") from None
    lock = RunLock(run_dir)
    if not _take_lock(lock, options.lock_wait, cancelled, announce):
        return None
    try:
        past = read_past(run_dir / LOG_NAME)
        if request.overwrite and config.resume == "never":
            _remove_run(run_dir)
            past = Past()
        resume_from, passed_over = _choose(config, run_dir, past)
        log = EventLog(run_dir)
    except BaseException:
        lock.release()
        raise
    _keep_config(run_dir, config)
    run_id = past.run_id or (secrets.token_hex(8) if options.clock == "real" else "0" * 16)
    return Prepared(request, lock, log, run_id, past.attempts + 1, resume_from, passed_over)


def _check_folder(run_dir: Path, config: Config) -> None:
    """Refuse a folder that holds something else than a run."""
    if not run_dir.exists():
        return
    if not run_dir.is_dir():
        raise ResumeRefused(f"run_dir {run_dir} is a file.", hint="Choose another run_dir.")
    names = {entry.name for entry in run_dir.iterdir()}
    foreign = {n for n in names if not n.startswith((".", "rows", "trainwire")) and n not in _OURS}
    if LOG_NAME not in names and foreign:
        raise ResumeRefused(
            f"The run folder {run_dir} holds something else: {', '.join(sorted(foreign)[:3])}.",
            hint="Choose an empty run_dir, or one that trainwire made.",
        )


def _take_lock(lock: RunLock, patience: float, cancelled: Callable[[], bool], announce: Callable[[str], None]) -> bool:
    deadline = time.monotonic() + patience
    announced = False
    while (holder := lock.acquire()) is not None:
        if not _orphaned(holder) or time.monotonic() >= deadline:
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since_ms / 1000))
            raise Busy(
                f"Process {holder.pid} holds the run folder {lock.path.parent} since {since}"
                + (f", {holder.phase}." if holder.phase else "."),
                hint=f"Wait for it, or run `trainwire stop {lock.path.parent}`.",
                pid=holder.pid,
                since=holder.since_ms,
                phase=holder.phase,
            )
        if cancelled():
            return False
        if not announced:
            announced = True
            announce("Waiting for the engine of an earlier attempt, which is still saving.")
        # flock has no wait with a time-out; the orphan leaves within seconds.
        time.sleep(0.05)
    return True


def _orphaned(holder: LockInfo) -> bool:
    """Say whether only an engine whose worker is gone holds the lock."""
    if holder.pid <= 0:
        return False
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _choose(config: Config, run_dir: Path, past: Past) -> tuple[CheckpointInfo | None, list[tuple[Path, str]]]:
    """Decide which checkpoint the run goes on from, by the `resume` key."""
    if config.resume == "never":
        if past.attempts:
            raise ResumeRefused(
                f"The run folder {run_dir} holds a run, and resume is never.",
                hint="Choose another run_dir, or add --overwrite to remove that run.",
            )
        return None, []
    if config.resume not in ("auto", "latest"):
        return _named(Path(config.resume)), []
    found, passed_over = newest_whole_checkpoint(run_dir)
    if config.resume == "latest" and found is None:
        raise ResumeRefused(f"The run folder {run_dir} has no whole checkpoint.", hint='Use resume = "auto".')
    if past.finished and past.config is not None:
        _check_raised(config, past.config, run_dir)
    if found is None and past.config is not None:
        _check_same_run(config, past.config, run_dir)
    return found, passed_over


def _named(folder: Path) -> CheckpointInfo:
    manifest = read_manifest(folder)
    problem = defect(folder)
    if manifest is None or problem is not None:
        raise ResumeRefused(
            f"The checkpoint {folder} cannot be used: {problem}.",
            hint="`start_from` begins a new run from an adapter or weights alone.",
        )
    return CheckpointInfo(folder.absolute(), manifest)


def _check_raised(config: Config, before: Mapping[str, Any], run_dir: Path) -> None:
    """Refuse to go on with a finished run unless its end was moved."""
    key = "max_steps" if config.max_steps else "num_epochs"
    was, now = before.get(key) or 0, getattr(config, key)
    if bool(before.get("max_steps")) == bool(config.max_steps) and now <= was:
        raise ResumeRefused(
            f"The run in {run_dir} is finished.",
            hint=f"Raise {key} (it is {was}) to go on from its final checkpoint, or choose another run_dir.",
        )


def _check_same_run(config: Config, before: Mapping[str, Any], run_dir: Path) -> None:
    """Refuse another run's folder even where it has no checkpoint that could tell."""
    now = msgspec.to_builtins(config)
    for key, rule in ON_RESUME.items():
        if rule is OnResume.FIXED and key in before and now[key] is not None and before[key] != now[key]:
            raise ResumeRefused(
                f"The run folder {run_dir} holds another run: its {key} is {before[key]!r}, not {now[key]!r}.",
                hint="Choose another run_dir.",
            )


def _remove_run(run_dir: Path) -> None:
    """Remove what an earlier run wrote, and nothing else."""
    for entry in list(run_dir.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            if (
                read_manifest(entry) is not None
                or entry.name == ABANDONED_NAME
                or entry.name.startswith(TEMPORARY_PREFIX)
            ):
                shutil.rmtree(entry)
        elif entry.name in (LOG_NAME, CONFIG_NAME):
            entry.unlink()


def _keep_config(run_dir: Path, config: Config) -> None:
    values = {k: v for k, v in msgspec.to_builtins(config).items() if v is not None and k != "resume"}
    temporary = run_dir / f".{CONFIG_NAME}.tmp"
    try:
        temporary.write_bytes(orjson.dumps(values, option=orjson.OPT_INDENT_2) + b"\n")
        temporary.replace(run_dir / CONFIG_NAME)
    except OSError as error:
        raise IoError(f"{run_dir / CONFIG_NAME} cannot be written: {error.strerror}.") from None
