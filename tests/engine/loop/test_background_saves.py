"""A checkpoint is written behind the running updates, and announced once it is whole."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from scripted import Result, at_step, both, on, play

from trainwire_engine import memory
from trainwire_engine.disk import Disk
from trainwire_protocol import channel as ch
from trainwire_protocol import events as ev
from trainwire_protocol.rundir import FileEntry, defect, newest_whole_checkpoint


class Gate:
    """Holds the writer up until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def opened_at(self, step: int) -> Any:
        def rule(report: Any) -> None:
            if isinstance(report, ev.Step) and report.step == step:
                self.open.set()

        return rule


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    write = Disk.write

    def held(self: Disk, path: Path, chunks: Iterable[bytes | memoryview]) -> FileEntry:
        assert gate.open.wait(90)
        return write(self, path, chunks)

    monkeypatch.setattr(Disk, "write", held)
    return gate


def index(result: Result, kind: type, step: int) -> int:
    (found,) = [i for i, r in enumerate(result.reports) if isinstance(r, kind) and r.step == step]
    return found


def test_updates_go_on_while_a_checkpoint_is_written_and_do_not_change_it(
    config: dict[str, Any], base: Path, tmp_path: Path, gate: Gate
) -> None:
    result = play({**config, "save_every": 2, "max_steps": 5, "max_checkpoints": 0}, base, gate.opened_at(3))
    assert index(result, ev.Checkpoint, 2) > index(result, ev.Step, 3)
    plain = {**config, "run_dir": str(tmp_path / "plain"), "max_steps": 2}
    play({**plain, "num_epochs": 1}, base, at_step(2, ch.StopOrder(order=2)))
    # The same weights as those of a run that was stopped there, though updates were made meanwhile.
    late = Path(config["run_dir"]) / "checkpoint-000002"
    assert defect(late) is None
    again = play({**config, "max_steps": 5, "run_dir": str(tmp_path / "again")}, base, resume_from=str(late))
    assert again.losses == {step: loss for step, loss in result.losses.items() if step > 2}


def test_a_stop_waits_for_the_checkpoint_under_way(config: dict[str, Any], base: Path, gate: Gate) -> None:
    rule = both(at_step(3, ch.StopOrder(order=2)), gate.opened_at(3))
    result = play({**config, "save_every": 2}, base, rule)
    saved = [(c.step, c.kind) for c in result.of(ev.Checkpoint)]
    assert saved == [(2, "periodic"), (3, "periodic")]
    assert isinstance(result.reports[-1], ch.Finished)


def test_a_pause_is_told_at_once_and_then_announces_the_checkpoint_under_way(
    config: dict[str, Any], base: Path, gate: Gate
) -> None:
    def rule(report: Any) -> list[ch.AnyOrder] | None:
        if isinstance(report, ev.Step) and report.step == 3:
            return [ch.PauseOrder(order=2)]
        if isinstance(report, ch.Answer) and report.order == 2:
            gate.open.set()
        if isinstance(report, ev.Checkpoint) and report.step == 2:
            return [ch.ResumeOrder(order=3)]
        return None

    result = play({**config, "save_every": 2}, base, rule)
    assert index(result, ev.Paused, 3) < index(result, ev.Checkpoint, 2) < index(result, ev.Resumed, 3)


def test_an_ordered_checkpoint_is_answered_once_it_is_whole(config: dict[str, Any], base: Path, gate: Gate) -> None:
    rule = both(at_step(2, ch.CheckpointOrder(order=2)), gate.opened_at(4))
    result = play(config, base, rule)
    answer = result.answer(2)
    assert result.reports.index(answer) > index(result, ev.Step, 4)
    assert answer.result is not None
    assert (answer.result["step"], answer.result["changed"]) == (2, True)


def test_where_memory_is_short_the_save_blocks_and_says_so_once(
    config: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda: 0)
    result = play({**config, "save_every": 1, "max_checkpoints": 0}, base)
    assert len(result.logged("save_blocks")) == 1
    for step in range(1, 6):
        assert index(result, ev.Checkpoint, step) < index(result, ev.Step, step + 1)


def test_memory_that_can_be_had_is_a_positive_number() -> None:
    assert memory.available() > 1 << 20


def test_a_run_that_goes_back_moves_what_it_left_behind_aside(config: dict[str, Any], base: Path) -> None:
    settings = {**config, "save_every": 1, "max_checkpoints": 0}
    play(settings, base, at_step(5, ch.StopOrder(order=2)))
    run_dir = Path(config["run_dir"])
    at_start: list[str] = []
    rule = on(ev.Init, ch.PauseOrder(order=2))

    def look(report: Any) -> list[ch.AnyOrder] | None:
        if isinstance(report, ev.Paused):
            at_start.extend(sorted(path.name for path in run_dir.iterdir()))
            return [ch.ResumeOrder(order=3)]
        return None

    result = play(settings, base, both(rule, look), resume_from=str(run_dir / "checkpoint-000003"))
    # Nothing is moved before the new timeline has something of its own.
    assert at_start == [f"checkpoint-{step:06d}" for step in range(1, 6)]
    assert result.one(ch.Finished).outcome == "completed"
    assert sorted(path.name for path in (run_dir / "abandoned").iterdir()) == ["checkpoint-000004", "checkpoint-000005"]
    found, broken = newest_whole_checkpoint(run_dir)
    assert found is not None
    assert (found.path.name, broken) == ("final", [])
