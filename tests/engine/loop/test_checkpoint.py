"""Checkpoints appear whole or not at all, whatever fails while one is written."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from trainwire_engine.checkpoint import Saver, Target
from trainwire_engine.disk import Disk
from trainwire_engine.snapshot import Snapshot
from trainwire_engine.tidying import put_in_order
from trainwire_protocol.rundir import FileEntry, defect, list_checkpoints, newest_whole_checkpoint, read_manifest


def snapshot(step: int, size: int = 5000) -> Snapshot:
    files = {
        "adapters.safetensors": bytes([step % 256]) * size,
        "trainer_state.json": b"{}",
        "optimizer.safetensors": b"o",
    }
    return Snapshot(step, dict(files))


def periodic(step: int) -> Target:
    return Target(f"checkpoint-{step:06d}", "periodic")


def saver(run_dir: Path, disk: Disk | None = None, *, start_step: int = 0, keep: int = 3) -> Saver:
    return Saver(run_dir, start_step, lambda: keep, disk)


def save(writer: Saver, step: int, *targets: Target, background: bool = False) -> list[Exception | None]:
    """Write a checkpoint; what became of each of its names."""
    writer.start(snapshot(step), targets or (periodic(step),), background=background)
    writer.wait()
    return [done.error for done in writer.collect()]


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.iterdir())


class FaultyDisk(Disk):
    """Counts every step on the file system; the one with the chosen number fails."""

    can_exchange = True

    def __init__(self, failing: int = -1, error: int = errno.EIO) -> None:
        self.steps: list[str] = []
        self.failing = failing
        self.error = error

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if len(self.steps) - 1 == self.failing:
            raise OSError(self.error, os.strerror(self.error))

    def make_folder(self, path: Path) -> None:
        self._step("make_folder")
        super().make_folder(path)

    def put(self, descriptor: int, piece: memoryview) -> None:
        # Half of it is written before the disk fails.
        if len(self.steps) == self.failing:
            super().put(descriptor, piece[: len(piece) // 2])
        self._step("put")
        super().put(descriptor, piece)

    def flush(self, descriptor: int) -> None:
        self._step("flush")
        super().flush(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        self._step("rename")
        super().rename(source, target)

    def exchange(self, one: Path, other: Path) -> bool:
        if not self.can_exchange:
            return False
        self._step("exchange")
        return super().exchange(one, other)


class PlainDisk(FaultyDisk):
    """A file system that cannot swap two names."""

    can_exchange = False


def steps_of_a_replacing_save(tmp_path: Path, disk: FaultyDisk) -> list[str]:
    writer = saver(tmp_path / "counted", disk)
    save(writer, 1, Target("best", "best"))
    disk.steps.clear()
    save(writer, 2, Target("best", "best"))
    return disk.steps


def test_every_write_flush_and_rename_of_a_save_is_a_step_that_can_fail(tmp_path: Path) -> None:
    # Three files and a manifest, then the folder beside, the names, the run folder.
    written = ["make_folder", *["put", "flush"] * 4, "flush"]
    assert steps_of_a_replacing_save(tmp_path, FaultyDisk()) == [*written, "exchange", "flush"]
    assert steps_of_a_replacing_save(tmp_path, PlainDisk()) == [*written, "rename", "rename", "flush"]


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EACCES])
@pytest.mark.parametrize(
    ("kind", "failing"), [(FaultyDisk, n) for n in range(12)] + [(PlainDisk, n) for n in range(10, 13)]
)
def test_a_fault_anywhere_in_a_save_leaves_whole_checkpoints_only(
    tmp_path: Path, kind: type[FaultyDisk], failing: int, error: int
) -> None:
    run_dir = tmp_path / "run"
    assert save(saver(run_dir), 1, periodic(1), Target("best", "best")) == [None, None]
    disk = kind(failing, error)
    writer = saver(run_dir, disk, start_step=1)
    (failure,) = save(writer, 2, Target("best", "best"))
    assert isinstance(failure, OSError)
    assert failure.errno == error
    assert len(disk.steps) == failing + 1
    visible = {path.name: defect(path) for path in run_dir.iterdir() if not path.name.startswith(".")}
    assert visible == {"checkpoint-000001": None, "best": None}
    # With room again the next save works, and nothing is left lying about.
    assert save(writer, 3, Target("best", "best")) == [None]
    put_in_order(run_dir)
    assert names(run_dir) == ["best", "checkpoint-000001"]
    manifest = read_manifest(run_dir / "best")
    assert manifest is not None
    assert (manifest.step, defect(run_dir / "best")) == (3, None)


def test_a_full_disk_costs_one_checkpoint_and_a_later_one_succeeds(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", mount]).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        writer = saver(mount / "run", keep=0)
        ballast = mount / "ballast"
        assert save(writer, 1) == [None]
        # Less is free than the checkpoint needs: nothing is written at all.
        ballast.write_bytes(b"x" * (200 << 10))
        writer.start(snapshot(2, 60 << 10), [periodic(2)], background=False)
        (failure,) = [done.error for done in writer.collect()]
        assert isinstance(failure, OSError)
        assert failure.errno == errno.ENOSPC
        # The free space is misjudged: the disk itself says no in the middle of a file.
        blind = saver(mount / "run", BlindDisk(), start_step=1, keep=0)
        blind.start(snapshot(3, 60 << 10), [periodic(3)], background=False)
        (failure,) = [done.error for done in blind.collect()]
        assert isinstance(failure, OSError)
        assert failure.errno == errno.ENOSPC
        assert names(mount / "run") == ["checkpoint-000001"]
        ballast.unlink()
        assert save(writer, 4) == [None]
        assert [c.step for c in list_checkpoints(mount / "run") if defect(c.path) is None] == [4, 1]
    finally:
        subprocess.run(["umount", mount], check=True)


class BlindDisk(Disk):
    def free(self, path: Path) -> int:
        return 1 << 60


def test_permission_lost_and_given_back(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    writer = saver(run_dir, FaultyDisk(0, errno.EACCES))
    run_dir.mkdir()
    (failure,) = save(writer, 1)
    assert isinstance(failure, PermissionError)
    assert save(writer, 2) == [None]
    assert names(run_dir) == ["checkpoint-000002"]


class StoppedHere(BaseException):
    """Stands for a process that is gone."""


class DyingDisk(FaultyDisk):
    """The process dies at the chosen step: nothing is cleaned up."""

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if len(self.steps) - 1 >= self.failing:
            raise StoppedHere

    def remove(self, path: Path) -> None:
        raise StoppedHere


class DyingPlainDisk(DyingDisk):
    can_exchange = False


@pytest.mark.parametrize(
    ("kind", "dying"), [(DyingDisk, n) for n in range(12)] + [(DyingPlainDisk, n) for n in range(10, 13)]
)
def test_a_death_anywhere_in_a_save_is_put_in_order_at_the_next_start(
    tmp_path: Path, kind: type[DyingDisk], dying: int
) -> None:
    run_dir = tmp_path / "run"
    save(saver(run_dir), 1, Target("best", "best"))
    with pytest.raises(StoppedHere):
        save(saver(run_dir, kind(dying), start_step=1), 2, Target("best", "best"))
    if kind is DyingDisk:
        # Where names can be swapped the checkpoint is there at every moment, also before anything is put in order.
        assert defect(run_dir / "best") is None
    put_in_order(run_dir)
    assert names(run_dir) == ["best"]
    assert defect(run_dir / "best") is None


def test_a_writer_that_breaks_is_told_like_a_failed_save(tmp_path: Path) -> None:
    class Broken(Disk):
        def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileEntry:
            raise ZeroDivisionError

    writer = saver(tmp_path, Broken())
    writer.start(snapshot(1), [periodic(1)], background=True)
    writer.wait()
    (done,) = writer.collect()
    assert isinstance(done.error, ZeroDivisionError)


def test_periodic_checkpoints_beyond_the_limit_go_and_all_others_stay(tmp_path: Path) -> None:
    writer = saver(tmp_path, keep=2)
    save(writer, 1, periodic(1), Target("best", "best"))
    save(writer, 2, Target("good", "manual"))
    save(writer, 3, Target("emergency-checkpoint-000003", "emergency"))
    for step in (4, 5, 6):
        save(writer, step)
    save(writer, 7, Target("checkpoint-000007", "manual"))
    save(writer, 8, Target("final", "final"))
    expected = ["best", "checkpoint-000005", "checkpoint-000006", "checkpoint-000007"]
    assert names(tmp_path) == [*expected, "emergency-checkpoint-000003", "final", "good"]
    assert all(defect(tmp_path / name) is None for name in names(tmp_path))


def test_a_checkpoint_that_somebody_renamed_stays(tmp_path: Path) -> None:
    writer = saver(tmp_path, keep=1)
    save(writer, 1)
    (tmp_path / "checkpoint-000001").rename(tmp_path / "dear-to-me")
    for step in (2, 3):
        save(writer, step)
    assert names(tmp_path) == ["checkpoint-000003", "dear-to-me"]


def test_no_limit_keeps_all(tmp_path: Path) -> None:
    writer = saver(tmp_path, keep=0)
    for step in range(1, 8):
        save(writer, step)
    assert len(names(tmp_path)) == 7


def test_the_older_checkpoint_goes_only_after_the_newer_one_is_whole(tmp_path: Path) -> None:
    disk = WatchedDisk(tmp_path)
    writer = saver(tmp_path, disk, keep=1)
    save(writer, 1)
    save(writer, 2)
    assert disk.seen_at_removal == [["checkpoint-000002"]]
    assert names(tmp_path) == ["checkpoint-000002"]


class WatchedDisk(Disk):
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.seen_at_removal: list[list[str]] = []

    def remove(self, path: Path) -> None:
        self.seen_at_removal.append([c.path.name for c in list_checkpoints(self.run_dir) if defect(c.path) is None])
        super().remove(path)


def test_what_cannot_be_removed_now_does_not_fail_the_save(tmp_path: Path) -> None:
    class Stubborn(Disk):
        def remove(self, path: Path) -> None:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    writer = saver(tmp_path, Stubborn(), keep=1)
    assert save(writer, 1) == [None]
    assert save(writer, 2) == [None]
    put_in_order(tmp_path)
    assert names(tmp_path) == ["checkpoint-000002"]


def test_a_second_name_shares_the_files_and_survives_the_first(tmp_path: Path) -> None:
    writer = saver(tmp_path)
    assert save(writer, 1, periodic(1), Target("best", "best")) == [None, None]
    one, two = (tmp_path / name / "adapters.safetensors" for name in ("checkpoint-000001", "best"))
    assert one.stat().st_ino == two.stat().st_ino
    shutil.rmtree(tmp_path / "checkpoint-000001")
    assert defect(tmp_path / "best") is None


def test_a_file_system_without_links_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    assert save(saver(tmp_path), 1, periodic(1), Target("best", "best")) == [None, None]
    assert defect(tmp_path / "best") is None


def test_a_save_in_the_background_is_collected_only_once_it_is_whole(tmp_path: Path) -> None:
    going = threading.Event()

    class Slow(Disk):
        def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileEntry:
            assert going.wait(90)
            return super().write(path, chunks)

    writer = saver(tmp_path, Slow())
    writer.start(snapshot(1), [periodic(1)], background=True)
    assert writer.collect() == []
    assert [c.path for c in list_checkpoints(tmp_path)] == []
    going.set()
    writer.wait()
    (done,) = writer.collect()
    assert (done.error, done.path) == (None, tmp_path / "checkpoint-000001")


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    running: list[int] = []
    most = 0

    class Counting(Disk):
        def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileEntry:
            nonlocal most
            running.append(1)
            most = max(most, len(running))
            entry = super().write(path, chunks)
            running.pop()
            return entry

    writer = saver(tmp_path, Counting(), keep=0)
    for step in range(1, 6):
        writer.start(snapshot(step), [periodic(step)], background=True)
    writer.wait()
    assert most == 1
    assert len(writer.collect()) == 5


def damaged(folder: Path, how: str) -> None:
    file = folder / "adapters.safetensors"
    raw = bytearray(file.read_bytes())
    if how == "flipped byte":
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
    elif how == "truncated file":
        file.write_bytes(raw[:-1])
    elif how == "missing file":
        file.unlink()
    else:
        (folder / "manifest.json").unlink()


@pytest.mark.parametrize("how", ["flipped byte", "truncated file", "missing file", "missing manifest"])
def test_a_damaged_newest_checkpoint_is_passed_over_by_name(tmp_path: Path, how: str) -> None:
    writer = saver(tmp_path)
    for step in (1, 2):
        save(writer, step)
    damaged(tmp_path / "checkpoint-000002", how)
    found, broken = newest_whole_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1
    if how != "missing manifest":
        assert [path.name for path, _ in broken] == ["checkpoint-000002"]


def test_an_abandoned_timeline_is_moved_aside_once_the_new_one_has_a_checkpoint(tmp_path: Path) -> None:
    old = saver(tmp_path, keep=0)
    save(old, 1)
    save(old, 2, periodic(2), Target("best", "best"))
    save(old, 3)
    save(old, 3, Target("final", "final"))
    damaged(tmp_path / "checkpoint-000003", "missing manifest")
    new = saver(tmp_path, start_step=1)
    assert names(tmp_path) == ["best", "checkpoint-000001", "checkpoint-000002", "checkpoint-000003", "final"]
    save(new, 2)
    assert names(tmp_path) == ["abandoned", "checkpoint-000001", "checkpoint-000002"]
    assert names(tmp_path / "abandoned") == ["best", "checkpoint-000002", "checkpoint-000003", "final"]
    found, _ = newest_whole_checkpoint(tmp_path)
    assert found is not None
    assert found.path.name == "checkpoint-000002"


def test_two_abandoned_timelines_lie_beside_each_other(tmp_path: Path) -> None:
    for _ in range(3):
        save(saver(tmp_path, start_step=1), 2)
    assert names(tmp_path / "abandoned") == ["checkpoint-000002", "checkpoint-000002.2"]
