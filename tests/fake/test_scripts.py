"""Every script of the examples does what the documentation says of it."""

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trainwire_fake.script import AnyAct, Script, read_script
from trainwire_protocol import channel as ch
from trainwire_protocol import events, rundir

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "scripts"
DOCUMENT = ROOT / "docs" / "scripted-engine.md"
Play = Callable[..., Any]
CHECKS: dict[str, Callable[[Play], None]] = {}


def shows(function: Callable[[Play], None]) -> Callable[[Play], None]:
    """Register the check of the script that has the function's name."""
    CHECKS[function.__name__.replace("_", "-")] = function
    return function


def of(reports: list[Any], kind: type[Any]) -> list[Any]:
    return [report for report in reports if isinstance(report, kind)]


@shows
def plain(play: Play) -> None:
    engine = play()
    steps = of(engine.rest(), events.Step)
    assert [s.step for s in steps] == list(range(1, 21))
    assert steps[-1].loss < steps[0].loss
    assert engine.exit_code() == 0


@shows
def epochs_and_validation(play: Play) -> None:
    reports = play(batch_size=8, eval_every=2).rest()
    assert [s.step for s in of(reports, events.Step)] == list(range(1, 11))
    assert [e.epoch for e in of(reports, events.EpochEnd)] == [1, 2]
    evaluations = of(reports, events.EvalEnd)
    assert [(e.step, e.valid_loss, e.best) for e in evaluations] == [
        (2, 1.8, True),
        (4, 1.5, True),
        (6, 1.44, True),
        (8, 1.6, False),
        (10, 1.8, False),
    ]
    train, valid = of(reports, events.Data)
    assert (train.rows_read, train.rows_used, valid.rows_used) == (42, 40, 16)
    assert train.trained_tokens == 2000
    assert "best" in [c.kind for c in of(reports, events.Checkpoint)]


@shows
def skipped_updates(play: Play) -> None:
    engine = play()
    reports = engine.rest()
    assert [s.step for s in of(reports, events.Step) if s.skipped] == [5, 6, 9]
    assert [log.details["step"] for log in of(reports, events.Log) if log.code == "non_finite"] == [5, 6, 9]
    assert of(reports, ch.Finished)[0].outcome == "completed"


@shows
def diverged(play: Play) -> None:
    engine = play()
    reports = engine.rest()
    assert of(reports, events.Step)[-1].step == 12
    failed = of(reports, ch.Failed)[0]
    assert failed.code == "non_finite"
    assert failed.checkpoint.endswith("emergency-checkpoint-000012")
    assert engine.exit_code() == 6


@shows
def slow_step(play: Play) -> None:
    engine = play()
    reports = engine.rest()
    assert of(reports, events.Step)[2].training_time_ms >= 1500


@shows
def hanging_step(play: Play) -> None:
    engine = play()
    assert engine.until(events.Log, message="This update hangs.")
    order = engine.order(ch.PauseOrder)
    engine.channel.settimeout(0.3)
    with pytest.raises(TimeoutError):
        engine.until(ch.Answer, order=order)


@shows
def prints(play: Play) -> None:
    engine = play()
    engine.rest()
    printed = engine.printed()
    for text in (b'{"type":"step"} printed from Python', b"printed from C", b"printed from a child"):
        assert text in printed
    assert printed.count(b"a warning\n") == 1000


@shows
def killed_once(play: Play) -> None:
    engine = play(save_every=5)
    engine.rest()
    assert engine.exit_code() == -signal.SIGKILL
    newest, _ = rundir.newest_whole_checkpoint(engine.run_dir)
    assert newest is not None
    again = play(attempt=2, resume_from=str(newest.path))
    reports = again.rest()
    assert of(reports, events.Init)[0].start_step == 10
    assert [s.step for s in of(reports, ch.StepHistory)[0].steps] == [6, 7, 8, 9, 10]
    assert [s.step for s in of(reports, events.Step)] == list(range(11, 21))
    assert again.exit_code() == 0


@shows
def segfault(play: Play) -> None:
    engine = play()
    assert not of(engine.rest(), ch.Finished)
    assert engine.exit_code() == -signal.SIGSEGV
    assert b"driver: bad address" in engine.printed()


@shows
def exits(play: Play) -> None:
    engine = play()
    assert not of(engine.rest(), ch.Failed)
    assert engine.exit_code() == 17


@shows
def out_of_memory(play: Play) -> None:
    engine = play()
    failed = of(engine.rest(), ch.Failed)[0]
    assert failed.code == "out_of_memory"
    assert failed.hint
    assert failed.checkpoint.endswith("emergency-checkpoint-000009")
    assert engine.exit_code() == 5


@shows
def model_refused(play: Play) -> None:
    engine = play()
    failed = of(engine.rest(), ch.Failed)[0]
    assert (failed.code, failed.checkpoint, engine.exit_code()) == ("model_load_failed", None, 4)


@shows
def data_refused(play: Play) -> None:
    engine = play()
    reports = engine.rest()
    failed = of(reports, ch.Failed)[0]
    assert (failed.code, failed.details) == ("dataset_invalid", {"path": "train.jsonl", "line": 3})
    assert not of(reports, events.Init)
    assert engine.exit_code() == 3


@shows
def full_disk(play: Play) -> None:
    reports = play(save_every=5).rest()
    assert [c.step for c in of(reports, events.Checkpoint)] == [5, 15, 20]
    lost = next(log for log in of(reports, events.Log) if log.code == "save_failed")
    assert (lost.level, lost.details["step"]) == ("error", 10)
    assert of(reports, ch.Finished)[0].outcome == "completed"


