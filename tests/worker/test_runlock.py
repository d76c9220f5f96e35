"""The lock on a run folder: who looks at it is no holder."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from trainwire_protocol.config import Config
from trainwire_protocol.errors import Busy
from trainwire_protocol.rundir import LOCK_NAME, LockInfo, lock_holder
from trainwire_worker import runlock
from trainwire_worker.prepare import _take_lock, folder_problem
from trainwire_worker.runlock import RunLock


@pytest.mark.parametrize("left", [b"", b'{"pid":1,"since_ms":1,"phase":"running"}'], ids=["new", "used before"])
def test_whoever_looks_whether_a_run_lives_keeps_no_worker_from_beginning_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: bytes
) -> None:
    path = tmp_path / LOCK_NAME
    path.write_bytes(left)
    looking = os.open(path, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    waits: list[float] = []

    def look_no_more(seconds: float) -> None:
        waits.append(seconds)
        os.close(looking)

    monkeypatch.setattr(runlock.time, "sleep", look_no_more)
    lock = RunLock(tmp_path)
    assert lock.acquire() is None
    assert len(waits) == 1
    lock.release()


def test_a_holder_is_told_at_once_also_while_somebody_looks(tmp_path: Path) -> None:
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    assert first.acquire() is None
    first.describe(LockInfo(pid=7, since_ms=3, phase="running"))
    told = LockInfo(pid=7, since_ms=3, phase="running", host=os.uname().nodename)
    assert lock_holder(tmp_path) == told
    assert second.acquire() == told
    first.release()
    assert lock_holder(tmp_path) is None
    assert second.acquire() is None
    second.release()


@pytest.fixture
def dead() -> int:
    """The id of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def held_by(run_dir: Path, info: LockInfo) -> int:
    """Hold a run's lock in somebody's name; the descriptor that holds it."""
    path = run_dir / LOCK_NAME
    path.write_bytes(msgspec.json.encode(info))
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def problem(run_dir: Path) -> object:
    """What keeps a run from beginning in a folder."""
    return folder_problem(Config(model="m", data="d", run_dir=str(run_dir)))


def test_an_engine_that_lost_its_worker_is_no_reason_not_to_begin(tmp_path: Path, dead: int) -> None:
    held = held_by(tmp_path, LockInfo(pid=dead, since_ms=3, host=os.uname().nodename))
    assert problem(tmp_path) is None
    os.close(held)


def test_a_process_that_is_gone_here_may_live_on_its_own_host_which_is_named(tmp_path: Path, dead: int) -> None:
    held = held_by(tmp_path, LockInfo(pid=dead, since_ms=3, host="elsewhere"))
    found = problem(tmp_path)
    assert isinstance(found, Busy)
    assert f"Process {dead} on elsewhere holds the run folder" in found.message
    os.close(held)


def test_of_a_process_of_this_host_no_host_is_named(tmp_path: Path) -> None:
    held = held_by(tmp_path, LockInfo(pid=os.getpid(), since_ms=3, host=os.uname().nodename))
    found = problem(tmp_path)
    assert isinstance(found, Busy)
    assert f"Process {os.getpid()} holds the run folder" in found.message
    os.close(held)


@pytest.mark.parametrize("host", ["elsewhere", os.uname().nodename])
def test_nobody_waits_for_a_worker_that_lives(tmp_path: Path, host: str) -> None:
    held = held_by(tmp_path, LockInfo(pid=os.getpid(), since_ms=3, host=host))

    def waits(*_: object) -> bool:
        pytest.fail("it waits")

    with pytest.raises(Busy):
        _take_lock(RunLock(tmp_path), 900.0, waits, waits)
    os.close(held)


def test_a_process_of_another_user_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert not LockInfo(pid=7, since_ms=3).orphan
