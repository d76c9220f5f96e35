"""Orders take effect between two updates, in the order they came, and each is answered once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from drive import Engine
from scripted import Result, at_step, both, on, play
from tiny import CHAT_TEMPLATE

from trainwire_engine import reports
from trainwire_protocol import channel as ch
from trainwire_protocol import events as ev
from trainwire_protocol.rundir import defect, read_manifest


def position(result: Result, found: Any) -> int:
    return result.reports.index(found)


def answered_once(result: Result) -> bool:
    return set(Counter(a.order for a in result.of(ch.Answer)).values()) == {1}


def test_pause_stands_still_until_resume_and_both_are_answered_after_their_events(
    config: dict[str, Any], base: Path
) -> None:
    rule = both(at_step(2, ch.PauseOrder(order=5)), on(ev.Paused, ch.ResumeOrder(order=6)))
    result = play(config, base, rule)
    paused, resumed = result.one(ev.Paused), result.one(ev.Resumed)
    assert (paused.step, paused.cause, resumed.step, resumed.cause) == (2, 5, 2, 6)
    assert result.answer(5).result == {"step": 2, "changed": True}
    assert result.answer(6).result == {"step": 2, "changed": True}
    order = [paused, result.answer(5), resumed, result.answer(6)]
    assert [position(result, r) for r in order] == sorted(position(result, r) for r in order)
    assert list(result.losses) == [1, 2, 3, 4, 5, 6]
    assert answered_once(result)


def test_nothing_is_done_while_paused_and_training_is_told_again_afterwards(config: dict[str, Any], base: Path) -> None:
    activities: list[str] = []

    def rule(report: Any) -> list[ch.AnyOrder] | None:
        if isinstance(report, ch.Alive):
            activities.append(report.activity)
        if isinstance(report, ev.Step) and report.step == 2:
            return [ch.PauseOrder(order=5)]
        if isinstance(report, ch.Alive) and report.activity == "none":
            return [ch.ResumeOrder(order=6)]
        return None

    play(config, base, rule)
    assert activities == ["load", "tokenize", "load", "compile", "train", "none", "train", "checkpoint", "train"]


def test_a_pause_changes_no_number(config: dict[str, Any], base: Path, tmp_path: Path) -> None:
    plain = play(config, base)
    rule = both(at_step(3, ch.PauseOrder(order=5)), on(ev.Paused, ch.ResumeOrder(order=6)))
    paused = play({**config, "run_dir": str(tmp_path / "other")}, base, rule)
    assert plain.losses == paused.losses


def test_a_second_pause_and_a_resume_while_running_change_nothing(config: dict[str, Any], base: Path) -> None:
    rule = both(
        at_step(1, ch.ResumeOrder(order=4)),
        at_step(2, ch.PauseOrder(order=5), ch.PauseOrder(order=6)),
        on(ev.Paused, ch.ResumeOrder(order=7)),
    )
    result = play(config, base, rule)
    assert result.answer(4).result == {"step": 1, "changed": False}
    assert result.answer(6).result == {"step": 2, "changed": False}
    assert len(result.of(ev.Paused)) == len(result.of(ev.Resumed)) == 1


def test_resume_with_steps_pauses_again_after_that_many_updates(config: dict[str, Any], base: Path) -> None:
    def rule(report: Any) -> list[ch.AnyOrder] | None:
        if isinstance(report, ev.Init):
            return [ch.PauseOrder(order=2)]
        if isinstance(report, ev.Paused):
            return [ch.ResumeOrder(order=10 + report.step, steps=3)]
        return None

    result = play(config, base, rule)
    assert [(p.step, p.cause) for p in result.of(ev.Paused)] == [(0, 2), (3, 10), (6, 13)]
    assert [r.step for r in result.of(ev.Resumed)] == [0, 3, 6]
    assert result.one(ch.Finished).outcome == "completed"


def test_a_plain_resume_lifts_the_count(config: dict[str, Any], base: Path) -> None:
    rule = both(
        on(ev.Init, ch.PauseOrder(order=2)),
        on(ev.Paused, ch.ResumeOrder(order=3, steps=3)),
        at_step(1, ch.ResumeOrder(order=4)),
    )
    result = play(config, base, rule)
    assert len(result.of(ev.Paused)) == 1
    assert result.answer(4).result == {"step": 1, "changed": True}
    assert list(result.losses)[-1] == 6


def test_stop_saves_a_checkpoint_and_sends_no_epoch_end(config: dict[str, Any], base: Path) -> None:
    result = play(config, base, at_step(3, ch.StopOrder(order=5)))
    path = Path(config["run_dir"]) / "checkpoint-000003"
    assert result.answer(5).result == {"outcome": "stopped", "step": 3, "checkpoint": str(path)}
    assert result.one(ev.Checkpoint).kind == "periodic"
    assert not result.of(ev.EpochEnd)
    assert not result.of(ev.Complete)
    finished = result.one(ch.Finished)
    assert (finished.outcome, finished.step, finished.checkpoint) == ("stopped", 3, str(path))
    assert result.status == 0
    assert defect(path) is None


def test_stop_without_save_leaves_no_checkpoint(config: dict[str, Any], base: Path) -> None:
    result = play(config, base, at_step(2, ch.StopOrder(order=5, save=False)))
    assert not result.of(ev.Checkpoint)
    assert result.answer(5).result == {"outcome": "stopped", "step": 2, "checkpoint": None}


def test_stop_at_a_step_that_is_saved_already_writes_nothing_twice(config: dict[str, Any], base: Path) -> None:
    result = play({**config, "save_every": 2}, base, on(ev.Checkpoint, ch.PauseOrder(order=2), ch.StopOrder(order=5)))
    saved = [c.step for c in result.of(ev.Checkpoint)]
    assert len(saved) == len(set(saved))


def test_stop_while_paused_saves_what_was_set(config: dict[str, Any], base: Path) -> None:
    rule = both(
        at_step(2, ch.PauseOrder(order=5)),
        on(ev.Paused, ch.CheckpointOrder(order=6), ch.SetOrder(order=7, values={"learning_rate": 0.5})),
        on(ev.ConfigChanged, ch.StopOrder(order=8)),
    )
    result = play(config, base, rule)
    assert [c.step for c in result.of(ev.Checkpoint)] == [2, 2]
    again = play(config, base, resume_from=result.one(ch.Finished).checkpoint)
    assert again.of(ev.Step)[0].learning_rate > 0.1


def test_stop_before_the_first_update_leaves_nothing(config: dict[str, Any], base: Path) -> None:
    result = play(config, base, on(ch.Alive, ch.StopOrder(order=5)))
    assert result.answer(5).result == {"outcome": "stopped", "step": 0, "checkpoint": None}
    assert result.one(ch.Finished).outcome == "stopped"
    assert not result.of(ev.Init)
    assert result.status == 0


def test_what_waits_when_the_run_stops_is_refused(config: dict[str, Any], base: Path) -> None:
    rule = at_step(2, ch.StopOrder(order=5), ch.CheckpointOrder(order=6), ch.StopOrder(order=7))
    result = play(config, base, rule)
    assert result.answer(6).code == "shutting_down"
    assert result.answer(7).result == result.answer(5).result
    assert answered_once(result)


def test_checkpoint_by_order_is_manual_and_not_written_twice_for_one_state(config: dict[str, Any], base: Path) -> None:
    rule = both(
        at_step(2, ch.PauseOrder(order=4), ch.CheckpointOrder(order=5)),
        on(ev.Checkpoint, ch.CheckpointOrder(order=6), ch.ResumeOrder(order=7)),
    )
    result = play(config, base, rule)
    path = str(Path(config["run_dir"]) / "checkpoint-000002")
    first, second = result.answer(5).result, result.answer(6).result
    assert first is not None
    assert second is not None
    assert (first["path"], first["step"], first["changed"]) == (path, 2, True)
    assert second == {**first, "changed": False}
    manual = [c for c in result.of(ev.Checkpoint) if c.kind == "manual"]
    assert [(c.path, c.cause) for c in manual] == [(path, 5)]


def test_an_ordered_checkpoint_of_a_state_that_is_saved_already_stays(config: dict[str, Any], base: Path) -> None:
    settings = {**config, "save_every": 1, "max_checkpoints": 1}
    result = play(settings, base, both(at_step(2, ch.PauseOrder(order=4)), on(ev.Paused, *_save_twice())))
    path = Path(config["run_dir"]) / "checkpoint-000002"
    first, second = result.answer(5).result, result.answer(6).result
    assert first is not None
    assert second is not None
    assert (first["path"], second) == (str(path), {**first, "changed": False})
    assert [(c.kind, c.cause) for c in result.of(ev.Checkpoint) if c.step == 2] == [("periodic", None), ("manual", 5)]
    assert defect(path) is None
    kept = sorted(folder.name for folder in path.parent.iterdir() if folder.is_dir())
    assert kept == ["checkpoint-000002", "checkpoint-000005", "final"]


def _save_twice() -> list[ch.AnyOrder]:
    return [ch.CheckpointOrder(order=5), ch.CheckpointOrder(order=6), ch.ResumeOrder(order=7)]


@pytest.mark.parametrize("order", [ch.StopOrder(order=5), ch.CheckpointOrder(order=5)])
def test_a_state_that_is_saved_as_best_alone_gets_a_name_that_nothing_takes_away(
    config: dict[str, Any], base: Path, order: ch.AnyOrder
) -> None:
    settings = {**config, "valid_data": str(base / "valid.jsonl"), "eval_every": 2}
    result = play(
        settings, base, both(on(ev.EvalEnd, ch.PauseOrder(order=2)), on(ev.Paused, order, ch.StopOrder(order=6)))
    )
    assert [(Path(c.path).name, c.step) for c in result.of(ev.Checkpoint)] == [("best", 2), ("checkpoint-000002", 2)]
    path = Path(config["run_dir"]) / "checkpoint-000002"
    assert result.one(ch.Finished).checkpoint == str(path)
    assert (path / "adapters.safetensors").samefile(path.parent / "best" / "adapters.safetensors")
    (path.parent / "best").rename(path.parent / "gone")
    assert defect(path) is None


def test_a_named_checkpoint_gets_its_name_also_when_the_state_is_saved_already(
    config: dict[str, Any], base: Path
) -> None:
    rule = both(
        at_step(2, ch.PauseOrder(order=4), ch.CheckpointOrder(order=5)),
        on(ev.Checkpoint, ch.CheckpointOrder(order=6, name="good"), ch.ResumeOrder(order=7)),
        at_step(4, ch.CheckpointOrder(order=8, name="good"), ch.CheckpointOrder(order=9, name="final")),
    )
    result = play(config, base, rule)
    good = Path(config["run_dir"]) / "good"
    answer = result.answer(6).result
    assert answer is not None
    assert (answer["path"], answer["changed"]) == (str(good), True)
    manifest = read_manifest(good)
    assert manifest is not None
    assert (manifest.kind, manifest.step) == ("manual", 2)
    assert defect(good) is None
    assert result.answer(8).code == "bad_params"
    assert result.answer(9).code == "bad_params"


def test_set_takes_effect_at_the_named_update(config: dict[str, Any], base: Path, tmp_path: Path) -> None:
    plain = play({**config, "schedule": "constant"}, base).of(ev.Step)
    rule = at_step(3, ch.SetOrder(order=5, values={"learning_rate": 0.02, "log_every": 2}))
    result = play({**config, "schedule": "constant", "run_dir": str(tmp_path / "other")}, base, rule)
    changed = result.one(ev.ConfigChanged)
    assert changed.effective_step == 4
    assert changed.changes["learning_rate"].from_ == pytest.approx(0.01)
    assert result.answer(5).result == {
        "applied": {"learning_rate": 0.02, "log_every": 2},
        "previous": {"learning_rate": 0.01, "log_every": 1},
        "effective_step": 4,
    }
    steps = result.of(ev.Step)
    assert [s.step for s in steps] == [1, 2, 3, 4, 6]
    assert [s.learning_rate for s in steps] == [0.01, 0.01, 0.01, 0.02, 0.02]
    assert [s.loss for s in steps[:3]] == [s.loss for s in plain[:3]]


def test_max_steps_moves_the_runs_end_and_not_the_schedule(config: dict[str, Any], base: Path, tmp_path: Path) -> None:
    plain = play({**config, "num_epochs": 2}, base)
    rule = at_step(3, ch.SetOrder(order=5, values={"max_steps": 5}))
    result = play({**config, "num_epochs": 2, "run_dir": str(tmp_path / "other")}, base, rule)
    assert result.one(ev.Complete).total_steps == 5
    assert [s.total_steps for s in result.of(ev.Step)] == [12, 12, 12, 5, 5]
    assert result.losses == {step: loss for step, loss in plain.losses.items() if step <= 5}


def test_max_steps_below_the_step_reached_ends_the_run_now(config: dict[str, Any], base: Path) -> None:
    result = play(config, base, at_step(3, ch.SetOrder(order=5, values={"max_steps": 1})))
    assert result.one(ev.Complete).total_steps == 3


def test_settings_without_an_effect_are_refused_and_nothing_changes(config: dict[str, Any], base: Path) -> None:
    rule = at_step(
        2,
        ch.SetOrder(order=5, values={"eval_every": 2, "log_every": 3}),
        ch.SetOrder(order=6, values={"generate_every": 2}),
    )
    result = play(config, base, rule)
    assert result.answer(5).code == result.answer(6).code == "bad_params"
    assert not result.of(ev.ConfigChanged)
    assert len(result.of(ev.Step)) == 6


def test_eval_by_order_reports_and_changes_no_number(config: dict[str, Any], base: Path, tmp_path: Path) -> None:
    settings = {**config, "valid_data": str(base / "valid.jsonl"), "eval_every": 0, "lora_dropout": 0.3}
    plain = play(settings, base)
    rule = at_step(2, ch.EvalOrder(order=5), ch.EvalOrder(order=6, max_batches=1))
    result = play({**settings, "run_dir": str(tmp_path / "other")}, base, rule)
    whole, part = result.of(ev.EvalEnd)
    assert (whole.cause, part.cause, whole.best, whole.step) == (5, 6, False, 2)
    assert part.tokens < whole.tokens
    answer = result.answer(5).result
    assert answer is not None
    assert (answer["valid_loss"], answer["tokens"]) == (whole.valid_loss, whole.tokens)
    assert plain.losses == result.losses


def test_eval_without_validation_data_is_refused_and_the_run_goes_on(config: dict[str, Any], base: Path) -> None:
    result = play(config, base, at_step(2, ch.EvalOrder(order=5)))
    assert result.answer(5).code == "wrong_state"
    assert result.one(ch.Finished).outcome == "completed"


def test_generate_answers_greedily_and_the_base_model_differently(config: dict[str, Any], base: Path) -> None:
    ask = {"messages": [{"role": "user", "content": "what is step 3"}], "max_tokens": 6}
    rule = at_step(
        20,
        ch.GenerateOrder(order=5, **ask),
        ch.GenerateOrder(order=6, **ask),
        ch.GenerateOrder(order=7, adapter=False, **ask),
        ch.GenerateOrder(order=8, prompt="what is step 3", max_tokens=6),
        ch.GenerateOrder(order=9, temperature=1.0, seed=3, **ask),
        ch.GenerateOrder(order=10, temperature=1.0, seed=3, **ask),
    )
    result = play({**config, "num_epochs": 4}, base, rule)
    texts = {n: (result.answer(n).result or {})["text"] for n in range(5, 11)}
    assert texts[5] == texts[6] == texts[8]
    assert texts[7] != texts[5]
    assert texts[9] == texts[10]


@pytest.mark.parametrize("adapter", [True, False])
def test_an_answer_that_a_pause_interrupts_and_what_is_asked_meanwhile_are_what_they_are_alone(
    config: dict[str, Any], base: Path, tmp_path: Path, adapter: bool
) -> None:
    settings = {**config, "valid_data": str(base / "valid.jsonl"), "learning_rate": 0.3}
    question = ch.GenerateOrder(order=2, prompt="what is the run", max_tokens=6, adapter=adapter)
    meanwhile = (ch.EvalOrder(order=4), ch.GenerateOrder(order=5, prompt="a loss", max_tokens=3, adapter=not adapter))
    apart = play({**settings, "run_dir": str(tmp_path / "apart")}, base, at_step(3, question, *meanwhile))
    paused = on(ev.Paused, *meanwhile, ch.ResumeOrder(order=6))
    together = play(settings, base, both(at_step(3, question, ch.PauseOrder(order=3)), paused))
    told = [report.order for report in together.of(ch.Answer)]
    assert told.index(5) < told.index(2), "the pause came in the middle of the answer"
    for order in (2, 4, 5):
        mine, alone = together.answer(order).result, apart.answer(order).result
        assert mine is not None, together.answer(order)
        assert alone is not None
        assert {**mine, "ms": 0} == {**alone, "ms": 0}
    assert together.losses == apart.losses


@pytest.mark.parametrize("leave", [False, True], ids=["pause", "stop"])
def test_prompts_that_are_answered_together_give_way_in_the_middle(
    config: dict[str, Any], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leave: bool
) -> None:
    # A sign of life between any two tokens.
    monkeypatch.setattr(reports, "_SIGN_OF_LIFE", -1.0)
    prompts = {"prompts": ["what is step 3", "a", "the loss of the run"], "generate_every": 3, "max_steps": 3}
    settings = {**config, **prompts, "generate_max_tokens": 5}
    alone = play({**settings, "run_dir": str(tmp_path / "alone")}, base)
    signs = 0

    def in_the_middle(report: Any) -> tuple[ch.AnyOrder, ...] | None:
        nonlocal signs
        signs += isinstance(report, ch.Alive) and report.activity == "generate"
        # Past the three prompts, before the last token.
        middle = signs == 6 and isinstance(report, ch.Alive)
        return (ch.StopOrder(order=4) if leave else ch.PauseOrder(order=4),) if middle else None

    meanwhile = on(ev.Paused, ch.GenerateOrder(order=5, prompt="a", max_tokens=3), ch.ResumeOrder(order=6))
    result = play(settings, base, both(in_the_middle, meanwhile))
    if leave:
        assert (result.of(ev.Generation), result.one(ch.Finished).outcome) == ([], "stopped")
        again = play(settings, base, resume_from=result.one(ch.Finished).checkpoint)
        assert again.of(ev.Generation) == alone.of(ev.Generation)
    else:
        assert position(result, result.one(ev.Paused)) < position(result, result.of(ev.Generation)[0])
        assert position(result, result.answer(5)) < position(result, result.of(ev.Generation)[0])
        assert result.of(ev.Generation) == alone.of(ev.Generation)


def test_a_prompt_that_cannot_be_rendered_is_refused(config: dict[str, Any], base: Path) -> None:
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    messages = [{"role": "system", "content": "be brief"}]
    rule = at_step(2, ch.GenerateOrder(order=5, messages=messages))
    result = play({**config, "chat_template": template + CHAT_TEMPLATE}, base, rule)
    assert result.answer(5).code == "bad_params"
    assert "no system turns" in (result.answer(5).message or "")
    assert result.one(ch.Finished).outcome == "completed"


def test_orders_are_served_while_paused(config: dict[str, Any], base: Path) -> None:
    rule = both(
        at_step(2, ch.PauseOrder(order=4)),
        on(
            ev.Paused,
            ch.EvalOrder(order=5),
            ch.GenerateOrder(order=6, prompt="what", max_tokens=2),
            ch.SetOrder(order=7, values={"log_every": 2}),
            ch.CheckpointOrder(order=8),
        ),
        on(ev.Checkpoint, ch.ResumeOrder(order=9)),
    )
    result = play({**config, "valid_data": str(base / "valid.jsonl")}, base, rule)
    resumed = position(result, result.one(ev.Resumed))
    assert all(position(result, result.answer(n)) < resumed for n in range(4, 9))
    assert answered_once(result)


def test_a_pause_takes_effect_in_the_middle_of_an_evaluation(config: dict[str, Any], base: Path) -> None:
    settings = {**config, "valid_data": str(base / "train.jsonl"), "eval_every": 2, "micro_batch_tokens": 64}

    def rule(report: Any) -> list[ch.AnyOrder] | None:
        if isinstance(report, ch.Alive) and (report.activity, report.step) == ("eval", 2):
            return [ch.PauseOrder(order=5)]
        if isinstance(report, ev.Paused):
            return [ch.ResumeOrder(order=6)]
        return None

    result = play(settings, base, rule)
    first = result.of(ev.EvalEnd)[0]
    assert (first.step, result.of(ev.Paused)[0].step) == (2, 2)
    assert position(result, result.of(ev.Resumed)[0]) < position(result, first)


def test_a_stop_ends_an_evaluation_and_the_resumed_run_makes_it(config: dict[str, Any], base: Path) -> None:
    settings = {**config, "valid_data": str(base / "train.jsonl"), "eval_every": 2, "micro_batch_tokens": 64}

    def rule(report: Any) -> list[ch.AnyOrder] | None:
        if isinstance(report, ch.Alive) and (report.activity, report.step) == ("eval", 2):
            return [ch.StopOrder(order=5)]
        return None

    stopped = play(settings, base, rule)
    assert not stopped.of(ev.EvalEnd)
    finished = stopped.one(ch.Finished)
    assert finished.step == 2
    again = play(settings, base, resume_from=finished.checkpoint)
    assert [e.step for e in again.of(ev.EvalEnd)] == [2, 4, 6]


def test_an_ordered_evaluation_gives_way_to_a_stop(config: dict[str, Any], base: Path) -> None:
    settings = {**config, "valid_data": str(base / "train.jsonl"), "eval_every": 0, "micro_batch_tokens": 64}
    rule = at_step(2, ch.EvalOrder(order=5), ch.StopOrder(order=6))
    result = play(settings, base, rule)
    assert result.answer(5).code == "shutting_down"
    assert position(result, result.answer(5)) < position(result, result.answer(6))


def test_an_evaluation_ordered_during_a_pause_is_not_held_up_by_it(config: dict[str, Any], base: Path) -> None:
    settings = {**config, "valid_data": str(base / "train.jsonl"), "eval_every": 0, "micro_batch_tokens": 64}
    rule = both(
        at_step(2, ch.PauseOrder(order=4), ch.EvalOrder(order=5), ch.PauseOrder(order=6)),
        on(ev.EvalEnd, ch.ResumeOrder(order=7)),
    )
    result = play(settings, base, rule)
    assert position(result, result.one(ev.EvalEnd)) < position(result, result.one(ev.Resumed))


def test_a_lingering_run_answers_questions_until_it_is_stopped(config: dict[str, Any], base: Path) -> None:
    questions = (ch.EvalOrder(order=5), ch.GenerateOrder(order=6, prompt="what", max_tokens=2), ch.PauseOrder(order=7))

    def rule(report: Any) -> tuple[ch.AnyOrder, ...] | None:
        if isinstance(report, ch.Answer) and report.order == 5:
            return (ch.StopOrder(order=8),)
        return questions if isinstance(report, ev.Complete) else None

    result = play({**config, "valid_data": str(base / "valid.jsonl")}, base, rule, linger=True)
    assert result.answer(5).result is not None
    assert result.answer(6).result is not None
    assert result.answer(7).code == "wrong_state"
    finished = result.one(ch.Finished)
    final = str(Path(config["run_dir"]) / "final")
    assert result.answer(8).result == {"outcome": "completed", "step": 6, "checkpoint": final}
    assert (finished.outcome, finished.checkpoint) == ("completed", final)


def test_an_engine_without_its_worker_saves_and_leaves(config: dict[str, Any], base: Path, tmp_path: Path) -> None:
    with Engine(tmp_path / "stderr") as engine:
        engine.begin({**config, "num_epochs": 1000}, base)
        engine.wait_for(lambda report: isinstance(report, ev.Step) and report.step == 3)
        engine.hang_up()
        assert engine.process.wait(90) == 0, engine.printed()
    (saved,) = Path(config["run_dir"]).iterdir()
    assert saved.name.startswith("checkpoint-")
    assert defect(saved) is None


def test_terminal_signals_do_not_end_the_engine(config: dict[str, Any], base: Path, tmp_path: Path) -> None:
    import signal

    with Engine(tmp_path / "stderr") as engine:
        engine.begin({**config, "num_epochs": 2}, base)
        engine.wait_for(ev.Init)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP):
            engine.process.send_signal(number)
        assert engine.finish() == 0, engine.printed()
    assert engine.of(ch.Finished)[0].outcome == "completed"
