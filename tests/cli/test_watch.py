"""`trainwire watch`: what the view knows and draws, and that its keys steer a real run."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from trainwire_client import (
    Attempt,
    Checkpoint,
    ConfigChanged,
    End,
    Error,
    EvalEnd,
    Generation,
    Init,
    Log,
    Status,
    Step,
    attach,
)
from trainwire_protocol.codec import encode_line
from trainwire_protocol.events import Change

pytest.importorskip("rich", reason="rich is not installed: pip install 'trainwire[view]'")
pytest.importorskip("uniplot", reason="uniplot is not installed: pip install 'trainwire[view]'")

from rich.cells import cell_len
from rich.console import Console

from trainwire_cli.watch import Watch
from trainwire_cli.watch_state import Curve, WatchState
from trainwire_cli.watch_view import draw

ENVIRONMENT = {**os.environ, "PYTHONSAFEPATH": "1", "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}


def step(number: int, loss: float | None) -> Step:
    """A step event."""
    return Step(
        step=number, loss=loss, total_tokens=10, training_time_ms=1.0, updates=1, total_steps=100, epoch=1,
        epoch_progress=0.5, learning_rate=1e-4, grad_norm=1.0, token_accuracy=0.5, perplexity=2.0, trained_tokens=10,
        tokens_per_second=12345.0, padding_fraction=0.1, micro_batches=1, data_time_ms=0.0, active_bytes=1,
        cache_bytes=1, peak_bytes=5 * 10**8, eta_ms=65_000, skipped=0,
    )  # fmt: skip


def init(start: int = 0) -> Init:
    """An init event."""
    return Init(
        model="m", config={"learning_rate": 2e-4}, training_type="sft", run_id="r", run_name="demo", run_dir="/r",
        total_steps=100, trainable_parameters=1, total_parameters=1, examples=1, start_step=start, device="cpu",
        head="full",
    )  # fmt: skip


def attempt(start: int) -> Attempt:
    """An attempt that goes on from a step, or begins."""
    return Attempt(run_id="r", attempt=1, protocol=1, worker="0", pid=1, resumed_from_step=start or None)


def followed(*events: object) -> WatchState:
    """The state after events."""
    state = WatchState()
    for event in events:
        state.observe(event)
    return state


def drawn(state: WatchState, width: int, height: int = 40, *, colour: bool = True, last: bool = False) -> str:
    """The view as text."""
    console = Console(width=width, height=height, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(draw(state, width, height, "keys", "remark", colour=colour, last=last))
    return captured.get()


def busy_run() -> WatchState:
    """A run with something in every part of the view, wide letters among it."""
    said = Generation(index=0, prompt="日本の首都はどこですか" * 4, completion="東京です 🗼 " * 30, tokens=5, step=50)
    valid = EvalEnd(step=50, valid_loss=1.2, perplexity=3.3, token_accuracy=0.5, tokens=9, ms=1.0, best=True)
    spoken = Log(level="warn", message="Something is unusual. " * 20, code="loss_spike")
    running = Status(phase="running", message="Training.", activity="train", step=0)
    return followed(init(), running, *(step(i, 3.0 / i) for i in range(1, 60)), valid, *[said] * 4, *[spoken] * 5)


@pytest.mark.parametrize("colour", [True, False])
@pytest.mark.parametrize(("width", "height"), [(40, 10), (40, 24), (60, 12), (80, 24), (80, 18), (120, 30), (200, 50)])
def test_a_view_never_has_more_rows_or_columns_than_the_terminal(width: int, height: int, colour: bool) -> None:
    text = drawn(busy_run(), width, height, colour=colour)
    assert len(text.splitlines()) <= height
    assert all(cell_len(line) <= width for line in text.splitlines())
    for part in ("running", "59/100", "loss 0.0508", "warn", "remark", "keys"):
        assert part in text, part
    assert ("╭─ loss" in text) is (height >= 24)


def test_what_comes_in_moves_nothing_that_is_there() -> None:
    def place(state: WatchState) -> int:
        return next(i for i, line in enumerate(drawn(state, 80, 30).splitlines()) if line.startswith("╰"))

    steps = [step(i, 3.0 / i) for i in range(1, 60)]
    logs = [Log(level="info", message="Something.", code="x") for _ in range(4)]
    assert len({place(followed(init(), *steps, *logs[:count])) for count in range(5)}) == 1


def test_without_colours_the_curves_differ_by_their_signs() -> None:
    text = drawn(busy_run(), 100, 30, colour=False)
    assert "· training" in text
    assert "# validation" in text


def test_a_curve_of_a_long_run_has_few_points_that_cover_all_of_it() -> None:
    curve = Curve()
    for at in range(1, 100_001):
        curve.add(at, float(at <= 1000))
    points = curve.points()
    assert 400 <= len(points) <= 801
    gaps = [after - before for (before, _), (after, _) in pairwise(points)]
    assert max(gaps) <= 2 * min(gaps[:-1])
    assert sum(value for at, value in points if at <= 1000) == pytest.approx(1000 / gaps[0], rel=0.2)


def test_an_error_is_shown_whole_when_all_is_over() -> None:
    state = busy_run()
    state.observe(Error(code="internal", message="One word " * 40 + "finis.", hint=None))
    assert "finis." not in drawn(state, 80, 24)
    assert "finis." in drawn(state, 80, 24, last=True)


def test_a_resume_takes_back_what_was_abandoned() -> None:
    events = [step(1, 3.0), step(2, 2.0), step(3, 9.0)]
    again = attempt(2)
    assert followed(*events, again, step(3, None)).losses.points() == [(1, 3.0), (2, 2.0)]


def test_the_peak_follows_what_was_set() -> None:
    changed = ConfigChanged(changes={"learning_rate": Change(from_=2e-4, to=1e-4)}, effective_step=3)
    assert followed(init()).peak == 2e-4
    assert followed(init(), changed).peak == 1e-4


@pytest.mark.parametrize("width", [80, 200])
def test_the_view_fits_the_terminal_and_shows_what_matters(width: int) -> None:
    saved = Checkpoint(path="/r/checkpoint-000050", step=50, bytes=1, kind="periodic")
    running = Status(phase="running", message="Training.", activity="train", step=0)
    text = drawn(followed(init(), running, *(step(i, 3.0 / i) for i in range(1, 60)), saved), width)
    assert all(len(line) <= width for line in text.splitlines())
    for part in (
        "demo",
        "running",
        "59/100",
        "ETA 1:05",
        "0.0508",
        "0.0001",
        "12,345",
        "500 MB",
        "periodic checkpoint",
    ):
        assert part in text, part


def test_few_evaluations_are_seen_as_a_curve() -> None:
    evaluations = [
        EvalEnd(step=at, valid_loss=loss, perplexity=2.0, token_accuracy=0.5, tokens=1, ms=1.0, best=True)
        for at, loss in ((5, 1.1), (50, 1.0))
    ]
    text = drawn(followed(init(), *(step(i, 3.0) for i in range(1, 60)), *evaluations), 80)
    chart = text[text.index("┌") : text.index("└")].splitlines()
    below = "".join(chart[len(chart) // 2 :])
    assert sum("▀" <= letter <= "▟" for letter in below) > 30


def test_a_view_without_anything_yet_is_drawn() -> None:
    assert "The loss curve begins" in drawn(WatchState(), 80)
    assert "loss ─" not in drawn(WatchState(), 80, last=True)


def test_what_a_model_or_a_row_says_does_not_steer_the_terminal() -> None:
    evil = "\x1b[2J\x9b31m\x07 evil"
    said = Generation(index=0, prompt=evil, completion=evil, tokens=1, step=1)
    named = msgspec.structs.replace(init(), run_name=evil, model=evil)
    failed = Error(code="dataset_invalid", message=evil, hint=evil)
    state = followed(named, said, Log(level="warn", message=evil, code="x"), failed)
    for last in (False, True):
        console = Console(width=120, height=40, file=io.StringIO(), force_terminal=True)
        with console.capture() as captured:
            console.print(draw(state, 120, 40, "keys", evil, last=last))
        text = captured.get()
        assert text.count("evil") >= 6
        assert not re.search(r"\x1b\[2J|\x9b|\x07", text)


def test_an_attempt_makes_what_lies_above_its_step_void() -> None:
    said = Generation(index=0, prompt="?", completion="!", tokens=1, step=4)
    valid = EvalEnd(step=4, valid_loss=1.2, perplexity=3.3, token_accuracy=0.5, tokens=9, ms=1.0, best=True)
    state = followed(init(), *(step(i, 3.0) for i in range(1, 6)), said, valid, attempt(4))
    assert (state.newest, state.valid, list(state.generations)) == (None, valid, [said])
    state.observe(msgspec.structs.replace(valid, valid_loss=0.25, cause=7))
    assert state.valid is valid, "one by order may be of some rows only"
    state.observe(attempt(3))
    assert (state.valid, list(state.generations), state.losses.points()[-1]) == (None, [], (3, 3.0))


def test_a_run_that_goes_on_is_drawn_from_its_first_update(tmp_path: Path) -> None:
    events = [attempt(0), *(step(i, float(i)) for i in range(1, 5)), attempt(3), step(4, 40.0)]
    numbered = [msgspec.structs.replace(event, seq=i, ts=1) for i, event in enumerate(events, 1)]
    lines = [encode_line(event) for event in numbered]
    (tmp_path / "events.jsonl").write_bytes(b"".join(lines))
    came = [attempt(3), msgspec.structs.replace(init(3), run_dir=str(tmp_path)), step(4, 40.0)]
    watch = Watch(came, None)
    watch._follow()
    assert watch._state.losses.points() == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]


def test_a_dead_run_has_no_time_left() -> None:
    state = followed(init(), step(1, 3.0))
    assert "ETA 1:05" in drawn(state, 80)
    state.lose("The worker is gone.")
    assert "ETA" not in drawn(state, 80)


LEAD = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """A process on a pseudo-terminal."""

    def __init__(self, command: list[str]) -> None:
        self.master, slave = pty.openpty()
        # A session whose terminal this is: Ctrl-C reaches all of its foreground processes.
        self.process = subprocess.Popen(
            [sys.executable, "-c", LEAD, *command], stdin=slave, stdout=slave, stderr=slave, env=ENVIRONMENT
        )
        os.close(slave)
        self.text = ""

    def _more(self, deadline: float) -> bool:
        """Read what is drawn next; false at the end."""
        while not select.select([self.master], [], [], 1.0)[0]:
            assert time.monotonic() < deadline, self.text[-2000:]
        try:
            data = os.read(self.master, 1 << 16)
        except OSError:
            return False
        self.text += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", data.decode("utf-8", "replace"))
        return bool(data)

    def read_until(self, seen: Callable[[str], bool], seconds: float = 90.0) -> None:
        """Read what is drawn until it satisfies."""
        deadline = time.monotonic() + seconds
        while not seen(self.text):
            assert self._more(deadline), self.text[-2000:]

    def press(self, key: str) -> None:
        """Type a key."""
        os.write(self.master, key.encode())

    def close(self) -> int:
        """Read to the end; the exit status."""
        while self._more(time.monotonic() + 90.0):
            pass
        os.close(self.master)
        return self.process.wait(90)


@pytest.fixture
def waiting(tmp_path: Path) -> Path:
    """A folder with a config and a script whose third update waits for an order."""
    (tmp_path / "c.toml").write_text('model = "m/m"\ndata = "d/d"\n')
    acts = [{"do": "await_order", "step": step} for step in (3, 5, 7, 9, 11)]
    (tmp_path / "script.json").write_text(json.dumps({"acts": acts}))
    return tmp_path


def run_command(folder: Path) -> list[str]:
    """The command of the scripted run in a folder."""
    script = ["--engine", "fake", "--script", str(folder / "script.json")]
    return [sys.executable, "-m", "trainwire_cli", "run", str(folder / "c.toml"), *script]


def test_keys_steer_a_run_of_another_shell(waiting: Path) -> None:
    with subprocess.Popen(
        run_command(waiting), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=ENVIRONMENT
    ) as other:
        assert other.stdout is not None
        assert any(b'"type":"step"' in line and b'"step":2' in line for line in other.stdout)
        view = Terminal([sys.executable, "-m", "trainwire_cli", "watch", str(waiting / "runs/c")])
        view.read_until(lambda text: "2/20" in text)
        # Each key is the order that the next update waits for.
        for key, shown in (
            ("c", "checkpoint: done"),
            ("+", "learning rate 0.000125: done"),
            ("-", "learning rate 0.0001: done"),
            ("p", "p resume"),
            ("p", "resume: done"),
        ):
            view.press(key)
            view.read_until(lambda text, shown=shown: shown in text)
        view.press("s")
        view.read_until(lambda text: "stopped" in text)
        assert view.close() == 0
        other.stdout.read()
    assert other.returncode == 0


LAUNCHED = """
import sys
from trainwire_cli.watch import Watch
from trainwire_client import launch
with launch({"model": "m", "data": "d", "run_dir": "r"}, cwd=sys.argv[1], worker_args=sys.argv[2:]) as run:
    sys.exit(Watch(run, run).show())
