"""Orders and signals take effect on all ranks at the same update."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import mlx.core as mx
import pytest
from ranks_driver import AT_ONCE, SHORT, Run, Start, wait_gone


def steer(run: Run) -> None:
    """Give one order of each kind, each at a known step."""
    run.send("pause")
    run.wait("paused", step=0)
    run.result("resume", steps=6)
    run.wait("paused", step=6)
    run.result("set", values={"learning_rate": 0.5, "eval_every": 4, "generate_every": 4})
    run.result("checkpoint", name="by-hand")
    run.result("eval")
    run.result("generate", prompt="say 3", max_tokens=4)
    run.result("resume", steps=3)
    run.wait("paused", step=9)
    run.result("set", values={"learning_rate": 0.1})
    run.result("resume", steps=2)
    run.wait("paused", step=11)
    run.result("stop")


def test_every_order_does_on_two_ranks_what_it_does_on_one(start: Start, base: Path, tmp_path: Path) -> None:
    keys = {"optimizer": "sgd", "valid_data": str(base / "valid.jsonl"), "prompts": ["say 1"], "keep_best": False}
    runs = []
    for ranks in (1, 2):
        runs.append(start(f"ranks{ranks}", ranks, generate_max_tokens=3, **keys))
        steer(runs[-1])
        assert runs[-1].finish()["outcome"] == "stopped", runs[-1].printed()
    one, two = runs
    told = ("paused", "config_changed", "eval_end", "generation", "end")
    assert [line["type"] for line in two.of(*told)] == [line["type"] for line in one.of(*told)]
    assert [line.get("step") for line in two.of(*told)] == [line.get("step") for line in one.of(*told)]
    for step, figures in one.steps().items():
        assert two.steps()[step] == pytest.approx(figures, rel=1e-5), f"step {step}"
    for name in ("by-hand", "checkpoint-000011"):
        found, wanted = (mx.load(str(tmp_path / f"ranks{n}" / name / "adapters.safetensors")) for n in (2, 1))
        for key, value in wanted.items():
            assert float(mx.abs(found[key] - value).max()) < 1e-5


def test_a_pause_uses_no_processor_time_on_any_rank(start: Start) -> None:
    run = start(ranks=3, words=AT_ONCE)
    run.wait("step", step=2)
    run.result("pause")
    ranks = run.processes()[1:]
    run.result("generate", prompt="say", max_tokens=1)
    before = [_cpu_ms(pid) for pid in ranks]
    # Longer than the rank timeout: a pause is no fault.
    assert wait_gone(ranks, SHORT + 0.5) == ranks
    used = [after - earlier for after, earlier in zip(map(_cpu_ms, ranks), before)]
    assert max(used) < 250, used
    run.result("resume")
    run.wait("step")
    run.result("stop")
    assert run.finish()["outcome"] == "stopped"


def test_a_signal_to_the_whole_group_stops_the_run_once_and_saves(start: Start) -> None:
    run = start(ranks=2)
    run.wait("step", step=3)
    pids = run.processes()
    for pid in (run.process.pid, *pids):
        os.kill(pid, signal.SIGINT)
    end = run.finish()
    assert (end["outcome"], end["exit_code"]) == ("interrupted", 21)
    assert Path(end["checkpoint"]).is_dir()
    assert wait_gone(pids) == []


def test_a_stop_within_an_evaluation_ends_it_on_all_ranks(start: Start, base: Path) -> None:
    run = start(ranks=2, valid_data=str(base / "chat.jsonl"), micro_batch_tokens=32)
    run.wait("step", step=2)
    run.send("eval")
    run.send("stop")
    end = run.finish()
    assert end["outcome"] == "stopped"
    assert Path(end["checkpoint"]).is_dir()


def _cpu_ms(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")
