"""Shows how to test a front end with the fake worker: run it with `pytest examples/test_front_end.py`.

The front end here is a one-line display. Its tests need no model, no data, no GPU, and take milliseconds: the fake
worker that ships with the client plays whatever session a test wants, also the ones that are hard to get otherwise.
"""

import pytest

from trainwire_client import CommandFailed, End, Error, Paused, Resumed, Run, Step, WorkerDied, launch
from trainwire_client.testing import fake_worker

CONFIG = {"model": "any", "data": "any"}


class Display:
    """The front end: one line that says how a run is doing, and a button that pauses and resumes."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.text = "starting"
        self.paused = False

    def follow(self, until: type | None = None) -> None:
        """Show events as they come, up to one of a type, or to the end."""
        try:
            for event in self.run:
                self.show(event)
                if until is not None and isinstance(event, until):
                    return
        except WorkerDied as death:
            kept = f", but {death.last_checkpoint} is kept" if death.last_checkpoint else ""
            self.text = f"died of {death.signal}{kept}"

    def show(self, event: object) -> None:
        """Turn an event into the line."""
        match event:
            case Step(step=step, total_steps=total, loss=None):
                self.text = f"{step}/{total} loss is not finite"
            case Step(step=step, total_steps=total, loss=loss):
                self.text = f"{step}/{total} loss {loss:.2f}"
            case Paused() | Resumed():
                self.paused = isinstance(event, Paused)
            case Error(message=message):
                self.text = f"failed: {message}"
            case End(outcome="completed"):
                self.text += " done"

    def press(self) -> None:
        """Pause, or go on; what the worker says against it is shown."""
        try:
            if self.paused:
                self.run.resume()
            else:
                self.run.pause()
        except CommandFailed as refusal:
            self.text = refusal.message


def test_progress_is_shown() -> None:
    script = [{"hello": {}}, {"start": {}}, {"steps": 3, "fields": {"loss": 1.25}}, {"finish": {}}]
    with launch(CONFIG, command=fake_worker(script)) as run:
        display = Display(run)
        display.follow()
    assert display.text == "3/10 loss 1.25 done"


def test_the_button_pauses_and_resumes() -> None:
    script = [
        {"hello": {}},
        {"start": {}},
        {"await": "pause"},
        {"send": {"type": "paused"}},
        {"answer": "pause", "result": {"step": 1, "changed": True}},
        {"await": "resume"},
        {"send": {"type": "resumed"}},
        {"answer": "resume", "result": {"step": 1, "changed": True}},
        {"finish": {}},
    ]
    with launch(CONFIG, command=fake_worker(script)) as run:
        display = Display(run)
        display.press()
        display.follow(until=Paused)
        assert display.paused
        display.press()
        display.follow()
    assert not display.paused


def test_a_refusal_is_shown_and_the_run_goes_on() -> None:
    refusal = {"code": "wrong_state", "message": "The model is still being loaded."}
    script = [{"hello": {}}, {"start": {}}, {"await": "pause"}, {"answer": "pause", "error": refusal}, {"finish": {}}]
    with launch(CONFIG, command=fake_worker(script)) as run:
        display = Display(run)
        display.press()
        assert display.text == "pause failed: The model is still being loaded."
        display.follow()
    assert display.text.endswith("done")


@pytest.mark.parametrize("field", ["loss", "perplexity"])
def test_a_number_that_is_not_finite_is_survived(field: str) -> None:
    step = {"type": "step", field: None, "non_finite": {field: "nan"}}
    with launch(CONFIG, command=fake_worker([{"hello": {}}, {"start": {}}, {"send": step}, {"finish": {}}])) as run:
        display = Display(run)
        display.follow()
    assert display.text == ("1/10 loss is not finite done" if field == "loss" else "1/10 loss 2.00 done")


def test_a_death_is_shown_with_what_is_kept() -> None:
    saved = {"type": "checkpoint", "path": "/runs/a/checkpoint-000200"}
    script = [{"hello": {}}, {"start": {}}, {"send": saved}, {"die": "SIGKILL"}]
    with launch(CONFIG, command=fake_worker(script)) as run:
        display = Display(run)
        display.follow()
    assert display.text == "died of SIGKILL, but /runs/a/checkpoint-000200 is kept"


def test_lines_that_come_in_pieces_among_junk_change_nothing() -> None:
    script = [
        {"raw": "Loading CUDA module\n"},
        {"chunks": 7},
        {"hello": {}},
        {"start": {}},
        {"steps": 2},
        {"finish": {}},
    ]
    with launch(CONFIG, command=fake_worker(script)) as run:
        display = Display(run)
        display.follow()
        assert run.junk == 1
    assert display.text == "2/10 loss 2.00 done"
