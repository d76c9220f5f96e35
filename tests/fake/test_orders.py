"""The scripted engine answers every order once, after its effect, as the real engine does."""

import signal
from typing import Any

import pytest

from trainwire_protocol import channel as ch
from trainwire_protocol import events, rundir

SLOW = {"examples": 8_000_000, "step_ms": 2}


def effect_then_answer(engine: Any, kind: type[Any], order: int) -> tuple[Any, ch.Answer]:
    """Read on to the answer of an order, and check that its effect came before."""
    event = engine.until(kind, cause=order)
    return event, engine.until(ch.Answer, order=order)


def running(start: Any, script: dict[str, Any] | None = None, step: int = 3, **config: Any) -> Any:
    engine = start({**SLOW, **(script or {})}, **config)
    engine.begin()
    engine.until(events.Step, step=step)
    return engine


def test_the_order_of_a_run_is_that_of_the_real_engine(start: Any, names: Any) -> None:
    engine = start({"examples": 24, "valid_examples": 8}, save_every=3, eval_every=2, num_epochs=2)
    begin = engine.begin()
    reports = engine.rest()
    assert [name for name in names(reports) if name not in ("progress",)] == [
        *["data", "data", "init", "_answer"],
        *["epoch_start", "step", "step", "eval_end", "checkpoint", "step", "epoch_end", "checkpoint"],
        *["epoch_start", "step", "eval_end", "checkpoint", "step", "step", "eval_end", "epoch_end"],
        *["checkpoint", "checkpoint", "complete", "_finished"],
    ]
    kinds = [report.kind for report in reports if isinstance(report, events.Checkpoint)]
    assert kinds == ["best", "periodic", "best", "best", "final"]
    answer = next(report for report in reports if isinstance(report, ch.Answer))
    assert answer.order == begin
    assert answer.result == {
        "run_id": "r1",
        "run_dir": str(engine.run_dir),
        "total_steps": 6,
        "resumed_from": None,
    }


def test_signs_of_life_precede_each_kind_of_work(start: Any) -> None:
    engine = start({"valid_examples": 8}, eval_every=10, save_every=10)
    engine.begin()
    activities = [report.activity for report in engine.rest() if isinstance(report, ch.Alive)]
    changes = [a for a, before in zip(activities, [None, *activities]) if a != before]
    assert changes == ["load", "tokenize", "train", "eval", "checkpoint", "train", "eval", "checkpoint"]


def test_a_pause_takes_effect_once_and_a_second_one_changes_nothing(start: Any) -> None:
    engine = running(start)
    paused, answer = effect_then_answer(engine, events.Paused, engine.order(ch.PauseOrder))
    assert answer.result == {"step": paused.step, "changed": True}
    again = engine.order(ch.PauseOrder)
    assert engine.until(ch.Answer, order=again).result == {"step": paused.step, "changed": False}
    resumed, answer = effect_then_answer(engine, events.Resumed, engine.order(ch.ResumeOrder))
    assert answer.result == {"step": resumed.step, "changed": True}
    assert engine.until(events.Step).step == paused.step + 1


def test_a_resume_while_running_changes_nothing(start: Any) -> None:
    engine = running(start)
    order = engine.order(ch.ResumeOrder)
    assert engine.until(ch.Answer, order=order).result["changed"] is False
    assert not [report for report in engine.reports if isinstance(report, events.Resumed)]


def test_a_counted_resume_pauses_again_after_that_many_updates(start: Any) -> None:
    engine = running(start)
    paused, _ = effect_then_answer(engine, events.Paused, engine.order(ch.PauseOrder))
    order = engine.order(ch.ResumeOrder, steps=3)
    engine.until(ch.Answer, order=order)
    again = engine.until(events.Paused)
    assert (again.step, again.cause) == (paused.step + 3, order)


