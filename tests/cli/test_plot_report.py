"""`trainwire plot` and `report`: what is drawn of a run, and that a page needs nothing from outside."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from shutil import copytree
from typing import Any
from xml.etree import ElementTree

import pytest

from trainwire_cli import plot, report
from trainwire_cli.curves import read_curves, smoothed

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'trainwire[view]'")

from trainwire_cli.picture import draw, names_of


def step(number: int, loss: float | None) -> dict[str, Any]:
    """A step event."""
    return {
        "type": "step", "step": number, "loss": loss, "total_tokens": 10, "training_time_ms": 1.0, "updates": 1,
        "total_steps": 4, "epoch": 1, "epoch_progress": 0.5, "learning_rate": 0.1 / number, "grad_norm": 1.0,
        "token_accuracy": 0.5, "perplexity": 2.0, "trained_tokens": 10 * number, "tokens_per_second": 100.0,
        "padding_fraction": 0.0, "micro_batches": 1, "data_time_ms": 0.0, "active_bytes": 1, "cache_bytes": 1,
        "peak_bytes": 1, "eta_ms": 0, "skipped": 0,
    }  # fmt: skip


def attempt(number: int, resumed_from_step: int | None = None) -> dict[str, Any]:
    """An attempt event."""
    event = {"type": "attempt", "run_id": "r", "attempt": number, "protocol": 1, "worker": "0", "pid": 1}
    return event if resumed_from_step is None else {**event, "resumed_from_step": resumed_from_step}


def saved(number: int, kind: str) -> dict[str, Any]:
    """A checkpoint event."""
    return {"type": "checkpoint", "path": f"/c/{number}", "step": number, "bytes": 1, "kind": kind}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that crashed at step 4, went on from step 2, and has one loss that is not a number."""
    folder = tmp_path / "a <run>"
    folder.mkdir()
    init = {"type": "init", "run_name": "a <run>", "config": {"model": "m"}, "total_steps": 4, "device": "cpu"}
    evaluated = {
        "type": "eval_end", "step": 2, "valid_loss": 1.5, "perplexity": 4.5, "token_accuracy": 0.1, "tokens": 5,
        "ms": 1.0, "best": True,
    }  # fmt: skip
    said = {"type": "generation", "index": 0, "prompt": "<b>?", "completion": "&!", "tokens": 2, "step": 2}
    events = [
        attempt(1), init, step(1, 3.0), step(2, 2.0), saved(2, "periodic"), evaluated,
        {**evaluated, "valid_loss": 0.25, "cause": 3}, {**evaluated, "step": 3, "valid_loss": 8.0}, said, step(3, 9.0),
        step(4, 9.0), {**said, "step": 4, "completion": "void answer"}, saved(4, "best"), attempt(2, 2), init,
        step(3, None), step(4, 1.0), saved(4, "final"),
        {"type": "epoch_end", "epoch": 1, "avg_loss": 1.0, "epoch_time_secs": 1.0, "updates": 4},
    ]  # fmt: skip
    lines = [
        json.dumps({"type": e["type"], "seq": i, "ts": 1_700_000_000_000, **e}, separators=(",", ":"))
        for i, e in enumerate(events, 1)
    ]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_curves_leave_out_what_was_abandoned(run_dir: Path) -> None:
    curves = read_curves(run_dir)
    assert (curves.loss.steps, curves.loss.values) == ([1, 2, 3, 4], [3.0, 2.0, None, 1.0])
    assert curves.checkpoints == [(2, "periodic"), (4, "final")]
    assert curves.epochs == [4]
    assert curves.valid_loss.values == [1.5]


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_of_no_or_one_update_is_a_legible_picture(tmp_path: Path, steps: int) -> None:
    events = [attempt(1), *(step(i, 2.0) for i in range(1, steps + 1))]
    lines = [json.dumps({"type": e["type"], "seq": i, **e}, separators=(",", ":")) for i, e in enumerate(events, 1)]
    (tmp_path / "events.jsonl").write_text("".join(line + "\n" for line in lines))
    loss, rate, speed = draw([read_curves(tmp_path)]).axes
    assert [text.get_text() for text in loss.texts] == ([] if steps else ["no update yet"])
    assert speed.get_xlim() == (0, 2)
    if steps:
        assert [axes.lines[0].get_marker() for axes in (loss, rate, speed)] == ["."] * 3
        assert rate.get_ylim() == (0, pytest.approx(0.11))


def test_smoothing_passes_over_what_is_not_finite() -> None:
    assert smoothed([1.0, None, 3.0], 3) == [1.0, 2.0, 3.0]
    assert smoothed([None], 3) == [None]


