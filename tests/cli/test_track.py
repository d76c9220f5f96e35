"""Trackers beside a run: they get every event, and whatever they do, the run does not notice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainwire_cli.trackers import Follower, RunInfo, metrics

TRACKERS = '''
import json, os, sys, threading

class Recorder:
    """Writes down its calls, one a line, and at the end a file that says so."""
    def __init__(self):
        self.file = open(os.environ["TRACKED"], "a")
    def note(self, *what):
        print(json.dumps(what), file=self.file, flush=True)
    def begin(self, run, resumed_from_step):
        self.note("begin", run.run_name, run.config["max_steps"], resumed_from_step)
    def event(self, event):
        self.note("event", event["type"], event["seq"], event.get("step"))
    def close(self, outcome):
        self.note("close", outcome)
        os.rename(os.environ["TRACKED"], os.environ["TRACKED"] + ".done")

class Hanging(Recorder):
    def event(self, event):
        self.note("hangs", os.getpid())
        threading.Event().wait()

class Failing(Recorder):
    def event(self, event):
        raise RuntimeError("no network")
'''


class Tracked:
    """A folder with a config, trackers, and what they recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes = folder / "notes"
        self.run_dir = folder / "runs/c"
        (folder / "my_trackers.py").write_text(TRACKERS)
        (folder / "c.toml").write_text('model = "m/m"\ndata = "d/d"\nmax_steps = 6\n')
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, tracker: str, *words: str, **script: Any) -> subprocess.Popen[bytes]:
        """Start a scripted run with a tracker."""
        (self.folder / "script.json").write_text(json.dumps({"step_ms": 1, **script}))
        command = [sys.executable, "-m", "trainwire_cli", "run", str(self.folder / "c.toml"), "--engine", "fake"]
        command += ["--script", str(self.folder / "script.json"), "--tracker", tracker, *words]
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONSAFEPATH": "1", "TRACKED": str(self.notes)}
        environment["WANDB_MODE"] = "offline"
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        )
        self.started.append(process)
        return process

    def events(self) -> list[dict[str, Any]]:
        """The log."""
        return [json.loads(line) for line in (self.run_dir / "events.jsonl").read_bytes().splitlines()]

    def noted(self, path: Path) -> list[list[Any]]:
        """What a tracker wrote down, once the file is there."""
        wait_for(path.is_file)
        return [json.loads(line) for line in path.read_text().splitlines()]