def test_a_plain_resume_lifts_the_count(start: Any) -> None:
    engine = running(start)
    paused, _ = effect_then_answer(engine, events.Paused, engine.order(ch.PauseOrder))
    # Both are there before the engine takes the first.
    engine.process.send_signal(signal.SIGSTOP)
    engine.order(ch.ResumeOrder, steps=100)
    order = engine.order(ch.ResumeOrder)
    engine.process.send_signal(signal.SIGCONT)
    assert engine.until(ch.Answer, order=order).result["changed"] is True
    engine.until(events.Step, step=paused.step + 101)
    assert len([report for report in engine.reports if isinstance(report, events.Paused)]) == 1


def test_a_checkpoint_of_one_step_is_not_written_twice(start: Any) -> None:
    engine = running(start)
    effect_then_answer(engine, events.Paused, engine.order(ch.PauseOrder))
    saved, answer = effect_then_answer(engine, events.Checkpoint, engine.order(ch.CheckpointOrder))
    assert answer.result == {"path": saved.path, "step": saved.step, "bytes": saved.bytes, "changed": True}
    again = engine.order(ch.CheckpointOrder)
    assert engine.until(ch.Answer, order=again).result == {**answer.result, "changed": False}
    assert rundir.defect(rundir.Path(saved.path)) is None
    stop = engine.order(ch.StopOrder)
    answer = engine.until(ch.Answer, order=stop)
    assert answer.result == {"outcome": "stopped", "step": saved.step, "checkpoint": saved.path}


def test_a_named_checkpoint_has_its_name_and_names_of_the_run_are_refused(start: Any) -> None:
    engine = running(start)
    saved, _ = effect_then_answer(engine, events.Checkpoint, engine.order(ch.CheckpointOrder, name="mine"))
    assert (saved.path, saved.kind) == (str(engine.run_dir / "mine"), "manual")
    engine.until(events.Step, step=saved.step + 2)
    for name in ("final", "best", "abandoned", "mine"):
        order = engine.order(ch.CheckpointOrder, name=name)
        assert engine.until(ch.Answer, order=order).code == "bad_params"


def test_a_stop_saves_and_is_answered_after_the_checkpoint(start: Any) -> None:
    engine = running(start)
    order = engine.order(ch.StopOrder)
    saved = engine.until(events.Checkpoint)
    answer = engine.until(ch.Answer, order=order)
    finished = engine.until(ch.Finished)
    assert answer.result == {"outcome": "stopped", "step": saved.step, "checkpoint": saved.path}
    assert (finished.outcome, finished.step, finished.checkpoint) == ("stopped", saved.step, saved.path)
    assert not [report for report in engine.reports if isinstance(report, events.EpochEnd)]
    assert engine.exit_code() == 0


def test_a_stop_without_save_writes_nothing(start: Any) -> None:
    engine = running(start)
    engine.order(ch.StopOrder, save=False)
    assert engine.until(ch.Finished).checkpoint is None


def test_a_stop_while_loading_ends_the_run_before_it_began(start: Any) -> None:
    engine = start({"load_ms": 600_000})
    begin = engine.begin()
    stop = engine.order(ch.StopOrder)
    rest = engine.rest()
    answers = {report.order: report for report in rest if isinstance(report, ch.Answer)}
    assert answers[begin].code == "shutting_down"
    assert answers[stop].result == {"outcome": "stopped", "step": 0, "checkpoint": None}
    assert isinstance(rest[-1], ch.Finished)


def test_what_waits_behind_a_stop_is_refused(start: Any) -> None:
    engine = running(start)
    orders = [engine.order(ch.StopOrder), engine.order(ch.PauseOrder), engine.order(ch.StopOrder)]
    engine.rest()
    answers = {report.order: report for report in engine.reports if isinstance(report, ch.Answer)}
    assert answers[orders[0]].result == answers[orders[2]].result
    assert answers[orders[1]].code == "shutting_down"


