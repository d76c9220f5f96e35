"""What happens before the engine starts: the run folder is checked, locked and opened."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import orjson

from trainwire_protocol.config import Config
from trainwire_protocol.errors import (
    NO_PERMISSION,
    Busy,
    DatasetInvalid,
    ModelLoadFailed,
    ResumeRefused,
    TrainwireError,
)
from trainwire_protocol.rundir import (
    ABANDONED_NAME,
    FINAL_NAME,
    LOCK_NAME,
    LOG_NAME,
    TEMPORARY_PREFIX,
    CheckpointInfo,
    LockInfo,
    lock_holder,
    read_manifest,
    this_host,
)

from .choice import choose
from .control_folder import clear_dead
from .ending import disk_error
from .engine_link import check_engine_installed
from .eventlog import EventLog
from .options import Options
from .past import Past, read_past
from .request import CONFIG_NAME, Request
from .runlock import RunLock

_OURS = (LOG_NAME, LOCK_NAME, CONFIG_NAME, FINAL_NAME, ABANDONED_NAME)


class Prepared(msgspec.Struct):
    """A run that is locked and logged, ready for an engine."""

    request: Request
    lock: RunLock
    log: EventLog
    run_id: str
    attempt: int
    resume_from: CheckpointInfo | None
    passed_over: list[tuple[Path, str]] = []


def check_inputs(config: Config) -> None:
    """Find what is plainly missing before an engine is started. Raises ModelLoadFailed or DatasetInvalid."""
    model = Path(config.model)
    if model.is_absolute():
        if not model.is_dir():
            raise ModelLoadFailed(
                f"There is no model folder {model}.",
                hint="Give a folder in mlx-lm or transformers layout, or a Hub id.",
            )
        if not os.access(model, os.R_OK | os.X_OK):
            raise ModelLoadFailed(
                f"The model folder {model} cannot be read: permission denied.", hint=NO_PERMISSION, path=str(model)
            )
        if not (model / "config.json").is_file():
            raise ModelLoadFailed(
                f"The model folder {model} has no config.json.", hint="Is it an adapter? Give the base model instead."
            )
    for text in config.data if isinstance(config.data, list) else [config.data]:
        if Path(text).is_absolute():
            _check_data(Path(text))


def _check_data(path: Path) -> None:
    if not path.exists():
        hint = "Relative paths start at the config file."
        if set("*?[") & set(path.name):
            hint = "Patterns are not expanded: list the files, or give their folder."
        raise DatasetInvalid(f"There is no data file or folder {path}.", hint=hint, path=str(path))
    if not os.access(path, os.R_OK):
        raise DatasetInvalid(f"The data {path} cannot be read: permission denied.", hint=NO_PERMISSION, path=str(path))
    if path.is_file() and path.stat().st_size == 0:
        raise DatasetInvalid(f"The data file {path} is empty.", hint="It needs one JSON object a line.", path=str(path))


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
        raise disk_error(f"The run folder {run_dir} cannot be made: {error.strerror}.", error) from None
    lock = RunLock(run_dir)
    if not _take_lock(lock, options.lock_wait, cancelled, announce):
        return None
    lock.describe(LockInfo(pid=os.getpid(), since_ms=time.time_ns() // 1_000_000, phase="loading"))
    clear_dead()
    try:
        past = read_past(run_dir / LOG_NAME)
        if request.overwrite and config.resume == "never":
            _remove_run(run_dir)
            past = Past()
        resume_from, passed_over = choose(config, run_dir, past)
        log = EventLog(run_dir)
        _keep_config(run_dir, config)
    except BaseException:
        lock.release()
        raise
    run_id = past.run_id or (os.urandom(8).hex() if options.clock == "real" else "0" * 16)
    return Prepared(request, lock, log, run_id, past.attempts + 1, resume_from, passed_over)


def folder_problem(config: Config) -> TrainwireError | None:
    """Say why a run could not begin in its folder now, without waiting and without a trace; None if it could."""
    run_dir = Path(config.run_dir or "")
    try:
        _check_folder(run_dir, config)
    except TrainwireError as error:
        return error
    except OSError as error:
        return disk_error(f"The run folder {run_dir} cannot be looked at: {error.strerror}.", error)
    holder = lock_holder(run_dir)
    # An engine that was left behind is waited for.
    return _busy(run_dir, holder) if holder and not holder.orphan else None


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
        if not holder.orphan or time.monotonic() >= deadline:
            raise _busy(lock.path.parent, holder)
        if cancelled():
            return False
        if not announced:
            announced = True
            announce("Waiting for the engine of an earlier attempt, which is still saving.")
        # flock has no wait with a time-out; the orphan leaves within seconds.
        time.sleep(0.05)
    return True


def _busy(run_dir: Path, holder: LockInfo) -> Busy:
    since = ""
    if holder.since_ms:
        since = time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(holder.since_ms / 1000))
    phase = f", {holder.phase}" if holder.phase else ""
    if holder.orphan:
        message = f"The engine that process {holder.pid} left behind still holds the run folder {run_dir}."
        hint = f"Wait for it, or end process {holder.engine_pid or 'trainwire_engine'}."
    else:
        who = f"Process {holder.pid}{_elsewhere(holder)}" if holder.pid else "Another process"
        message = f"{who} holds the run folder {run_dir}{since}{phase}."
        hint = f"Wait for it, or run `trainwire stop {run_dir}`."
    return Busy(message, hint=hint, pid=holder.pid, since=holder.since_ms, phase=holder.phase)


def _elsewhere(holder: LockInfo) -> str:
    return f" on {holder.host}" if holder.host not in ("", this_host()) else ""


def _remove_run(run_dir: Path) -> None:
    """Remove what an earlier run wrote, and nothing else."""
    for entry in list(run_dir.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            if (
                read_manifest(entry) is not None
                or entry.name == ABANDONED_NAME
                or entry.name.startswith(TEMPORARY_PREFIX)
            ):
                import shutil  # slow to import, for the decompressors that come with it

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
        raise disk_error(f"{run_dir / CONFIG_NAME} cannot be written: {error.strerror}.", error) from None
