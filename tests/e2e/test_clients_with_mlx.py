"""Both clients drive the real engine; the README's examples run as they stand, with the paths of a tiny model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from whole import ENVIRONMENT, ROOT

import trainwire_client as tw
from trainwire_client import aio

README = (ROOT / "README.md").read_text(encoding="utf-8")
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="there is no node")


def config(base: Path, run_dir: Path, **values: Any) -> dict[str, Any]:
    fixed = {"model": str(base / "model"), "data": str(base / "chat.jsonl"), "cache_dir": str(base / "cache")}
    return {**fixed, "run_dir": str(run_dir), "learning_rate": 1e-2, "max_steps": 100_000, "warmup_steps": 1, **values}


def run_node(folder: Path, program: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a Node program in a folder where the package is installed and `trainwire` is on the PATH."""
    (folder / "node_modules").mkdir(parents=True)
    (folder / "node_modules" / "trainwire").symlink_to(ROOT / "clients" / "node")
    (folder / "bin").mkdir()
    command = folder / "bin" / "trainwire"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m trainwire_cli "$@"\n')
    command.chmod(0o755)
    (folder / "program.mjs").write_text(program, encoding="utf-8")
    environment = {**ENVIRONMENT, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    argv = [NODE or "node", str(folder / "program.mjs"), *map(str, words)]
    return subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def readme_example(language: str) -> str:
    (block,) = [b for b in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if "launch" in b]
    return str(block)


def prepare_readme(base: Path, folder: Path) -> Path:
    """Put a model and data where the README's examples look for them."""
    for name, source in (("models/Qwen3-0.6B", "model"), ("data/chat.jsonl", "chat.jsonl")):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).symlink_to(base / source)
    return folder


