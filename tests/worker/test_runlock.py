"""The lock on a run folder: who looks at it is no holder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from trainwire_protocol.rundir import LOCK_NAME, LockInfo, lock_holder
from trainwire_worker import runlock
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
    assert lock_holder(tmp_path) == LockInfo(pid=7, since_ms=3, phase="running")
    assert second.acquire() == LockInfo(pid=7, since_ms=3, phase="running")
    first.release()
    assert lock_holder(tmp_path) is None
    assert second.acquire() is None
    second.release()
