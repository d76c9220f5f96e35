"""The run folder as an interface: the names in it, which checkpoints are whole, and who holds its lock."""

import contextlib
import fcntl
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import orjson
from msgspec import Meta

from .events import CheckpointKind

LOG_NAME = "events.jsonl"
LOCK_NAME = "run.lock"
MANIFEST_NAME = "manifest.json"
STATE_NAME = "trainer_state.json"
FINAL_NAME, BEST_NAME = "final", "best"
ABANDONED_NAME = "abandoned"
"""Folder that checkpoints of an abandoned timeline are moved to."""
TEMPORARY_PREFIX = ".writing-"
"""Start of the names of checkpoints that are not whole yet."""


def checkpoint_name(step: int) -> str:
    """Name a periodic checkpoint by its step."""
    return f"checkpoint-{step:06d}"


def emergency_name(step: int) -> str:
    """Name an emergency checkpoint by its step."""
    return f"emergency-checkpoint-{step:06d}"


class FileEntry(msgspec.Struct):
    """Size in bytes and SHA-256 (hex) of a file."""

    size: Annotated[int, Meta(ge=0)]
    sha256: str


class Manifest(msgspec.Struct):
    """What a whole checkpoint holds; `manifest.json` is written last."""

    format: int
    step: int
    kind: CheckpointKind
    files: dict[str, FileEntry]
    created_ms: int = 0


class CheckpointInfo(msgspec.Struct, frozen=True):
    """A checkpoint folder whose manifest can be read."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Updates done when it was written."""
        return self.manifest.step

    @property
    def kind(self) -> CheckpointKind:
        """Why it was written."""
        return self.manifest.kind

    @property
    def bytes(self) -> int:
        """Size of its files."""
        return sum(entry.size for entry in self.manifest.files.values())


def read_log(run_dir: Path, kinds: Collection[str]) -> Iterator[dict[str, Any]]:
    """Go through the whole lines of a run's log that are events of these types, as JSON objects.

    Void steps of abandoned timelines are among them; a missing log has no lines.
    """
    marks = {f'{{"type":"{kind}"'.encode() for kind in kinds}
    missing = contextlib.suppress(FileNotFoundError, NotADirectoryError)
    with missing, (run_dir / LOG_NAME).open("rb") as file:
        for line in file:
            if line[: line.find(b",")] in marks and line.endswith(b"\n"):
                with contextlib.suppress(orjson.JSONDecodeError):
                    yield orjson.loads(line)


class LockInfo(msgspec.Struct, omit_defaults=True):
    """What the holder of a run's lock wrote about itself."""

    pid: int
    since_ms: int
    run_id: str = ""
    phase: str = ""
    socket: str | None = None
    engine_pid: int | None = None
    host: str = ""

    @property
    def orphan(self) -> bool:
        """Whether the lock is held by an engine alone: its worker, on this machine, is dead."""
        return self.pid > 0 and self.host in ("", this_host()) and not _lives(self.pid)


def this_host() -> str:
    """Name the machine, or the container, within which process ids have a meaning."""
    return os.uname().nodename


def _lives(pid: int) -> bool:
    """Say whether a process lives; one that nobody has waited for yet is dead."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (OSError, IndexError):
        return True


def read_manifest(folder: Path) -> Manifest | None:
    """Read a checkpoint's manifest; None if there is none, or if it is broken."""
    try:
        return msgspec.json.decode((folder / MANIFEST_NAME).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return None


def file_sha256(path: Path) -> str:
    """Hash a file without holding it in memory."""
    import hashlib  # OpenSSL takes long to load: only who hashes waits for it

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def defect(folder: Path, *, hashes: bool = True) -> str | None:
    """Say what is wrong with a checkpoint, or None if every file is as its manifest says.

    Without `hashes` only presence and sizes are compared.
    """
    if not folder.is_dir():
        return "there is no such folder"
    manifest = read_manifest(folder)
    if manifest is None:
        return f"{MANIFEST_NAME} is missing or broken"
    for name, entry in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != entry.size:
            return f"{name} has {size} bytes instead of {entry.size}"
        try:
            if hashes and file_sha256(path) != entry.sha256:
                return f"{name} has another SHA-256 than its manifest"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def list_checkpoints(run_dir: Path) -> list[CheckpointInfo]:
    """Give the checkpoints of a run, newest first; among those of one step `final` comes first."""
    found = []
    with contextlib.suppress(OSError):
        for folder in run_dir.iterdir():
            if folder.is_dir() and not folder.name.startswith(".") and folder.name != ABANDONED_NAME:
                manifest = read_manifest(folder)
                if manifest is not None:
                    found.append(CheckpointInfo(folder.absolute(), manifest))
    return sorted(found, key=lambda c: (-c.step, c.path.name != FINAL_NAME, c.path.name == BEST_NAME, c.path.name))


def newest_whole_checkpoint(run_dir: Path) -> tuple[CheckpointInfo | None, list[tuple[Path, str]]]:
    """Find the newest checkpoint that is whole, and name the newer ones that are not, each with its defect."""
    broken: list[tuple[Path, str]] = []
    for info in list_checkpoints(run_dir):
        problem = defect(info.path)
        if problem is None:
            return info, broken
        broken.append((info.path, problem))
    return None, broken


def lock_holder(run_dir: Path) -> LockInfo | None:
    """Give what the living holder of the run's lock wrote, or None if nobody holds it."""
    path = run_dir / LOCK_NAME
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            try:
                return msgspec.json.decode(path.read_bytes(), type=LockInfo)
            except (OSError, msgspec.DecodeError):
                return LockInfo(pid=0, since_ms=0)
        return None
    finally:
        os.close(descriptor)
