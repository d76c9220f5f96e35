"""Checkpoints on disk: whole or not there, the older ones removed, one writer at a time, in the background.

A checkpoint is written to a folder beside it, every file flushed, the manifest last; then the folder is renamed
and the rename flushed. What a crash leaves behind starts with a dot and is put in order at the next start.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from trainwire_engine.disk import Disk
from trainwire_engine.save_lock import SaveLock
from trainwire_engine.snapshot import Snapshot
from trainwire_engine.tidying import REMOVING, REPLACED, abandoned_checkpoints
from trainwire_protocol.events import CheckpointKind
from trainwire_protocol.rundir import (
    ABANDONED_NAME,
    MANIFEST_NAME,
    TEMPORARY_PREFIX,
    FileEntry,
    Manifest,
    checkpoint_name,
    list_checkpoints,
    read_manifest,
)

FORMAT = 1


@dataclass(frozen=True)
class Target:
    """One name that a checkpoint gets; `order` is the number of the order that asked for it."""

    name: str
    kind: CheckpointKind
    order: int | None = None


@dataclass(frozen=True)
class Done:
    """What became of a target: the folder's size, or the error that kept it from being written."""

    target: Target
    path: Path
    step: int
    bytes: int = 0
    error: Exception | None = None


@dataclass
class _Job:
    snapshot: Snapshot
    targets: Sequence[Target]
    results: list[Done] = field(default_factory=list)


