"""Several ranks that reach one run folder: one of them writes at a time, and nobody writes what is there already."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainwire_engine.checkpoint import Saver, Target
from trainwire_engine.disk import Disk
from trainwire_engine.prepare import tidy
from trainwire_engine.save_lock import SaveLock
from trainwire_engine.saving import Saves
from trainwire_engine.snapshot import Snapshot
from trainwire_engine.state import TrainState
from trainwire_protocol.rundir import list_checkpoints, read_manifest

HOLDER = """
import sys, time
from pathlib import Path
from trainwire_engine.save_lock import SaveLock
with SaveLock(Path(sys.argv[1])).held():
    print("held", flush=True)
    time.sleep(600)
"""


class GatedDisk(Disk):
    """Stands still in the middle of a save until the gate opens."""

    def __init__(self) -> None:
        self.reached, self.gate = threading.Event(), threading.Event()

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self.reached.set()
        assert self.gate.wait(120)


def saver(run_dir: Path, disk: Disk | None = None, start_step: int = 0) -> Saver:
    """A rank's own."""
    return Saver(run_dir, start_step, lambda: 0, disk, SaveLock(run_dir))


def save(writer: Saver, step: int, name: str = "", *, background: bool = False) -> None:
    snapshot = Snapshot(step, {"trainer_state.json": b"{}"})
    writer.start(snapshot, [Target(name or f"checkpoint-{step:06d}", "periodic")], background=background)


def test_a_rank_waits_for_another_ones_save_and_finds_it(tmp_path: Path) -> None:
    disk = GatedDisk()
    first, second = saver(tmp_path, disk), saver(tmp_path)
    save(first, 7, background=True)
    assert disk.reached.wait(120)
    with second.alone(wait=False) as mine:
        assert not mine
    found: list[Path | None] = []

    def look() -> None:
        with second.alone():
            found.append(second.of_another(7))

    looking = threading.Thread(target=look)
    looking.start()
    disk.gate.set()
    looking.join(120)
    assert found == [tmp_path / "checkpoint-000007"]
    assert second.of_another(8) is None
    with second.alone(wait=False) as mine:
        assert mine


def test_before_it_leaves_a_rank_writes_nothing_that_another_has_written_or_is_writing(tmp_path: Path) -> None:
    first = saver(tmp_path)
    state = TrainState(step=7)
    course: Any = SimpleNamespace(state=state)
    parts: dict[str, Any] = dict.fromkeys(("step", "contents", "reports", "stopwatch", "passport", "resumed", "room"))
    saves = Saves(course=course, saver=saver(tmp_path), **parts)
    with first.alone():
        saves.last(Target("emergency-checkpoint-000007", "emergency"), wait=False)
    assert list_checkpoints(tmp_path) == []
    save(first, 7)
    saves.last(Target("emergency-checkpoint-000007", "emergency"), wait=True)
    assert saves.newest == tmp_path / "checkpoint-000007"
    assert [info.path for info in list_checkpoints(tmp_path)] == [saves.newest]


def test_a_killed_rank_holds_nobody_up(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with SaveLock(tmp_path).held(wait=False) as mine:
            assert not mine
        os.kill(holder.pid, signal.SIGKILL)
    with SaveLock(tmp_path).held() as mine:
        assert mine


def test_checkpoints_of_an_abandoned_timeline_are_nobodys_and_their_names_are_given_anew(tmp_path: Path) -> None:
    save(saver(tmp_path), 150)
    old = (tmp_path / "checkpoint-000150").stat().st_ino
    first, second = saver(tmp_path, start_step=100), saver(tmp_path, start_step=100)
    assert second.of_another(120) is None
    save(first, 150)
    assert second.of_another(120) == tmp_path / "checkpoint-000150"
    # The second rank saw the old one too, but this is not it.
    save(second, 160, "emergency-checkpoint-000160")
    assert (tmp_path / "abandoned/checkpoint-000150").stat().st_ino == old
    assert sorted(info.step for info in list_checkpoints(tmp_path)) == [150, 160]


@pytest.mark.parametrize("saving", [True, False])
def test_what_another_rank_is_writing_is_not_tidied_away(tmp_path: Path, saving: bool) -> None:
    half = tmp_path / ".writing-checkpoint-000007"
    half.mkdir()
    with SaveLock(tmp_path).held():
        if saving:
            tidy(tmp_path)
    if not saving:
        tidy(tmp_path)
    assert half.exists() is saving


def test_a_lock_is_taken_again_by_who_has_it_and_let_go_once(tmp_path: Path) -> None:
    writer, other = saver(tmp_path), SaveLock(tmp_path)
    with writer.alone() as outer, writer.alone(wait=False) as inner:
        assert (outer, inner) == (True, True)
        save(writer, 3)
        with other.held(wait=False) as theirs:
            assert not theirs
    assert read_manifest(tmp_path / "checkpoint-000003") is not None
    with other.held(wait=False) as theirs:
        assert theirs


def test_a_process_that_is_alone_needs_no_lock(tmp_path: Path) -> None:
    writer = Saver(tmp_path, 0, lambda: 0)
    save(writer, 3)
    assert writer.of_another(3) is None
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000003"]