def wait_for(condition: Callable[[], object], seconds: float = 90) -> None:
    """Wait for what another process does; it says so only by files."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def tracked(tmp_path: Path) -> Iterator[Tracked]:
    """Trackers and a config; what was started is gone afterwards."""
    made = Tracked(tmp_path)
    yield made
    for process in made.started:
        process.terminate()
        process.communicate(timeout=90)


def test_a_tracker_gets_every_event_of_the_run_and_its_outcome(tracked: Tracked) -> None:
    process = tracked.start("my_trackers:Recorder")
    process.communicate(timeout=240)
    assert process.returncode == 0
    begin, *events, close = tracked.noted(Path(f"{tracked.notes}.done"))
    assert begin == ["begin", "c", 6, None]
    log = tracked.events()
    first = next(event["seq"] for event in log if event["type"] == "init")
    assert events == [["event", e["type"], e["seq"], e.get("step")] for e in log if e["seq"] >= first]
    assert close == ["close", "completed"]


def test_a_resumed_run_tells_its_tracker_where_it_goes_on(tracked: Tracked) -> None:
    first = tracked.start("my_trackers:Recorder", "save_every=2", acts=[{"do": "die", "step": 4, "signal": "SIGKILL"}])
    first.communicate(timeout=240)
    done = Path(f"{tracked.notes}.done")
    assert tracked.noted(done)[-1] == ["close", "failed"]
    done.unlink()
    second = tracked.start("my_trackers:Recorder", "save_every=2")
    second.communicate(timeout=240)
    notes = tracked.noted(done)
    assert notes[0] == ["begin", "c", 6, 2]
    assert [note[3] for note in notes if note[:2] == ["event", "step"]] == [3, 4, 5, 6]


def test_a_tracker_that_hangs_holds_nothing_up(tracked: Tracked) -> None:
    process = tracked.start("my_trackers:Hanging", "max_steps=500", step_ms=2)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    assert json.loads(out.splitlines()[-1])["outcome"] == "completed"
    assert sum(event["type"] == "step" for event in tracked.events()) == 500
    (hangs,) = [note for note in tracked.noted(tracked.notes) if note[0] == "hangs"]
    os.kill(hangs[1], signal.SIGKILL)


def test_a_tracker_that_fails_is_named_with_its_last_words(tracked: Tracked) -> None:
    process = tracked.start("my_trackers:Failing", "max_steps=1000000")
    wait_for((tracked.run_dir / "events.jsonl").is_file)
    wait_for(lambda: any(event.get("code") == "tracker_failed" for event in tracked.events()))
    log = next(event for event in tracked.events() if event.get("code") == "tracker_failed")
    assert (log["level"], log["details"]) == ("warn", {"tracker": "my_trackers:Failing", "status": 1})
    assert "RuntimeError: no network" in (tracked.run_dir / "tracker-my_trackers.Failing.log").read_text()
    assert process.poll() is None


def test_a_tracker_learns_that_the_worker_was_killed(tracked: Tracked) -> None:
    process = tracked.start("my_trackers:Recorder", "max_steps=1000000")
    wait_for(lambda: tracked.notes.is_file() and '"step"' in tracked.notes.read_text())
    process.send_signal(signal.SIGKILL)
    assert tracked.noted(Path(f"{tracked.notes}.done"))[-1] == ["close", None]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("nothing", "there is no tracker 'nothing'"), ("no_such_package.module:Class", "no_such_package")],
)
def test_a_tracker_that_does_not_exist_is_refused_at_once(tracked: Tracked, name: str, sentence: str) -> None:
    process = tracked.start(name)
    out, err = process.communicate(timeout=240)
    assert (process.returncode, out) == (2, b"")
    assert sentence in err.decode()


def test_the_numbers_of_a_step_have_plain_names_and_none_is_made_up() -> None:
    assert metrics({"type": "step", "step": 1, "loss": None, "grad_norm": 2}) == {"train/grad_norm": 2}
    assert metrics({"type": "checkpoint", "step": 1}) == {}


def test_tensorboard_shows_one_curve_over_a_resume(tracked: Tracked) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = ("tensorboard", "save_every=2", "eval_every=3")
    first = tracked.start(*words, valid_examples=8, acts=[{"do": "die", "step": 4, "signal": "SIGKILL"}])
    first.communicate(timeout=240)
    tracked.start(*words, valid_examples=8).communicate(timeout=240)
    folder = tracked.run_dir / "tensorboard"
    read = EventAccumulator(str(folder), purge_orphaned_data=True)

    def whole() -> bool:
        if not folder.is_dir():
            return False
        read.Reload()
        return "train/loss" in read.Tags()["scalars"] and len(read.Scalars("train/loss")) == 6

    wait_for(whole)
    wanted = {event["step"]: event["loss"] for event in tracked.events() if event["type"] == "step"}
    assert {point.step: point.value for point in read.Scalars("train/loss")} == pytest.approx(wanted, rel=1e-6)
    assert [point.step for point in read.Scalars("valid/loss")] == [3, 6]


def test_wandb_offline_writes_a_run_that_can_be_synced(tracked: Tracked) -> None:
    pytest.importorskip("wandb")
    tracked.start("wandb").communicate(timeout=240)

    def finished() -> list[Path]:
        text = tracked.run_dir / "wandb/debug.log"
        return list(tracked.run_dir.glob("wandb/offline-run-*/*.wandb")) if text.exists() else []

    wait_for(finished)
    (file,) = finished()
    wait_for(lambda: b"train/loss" in file.read_bytes())


class FakeRun:
    """What `wandb.init` gives, as far as it is used."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.calls.append(("define", name, step_metric))

    def log(self, values: dict[str, Any]) -> None:
        self.calls.append(("log", values))

    def finish(self, exit_code: int) -> None:
        self.calls.append(("finish", exit_code))


@pytest.mark.parametrize(("outcome", "code"), [("completed", 0), ("interrupted", 0), ("failed", 1), (None, 1)])
def test_wandb_gets_one_run_with_its_own_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcome: str | None, code: int
) -> None:
    run, begun = FakeRun(), []
    module = types.ModuleType("wandb")
    module.Settings = lambda **settings: settings  # type: ignore[attr-defined]

    def init(**settings: Any) -> FakeRun:
        begun.append(settings)
        return run

    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delitem(sys.modules, "trainwire_cli.trackers.wandb", raising=False)
    from trainwire_cli.trackers.wandb import WeightsAndBiases

    monkeypatch.delitem(sys.modules, "trainwire_cli.trackers.wandb")
    follower = Follower(WeightsAndBiases(), tmp_path)
    start = {"type": "init", "run_id": "r1", "run_name": "chat", "config": {"batch_size": 8}}
    for event in (
        {"type": "attempt", "resumed_from_step": None},
        start,
        {"type": "step", "step": 1, "loss": 2.5},
        {"type": "attempt", "resumed_from_step": 1},
        start,
        {"type": "generation", "step": 2, "index": 0, "prompt": "?", "completion": "!"},
        *([{"type": "end", "outcome": outcome}] if outcome else []),
    ):
        follower.take(event)
    follower.close()
    (settings,) = begun
    assert (settings["id"], settings["name"], settings["config"]) == ("r1", "chat", {"batch_size": 8})
    assert [call for call in run.calls if call[0] != "define"] == [
        ("log", {"step": 1, "train/loss": 2.5}),
        ("log", {"step": 2, "generation/0": "!"}),
        ("finish", code),
    ]


def test_a_tracker_that_never_began_is_not_closed(tmp_path: Path) -> None:
    class Nothing:
        def begin(self, run: RunInfo, resumed_from_step: int | None) -> None:
            raise AssertionError

        def event(self, event: dict[str, Any]) -> None:
            raise AssertionError

        def close(self, outcome: str | None) -> None:
            raise AssertionError

    follower = Follower(Nothing(), tmp_path)
    follower.take({"type": "attempt"})
    follower.take({"type": "end", "outcome": "failed"})
    follower.close()