@shows
def full_disk_at_the_end(play: Play) -> None:
    engine = play()
    assert of(engine.rest(), ch.Failed)[0].code == "disk_full"
    assert engine.exit_code() == 7


@shows
def slow_save(play: Play) -> None:
    began = time.monotonic()
    reports = play(save_every=10).rest()
    assert [c.step for c in of(reports, events.Checkpoint)] == [10, 20]
    assert time.monotonic() - began > 2 * 0.5


@shows
def long_generation(play: Play) -> None:
    engine = play(prompts=["Say something."], generate_every=20)
    generation = engine.until(events.Generation)
    assert len(generation.completion) == 20000 * len("lorem ipsum ")
    assert generation.tokens == 3


@shows
def slow_evaluation(play: Play) -> None:
    engine = play(eval_every=10)
    engine.until(ch.Alive, activity="eval")
    pause = engine.order(ch.PauseOrder)
    assert engine.until(events.Paused).cause == pause
    engine.until(ch.Answer, order=pause)
    assert not of(engine.reports, events.EvalEnd)
    engine.order(ch.ResumeOrder)
    assert engine.until(events.EvalEnd).step == 10


@shows
def logs_and_progress(play: Play) -> None:
    reports = play().rest()
    assert [log.code for log in of(reports, events.Log)] == ["no_validation", "loss_spike"]
    assert [p.done for p in of(reports, events.Progress) if p.title == "Downloading"] == [0, 1, 2, 3, 4, 5]


@shows
def flood(play: Play) -> None:
    reports = play().rest()
    assert sum(log.code == "flood" for log in of(reports, events.Log)) == 20_000
    assert sum(p.title == "Flood" for p in of(reports, events.Progress)) == 100


@shows
def fast(play: Play) -> None:
    engine = play()
    engine.until(events.Step, step=2000)
    engine.order(ch.StopOrder)
    assert engine.until(ch.Finished).outcome == "stopped"


@shows
def survivor(play: Play) -> None:
    engine = play()
    engine.until(events.Step, step=1)
    engine.close()
    assert engine.exit_code() == 0
    newest, _ = rundir.newest_whole_checkpoint(engine.run_dir)
    assert newest is not None
    assert newest.path.name == "final"


@shows
def deaf(play: Play) -> None:
    engine = play()
    engine.until(events.Step, step=1)
    order = engine.order(ch.StopOrder)
    engine.until(events.Step, step=20)
    assert order not in [answer.order for answer in of(engine.reports, ch.Answer)]


@shows
def broken_frame(play: Play) -> None:
    engine = play()
    with pytest.raises(msgspec.DecodeError):
        engine.rest()


@shows
def half_frame(play: Play) -> None:
    engine = play()
    assert of(engine.rest(), events.Step)[-1].step == 4
    assert engine.exit_code() == 1


@shows
def closed_channel(play: Play) -> None:
    engine = play()
    assert of(engine.rest(), events.Step)[-1].step == 4
    assert engine.exit_code() == 0
    newest, _ = rundir.newest_whole_checkpoint(engine.run_dir)
    assert newest is not None
    assert newest.path.name == "checkpoint-000005"


@shows
def stuck_at_exit(play: Play) -> None:
    engine = play()
    assert engine.until(ch.Finished).outcome == "completed"
    assert engine.process.poll() is None


@shows
def child_left_behind(play: Play) -> None:
    engine = play()
    assert of(engine.rest(), ch.Finished)
    assert engine.exit_code() == 0
    deadline = time.monotonic() + 90
    while b"the child leaves" not in engine.printed():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@shows
def repeatable(play: Play) -> None:
    def session() -> list[bytes]:
        engine = play()
        engine.until(events.Step, step=3)
        engine.order(ch.PauseOrder)
        engine.until(events.Paused)
        engine.order(ch.StopOrder)
        reports = [msgspec.json.encode(r) for r in engine.rest()]
        for folder in sorted(engine.run_dir.iterdir()):
            for file in sorted(folder.iterdir()):
                reports.append(file.read_bytes())
                file.unlink()
            folder.rmdir()
        return reports

    first, second = session(), session()
    assert first == second
    assert b'"training_time_ms":250' in b"".join(first)


@pytest.mark.parametrize("name", sorted(path.stem for path in SCRIPTS.glob("*.json")))
def test_a_script_of_the_examples_does_what_it_says(name: str, start: Any) -> None:
    def play(*, attempt: int = 1, resume_from: str | None = None, **config: Any) -> Any:
        engine = start((SCRIPTS / f"{name}.json").read_text(), **config)
        engine.begin(attempt=attempt, resume_from=resume_from)
        return engine

    CHECKS[name](play)


def test_every_check_belongs_to_a_script() -> None:
    assert set(CHECKS) == {path.stem for path in SCRIPTS.glob("*.json")}


def test_the_documentation_names_every_script_key_and_act() -> None:
    text = DOCUMENT.read_text()
    acts = {str(kind.__struct_config__.tag): kind for kind in AnyAct.__args__}
    names = {f"{path.stem}.json" for path in SCRIPTS.glob("*.json")}
    names |= {f"`{key}`" for key in Script.__struct_fields__} | {f"`{act}`" for act in acts}
    names |= {f"`{field}`" for kind in acts.values() for field in kind.__struct_fields__}
    assert [name for name in sorted(names) if name not in text] == []


def test_every_json_block_of_the_documentation_is_a_script(tmp_path: Path) -> None:
    blocks = re.findall(r"```json\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(blocks) >= 10
    for number, block in enumerate(blocks):
        path = tmp_path / f"{number}.json"
        path.write_text(block)
        read_script(path)
        assert isinstance(json.loads(block), dict)
