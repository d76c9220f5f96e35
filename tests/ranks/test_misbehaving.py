"""A rank that fails, hangs or is slow in the middle of an update, made so by a patch that only this rank heeds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ranks_driver import AT_ONCE, Run, Start, wait_gone

from trainwire_protocol.rundir import list_checkpoints

# Loaded by every Python of the run; only the engine of one rank changes anything.
PATCH = """
import os, sys, threading, time
if "trainwire_engine" in sys.orig_argv:
    from trainwire_engine.step import UpdateStep
    update = UpdateStep.__call__
    def spoiled(self, micro_batches, **how):
        if os.environ.get("MLX_RANK") == {rank!r} and how["step"] > 3:
            {act}
        return update(self, micro_batches, **how)
    UpdateStep.__call__ = spoiled
"""


def spoil(folder: Path, rank: int, act: str) -> dict[str, str]:
    """An environment in which a rank does something in each update from the fourth on."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(PATCH.format(rank=str(rank), act=act))
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def ended(run: Run) -> tuple[dict[str, object], dict[str, object]]:
    """The run's error and its end, with nothing left behind."""
    run.wait("step", step=2)
    pids = run.processes()
    end = run.finish()
    (error,) = run.of("error")
    assert Path(end["checkpoint"]).name == "emergency-checkpoint-000003", run.printed()
    assert wait_gone(pids) == []
    return error, end


def test_an_error_of_another_rank_reaches_the_wire_with_its_code_and_its_name(start: Start, tmp_path: Path) -> None:
    act = 'raise RuntimeError("[malloc] Unable to allocate 9 bytes.")'
    error, end = ended(start(ranks=3, env=spoil(tmp_path / "patch", 2, act)))
    assert (error["code"], end["exit_code"]) == ("out_of_memory", 5)
    assert str(error["message"]).startswith("Rank 2: ")
    assert error["details"]["rank"] == 2  # type: ignore[index]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_in_an_update_is_named(start: Start, tmp_path: Path, rank: int) -> None:
    env = spoil(tmp_path / "patch", rank, "threading.Event().wait()")
    error, _ = ended(start(ranks=2, words=AT_ONCE, env=env))
    assert error["code"] == "engine_died"
    assert str(error["message"]).startswith(f"Rank {rank} hangs"), error


def test_a_rank_that_is_only_slow_holds_up_the_others_and_nothing_else(start: Start, tmp_path: Path) -> None:
    env = spoil(tmp_path / "patch", 1, "time.sleep(0.3)")
    run = start(ranks=2, words=AT_ONCE, env=env, max_steps=12)
    assert run.finish()["outcome"] == "completed", run.printed()


STOPPED_IN_A_SAVE = """
import os, signal, sys, threading
if "trainwire_engine" in sys.orig_argv:
    from trainwire_engine.disk import Disk
    make_folder = Disk.make_folder
    def stop(self, path):
        if os.environ.get("MLX_RANK") == "0":
            os.kill(os.getpid(), signal.SIGSTOP)
            threading.Event().wait()
        return make_folder(self, path)
    Disk.make_folder = stop
"""


def test_nobody_saves_beside_a_rank_that_stands_still_in_the_middle_of_a_save(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "patch"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(STOPPED_IN_A_SAVE)
    env = {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    run = start(ranks=2, words=AT_ONCE, env=env, save_every=4)
    end = run.finish()
    (error,) = run.of("error")
    assert error["details"]["rank"] == 0, run.printed()
    assert (end["exit_code"], end["checkpoint"]) == (9, None)
    assert list_checkpoints(tmp_path / "run") == []