def test_settings_change_all_or_nothing(start: Any) -> None:
    engine = running(start, schedule="constant", warmup_steps=0)
    effect_then_answer(engine, events.Paused, engine.order(ch.PauseOrder))
    order = engine.order(ch.SetOrder, values={"learning_rate": 0.5, "log_every": 4})
    changed, answer = effect_then_answer(engine, events.ConfigChanged, order)
    assert changed.changes["learning_rate"] == events.Change(1e-4, 0.5)
    assert answer.result["applied"] == {"learning_rate": 0.5, "log_every": 4}
    assert answer.result["previous"] == {"learning_rate": 1e-4, "log_every": 1}
    assert changed.effective_step == answer.result["effective_step"]
    engine.order(ch.ResumeOrder)
    first = engine.until(events.Step)
    assert first.step % 4 == 0
    assert first.step - first.updates + 1 == changed.effective_step
    assert engine.until(events.Step).learning_rate == 0.5
    refused = engine.order(ch.SetOrder, values={"eval_every": 3})
    assert engine.until(ch.Answer, order=refused).code == "bad_params"


def test_a_new_end_before_the_present_step_ends_the_run_now(start: Any) -> None:
    engine = running(start, step=10)
    engine.order(ch.SetOrder, values={"max_steps": 2})
    complete = engine.until(events.Complete)
    assert complete.total_steps >= 10


def test_an_evaluation_by_order_is_answered_and_never_the_best(start: Any) -> None:
    engine = running(start, {"valid_examples": 20}, eval_every=1000)
    order = engine.order(ch.EvalOrder, max_batches=1)
    event, answer = effect_then_answer(engine, events.EvalEnd, order)
    assert (event.best, event.tokens) == (False, 8 * 32)
    assert answer.result == {"valid_loss": event.valid_loss, "tokens": event.tokens, "ms": event.ms}


def test_an_evaluation_without_validation_data_is_refused(start: Any) -> None:
    engine = running(start)
    order = engine.order(ch.EvalOrder)
    assert engine.until(ch.Answer, order=order).code == "wrong_state"


def test_a_generation_is_answered_with_and_without_the_adapter(start: Any) -> None:
    engine = running(start, {"completion": "a b c d", "base_completion": "base"})
    order = engine.order(ch.GenerateOrder, prompt="p", max_tokens=2)
    assert engine.until(ch.Answer, order=order).result["text"] == "a b"
    order = engine.order(ch.GenerateOrder, prompt="p", adapter=False)
    assert engine.until(ch.Answer, order=order).result["text"] == "base"


def test_a_stop_cuts_a_generation_short_and_both_are_answered(start: Any) -> None:
    engine = running(start, {"completion": "word " * 1000, "token_ms": 20})
    generate = engine.order(ch.GenerateOrder, prompt="p", max_tokens=1000)
    engine.until(ch.Alive, activity="generate")
    stop = engine.order(ch.StopOrder)
    engine.rest()
    answers = {report.order: report for report in engine.reports if isinstance(report, ch.Answer)}
    assert answers[generate].code == "shutting_down"
    assert answers[stop].result["outcome"] == "stopped"


def test_a_completed_run_lingers_for_questions_until_a_stop(start: Any) -> None:
    engine = start({"step_ms": 0})
    engine.begin(linger=True)
    complete = engine.until(events.Complete)
    order = engine.order(ch.GenerateOrder, prompt="p")
    assert engine.until(ch.Answer, order=order).code is None
    order = engine.order(ch.PauseOrder)
    assert engine.until(ch.Answer, order=order).code == "wrong_state"
    stop = engine.order(ch.StopOrder)
    assert engine.until(ch.Answer, order=stop).result["outcome"] == "completed"
    finished = engine.until(ch.Finished)
    assert (finished.outcome, finished.step) == ("completed", complete.total_steps)


