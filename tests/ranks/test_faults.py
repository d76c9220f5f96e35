"""A rank, rank 0 or the worker is lost: the run ends in time, names it, keeps its state and leaves nothing behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from ranks_driver import AT_ONCE, SHORT, Start, wait_gone

from trainwire_protocol.rundir import list_checkpoints


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_rank_is_named_and_the_last_update_is_saved(
    start: Start, tmp_path: Path, rank: int, number: int
) -> None:
    run = start(ranks=3, words=AT_ONCE if number == signal.SIGSTOP else ())
    run.wait("step", step=3)
    pids = run.processes()
    os.kill(pids[1 + rank], number)
    end = run.finish()
    (error,) = run.of("error")
    assert (error["code"], end["exit_code"]) == ("engine_died", 9)
    assert error["message"].startswith(f"Rank {rank} "), error
    assert error["details"]["rank"] == rank
    (saved,) = list_checkpoints(tmp_path / "run")
    assert (str(saved.path), saved.manifest.kind) == (end["checkpoint"], "emergency")
    # Rank 0 may have died before it could report the update that another one saved.
    assert saved.step - end["step"] in ((0, 1) if rank == 0 else (0,))
    assert wait_gone(pids) == []


def test_ranks_that_all_stand_still_for_a_while_do_not_miss_each_other(start: Start) -> None:
    run = start(ranks=2, words=AT_ONCE)
    run.wait("step", step=3)
    pids = [run.process.pid, *run.processes()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    assert wait_gone(pids, 2 * SHORT) == pids
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    run.wait("step", step=run.result("status")["step"] + 3)
    run.result("stop")
    assert run.finish()["outcome"] == "stopped", run.printed()


def test_what_a_survivor_saved_is_resumed(start: Start) -> None:
    run = start(ranks=2)
    run.wait("step", step=3)
    os.kill(run.processes()[1], signal.SIGKILL)
    saved = int(run.finish()["checkpoint"][-6:])
    again = start(ranks=2, max_steps=saved + 2)
    assert again.finish()["outcome"] == "completed", again.printed()
    assert sorted(again.steps())[-2:] == [saved + 1, saved + 2]


def test_a_rank_that_dies_while_the_run_is_paused_ends_it(start: Start) -> None:
    run = start(ranks=2)
    run.wait("step", step=2)
    run.result("pause")
    pids = run.processes()
    os.kill(pids[2], signal.SIGKILL)
    end = run.finish()
    assert end["reason"] == "engine_died"
    assert Path(end["checkpoint"]).is_dir()
    assert wait_gone(pids) == []


def test_a_killed_worker_leaves_a_checkpoint_and_no_process(start: Start, tmp_path: Path) -> None:
    run = start(ranks=2)
    run.wait("step", step=3)
    pids = run.processes()
    run.process.kill()
    assert wait_gone(pids) == []
    assert [info.manifest.kind for info in list_checkpoints(tmp_path / "run")] == ["periodic"]


def test_a_killed_launcher_takes_its_ranks_along(start: Start) -> None:
    run = start(ranks=2, words=AT_ONCE)
    run.wait("step", step=3)
    pids = run.processes()
    os.kill(pids[2], signal.SIGSTOP)
    os.kill(pids[0], signal.SIGKILL)
    end = run.finish()
    assert end["reason"] == "engine_died"
    assert wait_gone(pids) == []


def test_a_restart_takes_all_ranks_up_again(start: Start) -> None:
    run = start(ranks=2, words=("--restarts", "1"))
    run.wait("step", step=3)
    os.kill(run.processes()[2], signal.SIGKILL)
    attempt = run.wait("attempt", attempt=2)
    run.wait("step", step=attempt["resumed_from_step"] + 2)
    run.result("stop")
    assert run.finish()["outcome"] == "stopped"
