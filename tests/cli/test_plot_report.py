"""`trainwire plot` and `report`: what is drawn of a run, and that a page needs nothing from outside."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from trainwire_cli import plot, report
from trainwire_cli.curves import read_curves, smoothed

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'trainwire[view]'")

from trainwire_cli.picture import draw


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
        attempt(1), init, step(1, 3.0), step(2, 2.0), saved(2, "periodic"), evaluated, said, step(3, 9.0),
        step(4, 9.0), saved(4, "best"), attempt(2, 2), init, step(3, None), step(4, 1.0), saved(4, "final"),
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