def test_a_worker_that_is_gone_makes_the_engine_save_and_leave(start: Any) -> None:
    engine = running(start)
    engine.close()
    assert engine.exit_code() == 0
    newest, _ = rundir.newest_whole_checkpoint(engine.run_dir)
    assert newest is not None
    assert newest.step >= 3


def test_a_failed_final_save_pauses_the_run_if_it_is_to_be_held(start: Any) -> None:
    fails = {"do": "fail", "at": "final", "code": "disk_full"}
    engine = start({"step_ms": 0, "acts": [fails]})
    engine.begin(hold_on_failed_save=True)
    assert engine.until(events.Paused).cause is None
    log = next(report for report in engine.reports if isinstance(report, events.Log) and report.level == "error")
    assert (log.code, log.details["code"]) == ("save_failed", "disk_full")
    stop = engine.order(ch.StopOrder)
    assert engine.until(ch.Answer, order=stop).result["checkpoint"].endswith("checkpoint-000020")


def test_a_resumed_run_has_the_numbers_of_one_that_was_never_interrupted(start: Any) -> None:
    script = {"examples": 40, "clock": "scripted", "valid_examples": 4}
    config = {"num_epochs": 3, "save_every": 4, "eval_every": 3, "batch_size": 4}
    whole = start(script, **config)
    whole.begin()
    wanted = {r.step: r for r in whole.rest() if isinstance(r, events.Step)}
    ends = [(r.epoch, r.avg_loss, r.updates) for r in whole.reports if isinstance(r, events.EpochEnd)]
    resumed = start(script, **config)
    resumed.begin(attempt=2, resume_from=str(whole.run_dir / "checkpoint-000012"))
    reports = resumed.rest()
    steps = [report for report in reports if isinstance(report, events.Step)]
    assert [step.step for step in steps] == list(range(13, 31))
    assert all(step == wanted[step.step] for step in steps)
    assert [(r.epoch, r.avg_loss, r.updates) for r in reports if isinstance(r, events.EpochEnd)] == ends[1:]
    history = next(report for report in reports if isinstance(report, ch.StepHistory))
    assert [step.step for step in history.steps] == [9, 10, 11, 12]
    assert (whole.run_dir / rundir.ABANDONED_NAME / "final-1").is_dir()


def test_a_resume_with_another_value_of_a_fixed_key_is_refused(start: Any) -> None:
    first = running(start, save_every=2)
    first.order(ch.StopOrder)
    path = first.until(ch.Finished).checkpoint
    second = start(SLOW, lora_rank=4)
    second.begin(resume_from=path)
    failed = second.until(ch.Failed)
    assert failed.code == "resume_refused"
    assert failed.details["changes"]["lora_rank"] == {"from": 8, "to": 4, "on_resume": "fixed"}
    assert second.exit_code() == 3


def test_a_check_is_answered_and_the_engine_leaves(start: Any) -> None:
    engine = start({"valid_examples": 4})
    order = engine.order(ch.Check, config=engine.config)
    result = engine.until(ch.Answer, order=order).result
    assert result["valid"] is True
    assert [split["split"] for split in result["data"]] == ["train", "valid"]
    assert result["total_steps"] == 20
    assert engine.exit_code() == 0


@pytest.mark.parametrize("script", ['{"steps": 3}', '{"acts": [{"do": "dance"}]}', "{", '{"step_ms": -1}'])
def test_a_wrong_script_is_an_error_that_names_it(script: str, start: Any) -> None:
    engine = start(script)
    failed = engine.until(ch.Failed)
    assert failed.code == "config_invalid"
    assert "script.json" in failed.message
    assert engine.exit_code() == 3


def test_updates_are_put_together_by_log_every(start: Any) -> None:
    engine = start({"clock": "scripted"}, log_every=8)
    engine.begin()
    steps = [report for report in engine.rest() if isinstance(report, events.Step)]
    assert [(step.step, step.updates, step.total_tokens) for step in steps] == [
        (8, 8, 2048),
        (16, 8, 2048),
        (20, 4, 1024),
    ]