"""


def test_a_view_can_be_left_while_its_run_goes_on(waiting: Path) -> None:
    view = Terminal([sys.executable, "-c", LAUNCHED, str(waiting), *run_command(waiting)[-4:]])
    view.read_until(lambda text: "2/20" in text)
    view.press("d")
    assert view.close() == 0
    assert f"The run goes on: trainwire watch {waiting}/r" in view.text
    with attach(waiting / "r") as run:
        assert run.pid is not None
        assert run.stop().outcome == "stopped"


def test_the_end_of_a_pipe_shows_a_run_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('model = "m/m"\ndata = "d/d"\n')
    (tmp_path / "script.json").write_text("{}")
    left = " ".join(run_command(tmp_path))
    view = Terminal(["bash", "-c", f"{left} </dev/null 2>/dev/null | {sys.executable} -m trainwire_cli watch"])
    view.read_until(lambda text: "completed" in text)
    assert view.close() == 0
    assert "20/20" in view.text


@pytest.mark.parametrize("piped", [False, True], ids=["of another shell", "of a pipe"])
def test_a_worker_that_is_killed_is_shown_as_dead(waiting: Path, piped: bool) -> None:
    (waiting / "script.json").write_text(json.dumps({"acts": [{"do": "await_order", "step": 3}]}))
    with subprocess.Popen(
        run_command(waiting), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=ENVIRONMENT
    ) as other:
        assert other.stdout is not None
        assert any(b'"type":"step"' in line and b'"step":2' in line for line in other.stdout)
        watch = f"{sys.executable} -m trainwire_cli watch"
        piped_into = f"tail -f --pid={other.pid} -n +1 {waiting}/runs/c/events.jsonl | {watch}"
        view = Terminal(["bash", "-c", piped_into] if piped else [*watch.split(), str(waiting / "runs/c")])
        view.read_until(lambda text: "2/20" in text)
        other.kill()
        other.wait()
        view.read_until(lambda text: "died" in text)
        assert view.close() == 1
    last = view.text[view.text.rindex("died") :]
    assert "without an end line" in last
    assert "leave" not in last


def test_the_first_ctrl_c_at_the_end_of_a_pipe_stops_the_run_and_shows_its_end(waiting: Path) -> None:
    left = " ".join(run_command(waiting))
    view = Terminal(["bash", "-c", f"{left} </dev/null 2>/dev/null | {sys.executable} -m trainwire_cli watch"])
    view.read_until(lambda text: "2/20" in text)
    view.press("\x03")
    view.read_until(lambda text: "interrupted" in text)
    assert view.close() == 21
    assert "checkpoint-000003" in view.text


def test_a_terminal_that_cannot_draw_is_refused(waiting: Path) -> None:
    view = Terminal(["env", "TERM=dumb", sys.executable, "-m", "trainwire_cli", "watch", str(waiting)])
    assert view.close() == 2
    assert "needs a terminal that can draw" in view.text


def test_without_a_terminal_it_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainwire_cli", "watch", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=90)
    assert done.returncode == 2
    assert "needs a terminal" in done.stderr


def test_the_end_shows_its_checkpoint() -> None:
    end = End(
        outcome="stopped", reason="stop", step=2, checkpoint="/r/checkpoint-000002", resumable=True, resume_args=[],
        exit_code=0,
    )  # fmt: skip
    text = drawn(followed(init(), step(1, 2.0), end), 80, last=True)
    assert "stopped" in text
    assert "/r/checkpoint-000002" in text
