"""The log on disk: repair, what it tells of the past, replay, and a disk that takes nothing; without processes."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import orjson
import pytest

from trainwire_protocol.errors import LogUnavailable
from trainwire_worker import eventlog as module
from trainwire_worker.eventlog import EventLog
from trainwire_worker.past import read_past


def write(folder: Path, *events: dict[str, Any], rest: bytes = b"") -> Path:
    """Write a log, numbered."""
    lines = [orjson.dumps({"type": e["type"], "seq": n, **e}) + b"\n" for n, e in enumerate(events, 1)]
    path = folder / "events.jsonl"
    path.write_bytes(b"".join(lines) + rest)
    return path


def attempt(number: int, resumed_from_step: int | None = None) -> dict[str, Any]:
    return {"type": "attempt", "run_id": "r", "attempt": number, "resumed_from_step": resumed_from_step}


def step(number: int) -> dict[str, Any]:
    return {"type": "step", "step": number}


@pytest.mark.parametrize("rest", [b'{"type":"st', b"\xff\xfe", b"x" * 200_000, b"{}"])
def test_a_torn_last_line_is_cut_off_and_counted(tmp_path: Path, rest: bytes) -> None:
    path = write(tmp_path, attempt(1), step(1), rest=rest)
    log = EventLog(tmp_path)
    assert (log.past.cut_bytes, log.last_seq) == (len(rest), 2)
    assert log.append([b'{"type":"step","seq":3,"step":2}\n'])
    assert [orjson.loads(line)["seq"] for line in path.read_bytes().splitlines()] == [1, 2, 3]
    log.close()


def test_a_log_of_half_a_line_becomes_empty(tmp_path: Path) -> None:
    path = write(tmp_path, rest=b'{"type":"attempt","se')
    log = EventLog(tmp_path)
    assert (path.stat().st_size, log.last_seq, log.past.attempts) == (0, 0, 0)
    log.close()


@pytest.mark.parametrize(
    ("events", "last_step"),
    [
        ([], 0),
        ([attempt(1)], 0),
        ([attempt(1), step(1), step(2)], 2),
        ([attempt(1), step(150), attempt(2, 100)], 100),
        ([attempt(1), step(150), attempt(2, 100), step(120)], 120),
        ([attempt(1), step(120), attempt(2, 125)], 120),
        ([attempt(1), step(120), attempt(2, 125), attempt(3, 125)], 120),
        ([attempt(1), step(150), attempt(2, 100), step(120), attempt(3, 80), attempt(4, 80)], 80),
        ([attempt(1), step(10), attempt(2), attempt(3, 5)], 0),
    ],
)
def test_the_last_update_of_the_timeline_is_found_whatever_the_attempts_did(
    tmp_path: Path, events: list[dict[str, Any]], last_step: int
) -> None:
    assert read_past(write(tmp_path, *events)).last_step == last_step


def test_the_past_is_found_far_from_the_end_of_a_long_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwire_worker.past._WINDOW", 100)
    events = [attempt(7, 3), {"type": "init", "config": {"seed": 5}}, {"type": "complete", "reason": "finished"}]
    events += [{"type": "log", "message": f'{{"type":"attempt" {n} \n "type":"init"'} for n in range(300)]
    past = read_past(write(tmp_path, *events))
    assert (past.attempts, past.run_id, past.config, past.finished, past.last_seq) == (
        7,
        "r",
        {"seed": 5},
        "finished",
        303,
    )


def test_a_later_init_makes_a_finished_run_unfinished(tmp_path: Path) -> None:
    init, complete = {"type": "init", "config": {}}, {"type": "complete"}
    assert read_past(write(tmp_path, attempt(1), init, complete, attempt(2, 1))).finished
    assert not read_past(write(tmp_path, attempt(1), init, complete, attempt(2, 1), init)).finished


def test_a_log_that_cannot_be_opened_is_said(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    with pytest.raises(LogUnavailable):
        EventLog(tmp_path)


@pytest.mark.parametrize(
    ("from_seq", "to_seq", "expected"),
    [(1, 5000, 5000), (1, 1, 1), (4999, 9999, 2), (2500, 2600, 101), (5001, 9000, 0), (30, 20, 0), (1, 0, 0)],
)
def test_replay_finds_any_stretch(tmp_path: Path, from_seq: int, to_seq: int, expected: int) -> None:
    write(tmp_path, *[{"type": "log", "message": "x" * (n % 97) * 20} for n in range(5000)])
    log = EventLog(tmp_path)
    found = [orjson.loads(line)["seq"] for line in log.replay(from_seq, to_seq, None)]
    assert found == list(range(from_seq, min(to_seq, 5000) + 1))
    assert len(found) == expected
    log.close()


def test_replay_of_one_kind_and_over_lines_that_are_none_of_ours(tmp_path: Path) -> None:
    path = write(tmp_path, *[step(n) if n % 3 else attempt(n) for n in range(1, 100)])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:50]) + b"edited by hand\n\n" + b"".join(lines[50:]))
    log = EventLog(tmp_path)
    found = [orjson.loads(line) for line in log.replay(10, 90, frozenset({"attempt"}))]
    assert [line["attempt"] for line in found] == list(range(12, 91, 3))
    log.close()


def test_a_replay_does_not_see_what_is_appended_meanwhile_nor_mind_a_removed_file(tmp_path: Path) -> None:
    path = write(tmp_path, *[step(n) for n in range(1, 20_000)])
    log = EventLog(tmp_path)
    replay = log.replay(1, log.last_seq, None)
    first = next(replay)
    log.append([b'{"type":"step","seq":20000,"step":20000}\n'])
    path.unlink()
    assert len([first, *replay]) == 19_999
    log.close()


class FullDisk:
    """Stands for a disk that takes so many bytes more and then none, until there is room again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        self._write = os.write
        monkeypatch.setattr(module.os, "write", self.write)
        monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)

    def write(self, fd: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self._write(fd, bytes(data[: self.room]))
        self.room -= taken
        return taken


def lines(first: int, last: int) -> list[bytes]:
    return [b'{"type":"log","seq":%d,"message":"%s"}\n' % (n, b"m" * (n % 50)) for n in range(first, last + 1)]


def test_a_full_disk_leaves_no_half_line_and_nothing_is_lost_when_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(tmp_path)
    disk = FullDisk(monkeypatch, room=1000)
    assert not log.append(lines(1, 100))
    assert log.degraded
    on_disk = log.path.read_bytes()
    assert on_disk.endswith(b"\n")
    assert 0 < len(on_disk) <= 1000
    assert not log.append(lines(101, 200))
    assert [orjson.loads(line)["seq"] for line in log.replay(1, 200, None)] == list(range(1, 201))
    disk.room = 1 << 30
    assert log.append(lines(201, 210))
    assert not log.degraded
    assert [orjson.loads(line)["seq"] for line in log.path.read_bytes().splitlines()] == list(range(1, 211))
    assert log.lost.lines == 0
    log.close()


def test_beyond_the_memory_for_it_the_oldest_lines_are_lost_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_UNWRITTEN", 10_000)
    log = EventLog(tmp_path)
    disk = FullDisk(monkeypatch, room=0)
    for first in range(1, 2000, 10):
        assert not log.append(lines(first, first + 9))
    disk.room = 1 << 30
    assert log.append([])
    kept = [orjson.loads(line)["seq"] for line in log.path.read_bytes().splitlines()]
    assert kept == list(range(log.lost.last_seq + 1, 2001))
    assert log.lost.lines == log.lost.last_seq
    log.close()