@pytest.mark.parametrize(
    ("name", "start"), [("p.png", b"\x89PNG"), ("p.svg", b"<?xml"), ("p.html", b"<!doctype html>")]
)
def test_a_picture_has_the_form_that_its_name_asks_for(run_dir: Path, tmp_path: Path, name: str, start: bytes) -> None:
    assert plot.run([str(run_dir), str(run_dir), "-o", str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_bytes().startswith(start)


def test_a_picture_is_the_same_for_the_same_run_and_names_no_address(run_dir: Path, tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg", "a.html"):
        assert plot.run([str(run_dir), "-o", str(tmp_path / name)]) == 0
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn == (tmp_path / "b.svg").read_text()
    assert set(re.findall(r"http\S+", drawn)) == {'http://www.w3.org/1999/xlink"', 'http://www.w3.org/2000/svg"'}
    assert ElementTree.fromstring(drawn).tag == "{http://www.w3.org/2000/svg}svg"
    assert "://" not in (tmp_path / "a.html").read_text()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["a$b_{c$", "_hidden", "日本語", "\\frac"])
def test_a_name_is_drawn_as_it_is(run_dir: Path, tmp_path: Path, name: str) -> None:
    named = run_dir.rename(tmp_path / name)
    other = tmp_path / "other"
    copytree(named, other)
    for runs in ([named], [named, other]):
        assert plot.run([*map(str, runs), "-o", str(tmp_path / "p.svg")]) == 0
    assert report.run([str(named)]) == 0
    loss, *_ = draw([read_curves(named), read_curves(other)]).axes
    legend = loss.get_legend()
    assert legend is not None
    assert [text.get_text().removeprefix("./") for text in legend.get_texts()][::2] == [name, "other"]


def test_runs_of_one_name_are_told_apart_by_what_lies_above_them(run_dir: Path, tmp_path: Path) -> None:
    places = [tmp_path / place for place in ("x/c", "y/c", "d")]
    for place in places:
        copytree(run_dir, place)
    assert names_of([read_curves(place) for place in places]) == ["x/c", "y/c", "d"]
    assert names_of([read_curves(places[0])] * 2) == ["c", "c"]


def test_many_epochs_and_checkpoints_cover_no_curve(run_dir: Path) -> None:
    curves = replace(
        read_curves(run_dir), epochs=list(range(1, 101)), checkpoints=[(s, "periodic") for s in range(100)]
    )
    loss, *_ = draw([curves]).axes
    vertical = [line for line in loss.lines if line.get_linestyle() == ":"]
    assert [line.get_xdata()[0] for line in vertical] == list(range(4, 101, 4))  # type: ignore[index]
    assert vertical[0].get_label() == "end of an epoch, one in 4"
    marks = [line for line in loss.lines if line.get_marker() == "s"]
    assert len(marks) == 100
    # In parts of the axis, not of the loss.
    assert {line.get_ydata()[0] for line in marks} == {0.025}  # type: ignore[index]
    assert marks[0].get_transform() == loss.get_xaxis_transform()


def test_a_folder_without_a_run_and_a_file_of_no_picture_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plot.run([str(tmp_path), "-o", str(tmp_path / "p.png")]) == 3
    assert "is no run" in capsys.readouterr().err
    with pytest.raises(SystemExit) as refused:
        plot.run([str(tmp_path), "-o", "p.doc"])
    assert refused.value.code == 2
    assert report.run([str(tmp_path)]) == 3


class _Outside(HTMLParser):
    """Collects what a page would load from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "img", "iframe"):
            self.found.append(tag)
        self.found += [value or "" for name, value in attrs if name in ("src", "srcset")]


def test_the_report_is_one_page_with_all_of_it_and_loads_nothing(run_dir: Path) -> None:
    assert report.run([str(run_dir)]) == 0
    text = (run_dir / "report.html").read_text()
    for part in ("<h1>a &lt;run&gt;</h1>", "4 of 4", "<svg", "&lt;b&gt;?", "&amp;!", "Config", "Environment"):
        assert part in text, part
    outside = _Outside()
    outside.feed(text)
    assert outside.found == []
    assert not re.search(r"url\((?!#)", text)
    assert "://" not in text
    assert "void answer" not in text


def test_the_report_names_the_versions_of_the_newest_checkpoint_that_tells_them(tmp_path: Path) -> None:
    names = ("gone", "broken", "newest", "older")
    folders = [tmp_path / name for name in names]
    for folder, text in zip(
        folders[1:], ("{", '{"versions": {"device": "d", "mlx": "2"}}', '{"versions": {"mlx": "1"}}')
    ):
        folder.mkdir()
        (folder / "trainer_state.json").write_text(text)
    assert report._versions(folders) == [("mlx", "2")]
    assert report._versions(folders[:2]) == []
