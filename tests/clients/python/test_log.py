"""Reading a run's folder without its worker."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trainwire_client as tw
from trainwire_client import metrics
from trainwire_client.log import Tail, Timeline, read_range
from trainwire_client.metrics import METRICS
from trainwire_client.testing import LINES
from trainwire_client.testing.player import FakeWorker
from trainwire_protocol.rundir import MANIFEST_NAME, Manifest, file_sha256


def write_log(folder: Path, lines: list[dict[str, Any]], end: str = "") -> Path:
    worker = FakeWorker({}, 1, LINES, str(folder))
    path = folder / "events.jsonl"
    text = "".join(json.dumps(worker.line(line), separators=(",", ":")) + "\n" for line in lines)
    path.write_text(text + end)
    return path


def attempt(number: int, resumed_from_step: int | None = None) -> dict[str, Any]:
    resumed = {} if resumed_from_step is None else {"resumed_from_step": resumed_from_step}
    return {"type": "attempt", "attempt": number, **resumed}


def steps(first: int, last: int, loss: float = 1.0) -> list[dict[str, Any]]:
    return [{"type": "step", "step": n, "loss": loss} for n in range(first, last + 1)]


def test_a_range_is_found_in_a_log_much_larger_than_a_block(tmp_path: Path) -> None:
    path = write_log(tmp_path, [{"type": "log", "message": "m" * (n % 700)} for n in range(3000)])
    for first, last in ((1, 3), (1499, 1502), (2999, 3000), (3000, 9999), (4000, 5000), (1, 3000), (7, 6)):
        found = read_range(path, first, last)
        assert found is not None
        assert [event.seq for event in found] == [n for n in range(1, 3001) if first <= n <= last]  # type: ignore[union-attr]


def test_a_range_stops_before_half_a_line_and_needs_a_log(tmp_path: Path) -> None:
    path = write_log(tmp_path, steps(1, 3), end='{"type":"step","seq":4')
    assert [e.seq for e in read_range(path, 2, 9) or ()] == [2, 3]  # type: ignore[union-attr]
    assert read_range(tmp_path / "nothing", 1, 2) is None


def test_the_tail_gives_each_line_once_also_when_half_a_line_is_cut_away_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"one\ntw")
    tail = Tail(path)
    assert tail.read() == [b"one"]
    assert tail.read() == []
    with path.open("r+b") as file:
        file.truncate(4)
        file.seek(4)
        file.write(b"another longer line\nthree\n")
    assert tail.read() == [b"another longer line", b"three"]
    assert tail.read() == []
    assert not tail.replaced
    path.unlink()
    assert tail.replaced
    tail.close()


@given(attempts=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_the_valid_timeline_is_what_a_run_would_have_that_was_never_interrupted(
    tmp_path_factory: pytest.TempPathFactory, attempts: list[tuple[int, int]]
) -> None:
    # Each attempt goes on from a checkpoint at or below the step that was reached, and does some steps.
    lines: list[dict[str, Any]] = []
    reached, valid = 0, {}
    for number, (length, back) in enumerate(attempts, 1):
        start = 0 if number == 1 else min(back, reached)
        lines.append(attempt(number, None if number == 1 else start))
        valid = {step: loss for step, loss in valid.items() if step <= start}
        for step in range(start + 1, start + length + 1):
            lines.append({"type": "step", "step": step, "loss": float(number)})
            valid[step] = float(number)
        reached = start + length
    folder = tmp_path_factory.mktemp("log")
    write_log(folder, lines)
    series = tw.history(folder)["loss"]
    assert series.steps == sorted(valid)
    assert series.values == [valid[step] for step in series.steps]


def test_an_attempt_that_started_afresh_makes_all_earlier_steps_void(tmp_path: Path) -> None:
    write_log(tmp_path, [attempt(1), *steps(1, 4, 9.0), attempt(2), *steps(1, 2, 1.0)])
    assert tw.history(tmp_path)["loss"] == tw.Series([1, 2], [1.0, 1.0])


def test_the_words_of_a_message_make_no_attempt(tmp_path: Path) -> None:
    path = write_log(tmp_path, [attempt(1), *steps(1, 2), {"type": "log", "message": '"type":"attempt"'}])
    assert Timeline.of(path).holds(2, 1)
    assert tw.history(tmp_path)["loss"].steps == [1, 2]


def test_every_metric_can_be_read(tmp_path: Path) -> None:
    write_log(tmp_path, [attempt(1), *steps(1, 3), {"type": "eval_end", "step": 3}])
    series = tw.history(tmp_path, METRICS)
    assert list(series) == list(METRICS)
    assert series["valid_perplexity"].values == [LINES["eval_end"]["perplexity"]]
    assert series["perplexity"].steps == [1, 2, 3]


@pytest.mark.parametrize("max_points", [1, 2, 3, 7, 10, 11, 100])
def test_fewer_points_conserve_tokens_and_keep_the_last_step(max_points: int, tmp_path: Path) -> None:
    write_log(tmp_path, [attempt(1), *steps(1, 10), *({"type": "eval_end", "step": n} for n in range(1, 6))])
    series = tw.history(tmp_path, ["total_tokens", "valid_loss"], max_points)
    assert len(series["total_tokens"].steps) <= max_points
    assert series["total_tokens"].steps[-1] == 10
    assert sum(value or 0 for value in series["total_tokens"].values) == 1000
    assert len(series["valid_loss"].steps) <= max_points


def write_checkpoint(folder: Path, step: int) -> None:
    folder.mkdir()
    weights = folder / "adapters.safetensors"
    weights.write_bytes(b"w" * step)
    entry = {"size": step, "sha256": file_sha256(weights)}
    manifest = {"format": 1, "step": step, "kind": "periodic", "files": {weights.name: entry}}
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))


def test_the_latest_checkpoint_is_the_newest_whole_one(tmp_path: Path) -> None:
    assert tw.latest_checkpoint(tmp_path) is None
    for step in (2, 4, 6):
        write_checkpoint(tmp_path / f"checkpoint-{step:06d}", step)
    (tmp_path / ".writing-checkpoint-000008").mkdir()
    (tmp_path / "checkpoint-000006" / "adapters.safetensors").write_bytes(b"x" * 6)
    found = tw.latest_checkpoint(tmp_path)
    assert found is not None
    assert (found.path, found.step, found.bytes) == (tmp_path / "checkpoint-000004", 4, 4)
    assert isinstance(found.manifest, Manifest)
    unverified = tw.latest_checkpoint(tmp_path, verify=False)
    assert unverified is not None
    assert unverified.step == 6


def test_the_history_of_a_growing_log_keeps_to_its_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_log(tmp_path, steps(1, 40))
    line = path.read_bytes().splitlines(keepends=True)[-1]
    chunks = metrics._chunks

    def grow_and_chunk(events: Any, size: int, join: Any) -> Any:
        with path.open("ab") as file:
            file.write(line * 100)
        return chunks(events, size, join)

    monkeypatch.setattr(metrics, "_chunks", grow_and_chunk)
    assert len(tw.history(tmp_path, max_points=10)["loss"].steps) == 10
