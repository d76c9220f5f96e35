"""Disks that are full, memory that runs out, bugs: what is saved, what is said, how the engine leaves."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from scripted import Result, at_step, on, play

from trainwire_engine import boundary, prepare
from trainwire_engine.disk import Disk
from trainwire_engine.failures import as_error, is_out_of_memory
from trainwire_engine.step import UpdateStep
from trainwire_protocol import channel as ch
from trainwire_protocol import events as ev
from trainwire_protocol.rundir import defect

Names = set[str]


@pytest.fixture
def full_for(monkeypatch: pytest.MonkeyPatch) -> Names:
    """Checkpoints with these names find the disk full."""
    names: Names = set()
    write = Disk.write

    def guarded(self: Disk, path: Path, chunks: Any) -> Any:
        if path.parent.name.removeprefix(".writing-") in names and path.name == "optimizer.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(self, path, chunks)

    monkeypatch.setattr(Disk, "write", guarded)
    return names


@pytest.fixture
def broken_at(monkeypatch: pytest.MonkeyPatch) -> dict[int, Exception]:
    """Updates that raise."""
    plan: dict[int, Exception] = {}

    class Breaking(UpdateStep):
        def __call__(self, micro_batches: Any, *, step: int, **more: Any) -> Any:
            if step in plan:
                raise plan[step]
            return super().__call__(micro_batches, step=step, **more)

    monkeypatch.setattr(prepare, "UpdateStep", Breaking)
    return plan


def saved(result: Result) -> list[str]:
    return [Path(c.path).name for c in result.of(ev.Checkpoint)]


def test_a_full_disk_costs_a_periodic_checkpoint_and_nothing_else(
    config: dict[str, Any], base: Path, full_for: Names
) -> None:
    full_for.add("checkpoint-000004")
    result = play({**config, "save_every": 2, "num_epochs": 2}, base)
    (log,) = result.logged("save_failed")
    assert log.level == "error"
    assert log.details is not None
    assert (log.details["step"], log.details["code"]) == (4, "disk_full")
    assert saved(result) == [
        "checkpoint-000002",
        "checkpoint-000006",
        "checkpoint-000008",
        "checkpoint-000010",
        "final",
    ]
    assert result.one(ch.Finished).outcome == "completed"
    assert not list(Path(config["run_dir"]).glob(".*"))


def test_the_steps_of_a_failed_save_are_carried_by_the_next_one(
    config: dict[str, Any], base: Path, full_for: Names
) -> None:
    full_for.add("checkpoint-000004")
    stopped = play({**config, "save_every": 2}, base, at_step(5, ch.StopOrder(order=2)))
    history = play(config, base, resume_from=stopped.one(ch.Finished).checkpoint).one(ch.StepHistory)
    assert [step.step for step in history.steps] == [1, 2, 3, 4, 5]


def test_a_failed_final_save_ends_the_run_and_names_the_checkpoint_before(
    config: dict[str, Any], base: Path, full_for: Names
) -> None:
    full_for |= {"final"}
    result = play({**config, "save_every": 4}, base)
    failed = result.one(ch.Failed)
    assert (failed.code, result.status) == ("disk_full", 7)
    assert Path(failed.checkpoint).name == "checkpoint-000004"
    assert not result.of(ev.Complete)


def test_a_failed_final_save_pauses_the_run_if_somebody_can_make_room(
    config: dict[str, Any], base: Path, full_for: Names
) -> None:
    full_for |= {"final"}
    attempts: list[int] = []

    def rule(report: Any) -> list[ch.AnyOrder] | None:
        if isinstance(report, ev.Paused):
            attempts.append(report.step)
            if len(attempts) == 2:
                full_for.clear()
            return [ch.ResumeOrder(order=10 + len(attempts))]
        return None

    result = play(config, base, rule, hold_on_failed_save=True)
    assert attempts == [6, 6]
    assert len(result.logged("save_failed")) == 2
    assert result.status == 0
    assert result.one(ev.Complete).total_steps == 6
    assert defect(Path(config["run_dir"]) / "final") is None


def test_a_run_that_is_held_can_be_stopped(config: dict[str, Any], base: Path, full_for: Names) -> None:
    full_for |= {"final"}
    result = play(config, base, on(ev.Paused, ch.StopOrder(order=5, save=False)), hold_on_failed_save=True)
    assert result.answer(5).result == {"outcome": "stopped", "step": 6, "checkpoint": None}
    assert not result.of(ev.Complete)


def test_a_stop_whose_checkpoint_fails_is_a_failure(config: dict[str, Any], base: Path, full_for: Names) -> None:
    full_for |= {"checkpoint-000003"}
    result = play({**config, "save_every": 2}, base, at_step(3, ch.StopOrder(order=5)))
    failed = result.one(ch.Failed)
    assert (failed.code, Path(failed.checkpoint).name, result.status) == ("disk_full", "checkpoint-000002", 7)


def test_an_ordered_checkpoint_that_fails_is_answered_and_the_run_goes_on(
    config: dict[str, Any], base: Path, full_for: Names
) -> None:
    full_for |= {"good"}
    result = play(config, base, at_step(2, ch.CheckpointOrder(order=5, name="good")))
    assert result.answer(5).code == "disk_full"
    assert result.one(ch.Finished).outcome == "completed"


OUT_OF_MEMORY = RuntimeError("[malloc] Unable to allocate 274877906944 bytes.")


def test_out_of_memory_saves_the_last_good_state(
    config: dict[str, Any], base: Path, broken_at: dict[int, Exception]
) -> None:
    broken_at[4] = OUT_OF_MEMORY
    result = play(config, base)
    failed = result.one(ch.Failed)
    assert (failed.code, result.status) == ("out_of_memory", 5)
    assert "micro_batch_tokens" in failed.hint
    path = Path(failed.checkpoint)
    assert (path.name, defect(path)) == ("emergency-checkpoint-000003", None)
    broken_at.clear()
    assert list(play(config, base, resume_from=str(path)).losses) == [4, 5, 6]


def test_an_emergency_writes_nothing_twice(config: dict[str, Any], base: Path, broken_at: dict[int, Exception]) -> None:
    broken_at[4] = OUT_OF_MEMORY
    result = play({**config, "save_every": 3}, base)
    assert saved(result) == ["checkpoint-000003"]
    assert Path(result.one(ch.Failed).checkpoint).name == "checkpoint-000003"


def test_a_full_disk_in_an_emergency_does_not_hide_its_cause(
    config: dict[str, Any], base: Path, broken_at: dict[int, Exception], full_for: Names
) -> None:
    broken_at[4] = OUT_OF_MEMORY
    full_for |= {"emergency-checkpoint-000003"}
    failed = play({**config, "save_every": 2}, base).one(ch.Failed)
    assert (failed.code, Path(failed.checkpoint).name) == ("out_of_memory", "checkpoint-000002")


def test_a_bug_is_told_with_its_traceback(config: dict[str, Any], base: Path, broken_at: dict[int, Exception]) -> None:
    broken_at[1] = KeyError("unforeseen")
    result = play(config, base)
    failed = result.one(ch.Failed)
    assert (failed.code, result.status, failed.checkpoint) == ("internal", 1, None)
    assert failed.details is not None
    assert "test_failing.py" in failed.details["traceback"]


@pytest.mark.parametrize(("error", "code"), [(OUT_OF_MEMORY, "out_of_memory"), (KeyError("unforeseen"), "internal")])
def test_an_order_that_fails_is_answered_and_the_run_goes_on(
    config: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(boundary, "generate", fail)
    result = play(config, base, at_step(2, ch.GenerateOrder(order=5, prompt="what")))
    assert result.answer(5).code == code
    assert result.one(ch.Finished).outcome == "completed"


@pytest.mark.parametrize(
    "text",
    [
        "[malloc] Unable to allocate 1073741824 bytes.",
        "[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPU…OutOfMemory)",
        "[metal::malloc] Attempting to allocate 90000000000 bytes, more than the maximum allowed buffer size",
        "cudaMallocAsync(&data, size, stream) failed: out of memory",
        "std::bad_alloc",
    ],
)
def test_mlxs_words_for_missing_memory_are_known(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(RuntimeError("[matmul] Last dimension of first input must match"))
    assert is_out_of_memory(MemoryError())


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOSPC, "disk_full"), (errno.EDQUOT, "disk_full"), (errno.EIO, "io_error"), (errno.EACCES, "io_error")],
)
def test_errors_of_the_file_system_have_their_codes(number: int, code: str) -> None:
    assert as_error(OSError(number, os.strerror(number), "/runs/one/file")).code == code


def test_an_engine_without_a_channel_says_how_it_is_started() -> None:
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-m", "trainwire_engine"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert "trainwire run" in done.stderr


def test_leftovers_of_a_crash_are_gone_after_the_start(config: dict[str, Any], base: Path) -> None:
    run_dir = Path(config["run_dir"])
    for name in (".writing-checkpoint-000009", ".removing-checkpoint-000001"):
        (run_dir / name).mkdir(parents=True)
        (run_dir / name / "adapters.safetensors").write_bytes(b"half")
    play({**config, "max_steps": 1}, base)
    assert sorted(path.name for path in run_dir.iterdir()) == ["final"]