def test_the_readme_s_python_example_runs(base: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-c", readme_example("python")]
    folder = prepare_readme(base, tmp_path)
    done = subprocess.run(words, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["completed", str(folder / "runs/run/final")], done.stderr


@needs_node
def test_the_readme_s_node_example_runs(base: Path, tmp_path: Path) -> None:
    done = run_node(prepare_readme(base, tmp_path), readme_example("js"))
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [*map(str, range(1, 201)), "0"], done.stderr


def test_python_steers_a_run_that_trains(base: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"say {n}", "completion": f"number {n}"} for n in range(20)]
    values = config(base, tmp_path / "run", eval_every=0)
    del values["data"]
    with tw.launch(values, rows=rows, valid_rows=rows[:6]) as run:
        next(event for event in run if event.type == "step")
        stood = run.pause()
        assert stood.changed
        assert not run.pause().changed
        assert run.status().phase == "paused"
        base_text = run.generate("say 3", max_tokens=4, adapter=False)
        assert base_text.tokens == 4
        before = run.eval().valid_loss
        assert run.set(learning_rate=5e-3).previous == {"learning_rate": 1e-2}
        moved = run.resume(steps=20)
        assert next(e for e in run if e.type == "paused" and e.step > stood.step).step == stood.step + 20
        assert moved.changed
        after = run.eval().valid_loss
        assert before is not None
        assert after is not None
        assert after < before
        saved = run.checkpoint("mine")
        assert saved.step == stood.step + 20
        newest = tw.latest_checkpoint(tmp_path / "run")
        assert newest is not None
        assert str(newest.path) == saved.path
        assert [event.type for event in run.replay(types=["init"])] == ["init"]
        stopped = run.stop()
        assert run.wait().checkpoint == stopped.checkpoint
    series = tw.history(tmp_path / "run", ("loss", "valid_loss"))
    assert series["loss"].steps == list(range(1, stood.step + 21))
    assert series["valid_loss"].values == [before, after]
    with tw.launch({**values, "max_steps": stopped.step + 2}, rows=rows, valid_rows=rows[:6]) as run:
        assert run.started(90).resumed_from == stopped.checkpoint
        assert run.wait().check().step == stopped.step + 2


def test_asyncio_steers_a_run_that_trains_and_leaving_saves_it(base: Path, tmp_path: Path) -> None:
    async def drive() -> None:
        async with aio.launch(config(base, tmp_path / "run")) as run:
            async for event in run:
                if event.type == "step":
                    break
            assert (await run.pause()).changed
            assert (await run.generate("say 1", max_tokens=2)).tokens == 2

    asyncio.run(drive())
    with tw.attach(tmp_path / "run") as run:
        result = run.wait(90)
    assert (result.outcome, result.reason) == ("stopped", "stop")
    assert result.checkpoint is not None


def test_a_killed_worker_s_run_goes_on_with_the_losses_of_one_that_was_left_alone(base: Path, tmp_path: Path) -> None:
    with tw.launch(config(base, tmp_path / "calm", max_steps=30)) as run:
        run.wait().check()
    seqs = []
    with tw.launch(config(base, tmp_path / "killed", max_steps=30, save_every=7), supervise=True) as run:
        run.pause()
        run.resume(steps=16)
        for event in run:
            if event.seq is not None:
                seqs.append(event.seq)
            if event.type == "paused" and event.step == 16:
                os.kill(run.pid, signal.SIGKILL)
        result = run.wait().check()
    assert result.restarts == 1
    assert seqs == list(range(1, len(seqs) + 1))
    assert tw.history(tmp_path / "killed") == tw.history(tmp_path / "calm")


STEER = """
import { attach, history, launch, latestCheckpoint } from 'trainwire'

const config = JSON.parse(process.argv[2])
const run = await launch(config, { command: ['trainwire'] })
const until = async (holds) => { for await (const event of run) if (holds(event)) return event }
await until((event) => event.type === 'step')
const stood = await run.pause()
const { phase } = await run.status()
const { tokens } = await run.generate({ prompt: 'say 3', maxTokens: 4, adapter: false })
const before = await run.eval()
const { previous } = await run.set({ learning_rate: 5e-3 })
await run.resume({ steps: 20 })
const paused = await until((event) => event.type === 'paused' && event.step > stood.step)
const after = await run.eval()
const saved = await run.checkpoint({ name: 'mine' })
const newest = await latestCheckpoint(run.runDir)
const stored = await run.replay({ types: ['init'] })
const stopped = await run.stop()
const result = await run.wait()
const { loss } = await history(run.runDir)
const again = await (await attach(run.runDir)).wait()
console.log(JSON.stringify({
  stood, phase, tokens, before, previous, paused, after, saved, newest, stored, stopped, result, loss, again,
}))
"""


@needs_node
def test_node_steers_a_run_that_trains(base: Path, tmp_path: Path) -> None:
    values = config(base, tmp_path / "run", eval_every=0, valid_data=str(base / "valid.jsonl"))
    done = run_node(tmp_path, STEER, json.dumps(values))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    last = told["stood"]["step"] + 20
    assert (told["stood"]["changed"], told["phase"], told["tokens"]) == (True, "paused", 4)
    assert told["previous"] == {"learning_rate": 1e-2}
    assert told["paused"]["step"] == told["saved"]["step"] == told["stopped"]["step"] == last
    assert told["after"]["valid_loss"] < told["before"]["valid_loss"]
    assert told["newest"]["path"] == told["saved"]["path"]
    assert [event["type"] for event in told["stored"]] == ["init"]
    assert told["loss"]["steps"] == list(range(1, last + 1))
    assert (told["result"]["outcome"], told["result"]["exitCode"]) == ("stopped", 0)
    assert told["again"]["checkpoint"] == told["result"]["checkpoint"] == told["stopped"]["checkpoint"]


def test_status_says_that_a_shape_is_compiled_and_that_training_goes_on_then(base: Path, tmp_path: Path) -> None:
    with tw.launch(config(base, tmp_path / "run", max_steps=3)) as run:
        told = [event.activity for event in run if event.type == "status" and event.phase == "running"]
    assert told == ["train", "compile", "train"]