class Saver:
    """Writes the checkpoints of a run folder; `start` returns at once if it may write in the background.

    With a lock there are others who may write there too, each with a Saver of its own.
    """

    def __init__(
        self,
        run_dir: Path,
        start_step: int,
        max_checkpoints: Callable[[], int],
        disk: Disk | None = None,
        lock: SaveLock | None = None,
    ) -> None:
        self.run_dir = run_dir
        self._disk = disk or Disk()
        self._lock = lock
        self._max_checkpoints = max_checkpoints
        self._thread: threading.Thread | None = None
        self._job: _Job | None = None
        self._done: list[Done] = []
        # By their numbers too: another writer may give the names anew.
        self._abandoned = [(folder, folder.stat().st_ino) for folder in abandoned_checkpoints(run_dir, start_step)]

    def start(self, snapshot: Snapshot, targets: Sequence[Target], *, background: bool) -> None:
        """Write a snapshot under its first target, and give it the others' names too; waits for the one before."""
        self.wait()
        self._job = job = _Job(snapshot, targets)
        if background:
            self._thread = threading.Thread(target=self._write_all, args=(job,), name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._write_all(job)
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._job is not None:
            self._done += self._job.results
            self._job = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written now."""
        return self._thread is not None and self._thread.is_alive()

    def collect(self) -> list[Done]:
        """Take what was finished since the last time, without waiting."""
        if not self.busy:
            self.wait()
        done, self._done = self._done, []
        return done

    def link(self, source: Path, step: int, targets: Sequence[Target]) -> bool:
        """Give a whole checkpoint more names, by hard links; false if that is not possible."""
        try:
            self._done += [self._link(source, step, target) for target in targets]
        except OSError:
            return False
        return True

    @contextmanager
    def alone(self, *, wait: bool = True) -> Iterator[bool]:
        """Keep other ranks from writing while inside; without `wait` it says whether none was writing."""
        if self._lock is None:
            yield True
            return
        with self._lock.held(wait=wait) as mine:
            yield mine

    def of_another(self, step: int) -> Path | None:
        """Find what another rank has written of this run at a step or later."""
        if self._lock is None:
            return None
        past = {number for _, number in self._abandoned}
        newer = (info.path for info in list_checkpoints(self.run_dir) if info.step >= step)
        return next((path for path in newer if path.stat().st_ino not in past), None)

    def _write_all(self, job: _Job) -> None:
        source: Path | None = None
        for target in job.targets:
            path = self.run_dir / target.name
            try:
                if source is None:
                    done = self._write(job.snapshot, target)
                    source = done.path
                else:
                    done = self._link(source, job.snapshot.step, target)
            except Exception as error:
                done = Done(target, path, job.snapshot.step, error=error)
            job.results.append(done)

    def _write(self, snapshot: Snapshot, target: Target) -> Done:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        if self._disk.free(self.run_dir) < snapshot.size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.run_dir))

        def fill(folder: Path) -> dict[str, FileEntry]:
            return {name: self._disk.write(folder / name, snapshot.chunks(name)) for name in snapshot.files}

        return self._publish(snapshot.step, target, fill)

    def _link(self, source: Path, step: int, target: Target) -> Done:
        manifest = read_manifest(source)
        if manifest is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))

        def fill(folder: Path) -> dict[str, FileEntry]:
            for name in manifest.files:
                self._disk.copy(source / name, folder / name)
            return manifest.files

        return self._publish(step, target, fill)

    def _publish(self, step: int, target: Target, fill: Callable[[Path], dict[str, FileEntry]]) -> Done:
        with self.alone():
            return self._publish_alone(step, target, fill)

    def _publish_alone(self, step: int, target: Target, fill: Callable[[Path], dict[str, FileEntry]]) -> Done:
        """Write a folder aside and give it its name once it is whole; leaves nothing behind on an error."""
        aside, path = self.run_dir / f"{TEMPORARY_PREFIX}{target.name}", self.run_dir / target.name
        try:
            if aside.exists():
                self._disk.remove(aside)
            self._disk.make_folder(aside)
            files = fill(aside)
            manifest = Manifest(FORMAT, step, target.kind, files, time.time_ns() // 1_000_000)
            self._disk.write(aside / MANIFEST_NAME, [msgspec.json.format(msgspec.json.encode(manifest), indent=1)])
            self._disk.flush_folder(aside)
            self._move_abandoned()
            self._install(aside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self._disk.remove(aside)
            raise
        if target.kind == "periodic":
            self._retire()
        return Done(target, path, step, sum(entry.size for entry in files.values()))

    def _install(self, aside: Path, path: Path) -> None:
        """Give a whole folder its name. The one that had the name before is there until that moment."""
        if not path.exists():
            self._disk.rename(aside, path)
            self._disk.flush_folder(self.run_dir)
        elif self._disk.exchange(aside, path):
            self._disk.flush_folder(self.run_dir)
            with contextlib.suppress(OSError):
                self._disk.remove(aside)
        else:
            self._replace(aside, path)

    def _replace(self, aside: Path, path: Path) -> None:
        """Replace a folder in two steps; a crash between them is put right at the next start."""
        replaced = self.run_dir / f"{REPLACED}{path.name}"
        if replaced.exists():
            self._disk.remove(replaced)
        self._disk.rename(path, replaced)
        try:
            self._disk.rename(aside, path)
            self._disk.flush_folder(self.run_dir)
        except OSError:
            if not path.exists():
                replaced.rename(path)
            raise
        with contextlib.suppress(OSError):
            self._disk.remove(replaced)

    def _move_abandoned(self) -> None:
        """Move aside what an abandoned timeline left above the resumed step: the run has a newer past now."""
        while self._abandoned:
            folder, number = self._abandoned[-1]
            if folder.exists() and folder.stat().st_ino == number:
                target = self.run_dir / ABANDONED_NAME
                target.mkdir(exist_ok=True)
                place, copies = target / folder.name, 1
                while place.exists():
                    copies += 1
                    place = target / f"{folder.name}.{copies}"
                self._disk.rename(folder, place)
            self._abandoned.pop()

    def _retire(self) -> None:
        """Remove the oldest periodic checkpoints beyond the limit; what cannot be removed now stays.

        One that somebody gave a name of its own is not the run's any more.
        """
        keep = self._max_checkpoints()
        if not keep:
            return
        periodic = [
            c.path
            for c in list_checkpoints(self.run_dir)
            if c.manifest.kind == "periodic" and c.path.name == checkpoint_name(c.step)
        ]
        for path in periodic[keep:]:
            going = self.run_dir / f"{REMOVING}{path.name}"
            with contextlib.suppress(OSError):
                self._disk.rename(path, going)
                self._disk.remove(going)
