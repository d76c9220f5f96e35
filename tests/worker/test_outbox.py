"""The lines that wait for a slow reader, without processes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwire_protocol.codec import encode_line
from trainwire_protocol.events import Checkpoint, Event, Log, Paused, Progress, Response, Step, Transport
from trainwire_worker import outbox as module
from trainwire_worker.outbox import Outbox
from trainwire_worker.wire import Writer

Line = dict[str, Any]
PIPE_BYTES = 64 << 10


class Reader:
    """A pipe with an outbox at one end; nothing is read before `read`."""

    def __init__(self, **settings: Any) -> None:
        self.fd, write_fd = os.pipe()
        self.outbox = Outbox(Writer(write_fd), encode_line, **settings)
        os.close(write_fd)
        os.set_blocking(self.fd, False)
        self.seq = 0

    def put(self, event: Event) -> None:
        """Say an event, numbered."""
        self.seq += 1
        event.seq = self.seq
        self.outbox.put(encode_line(event), event)

    def say(self, message: Transport) -> None:
        """Say a line about the connection."""
        self.outbox.put(encode_line(message), message)

    def read(self) -> list[Line]:
        """Take everything that waits."""
        data = b""
        while True:
            try:
                piece = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                piece = b""
            if not piece and not self.outbox.waiting:
                break
            data += piece
            self.outbox.flush()
        assert data.endswith(b"\n") or not data
        return [json.loads(line) for line in data.splitlines()]

    def close(self) -> None:
        """Go away."""
        os.close(self.fd)
        self.outbox.writer.close()


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.close()


def step(number: int, **fields: Any) -> Step:
    """Make a step event."""
    values: dict[str, Any] = {
        "loss": 2.0 + 1 / number,
        "total_tokens": number % 7,
        "training_time_ms": 1.5,
        "updates": 1,
        "total_steps": 10**6,
        "epoch": 1,
        "epoch_progress": 0.5,
        "learning_rate": 1e-4,
        "grad_norm": 1.0,
        "token_accuracy": 0.5,
        "perplexity": 8.0,
        "trained_tokens": 1,
        "tokens_per_second": 1.0,
        "padding_fraction": 0.0,
        "micro_batches": 1,
        "data_time_ms": 0.25,
        "active_bytes": 1,
        "cache_bytes": 1,
        "peak_bytes": 1,
        "eta_ms": 1,
        "skipped": 0,
    }
    return Step(step=number, **{**values, **fields})


def test_a_reader_that_keeps_up_gets_every_line(reader: Reader) -> None:
    lines = []
    for number in range(1, 2000):
        reader.put(step(number))
        if number % 50 == 0:
            lines += reader.read()
    lines += reader.read()
    assert [line["step"] for line in lines] == list(range(1, 2000))


def test_steps_are_put_together_for_a_reader_that_lags_and_sums_are_conserved(reader: Reader) -> None:
    count = 20_000
    for number in range(1, count + 1):
        reader.put(step(number))
    assert reader.outbox.lines <= module.COALESCE_AFTER
    lines = reader.read()
    assert lines[-1]["step"] == count
    assert len(lines) < 1000
    for key, per_update in (
        ("updates", 1.0),
        ("training_time_ms", 1.5),
        ("micro_batches", 1.0),
        ("data_time_ms", 0.25),
    ):
        assert sum(line[key] for line in lines) == count * per_update, key
    assert sum(line["total_tokens"] for line in lines) == sum(number % 7 for number in range(1, count + 1))
    loss = sum(line["loss"] * line["total_tokens"] for line in lines)
    assert loss == pytest.approx(sum((2 + 1 / n) * (n % 7) for n in range(1, count + 1)))
    assert [line["seq"] for line in lines] == sorted({line["seq"] for line in lines})


def test_memory_stays_flat_for_a_reader_that_never_reads(reader: Reader) -> None:
    for number in range(1, 100_001):
        reader.put(step(number))
        reader.put(Progress(id="p", title="t", done=number, total=100_000, unit="u"))
    assert reader.outbox.lines <= module.COALESCE_AFTER
    assert len(reader.outbox._items) < 4 * module.COALESCE_AFTER + module._COMPACT_AFTER
    assert reader.outbox.size < 1 << 20


def test_a_step_is_never_carried_over_an_event_that_says_where_the_run_stands(reader: Reader) -> None:
    for number in range(1, 5001):
        reader.put(step(number))
        if number % 100 == 0:
            reader.put(Checkpoint(path="p", step=number, bytes=1, kind="periodic"))
    lines = reader.read()
    newest = 0
    for line in lines:
        if line["type"] == "checkpoint":
            assert newest == line["step"]
        newest = line["step"]
    assert sum(line.get("updates", 0) for line in lines) == 5000


def test_progress_keeps_the_newest_of_each_id(reader: Reader) -> None:
    for number in range(1, 20_001):
        reader.put(Progress(id=f"p{number % 3}", title="t", done=number, total=30_000, unit="u"))
    lines = reader.read()
    assert {line["id"]: line["done"] for line in lines} == {"p0": 19_998, "p1": 19_999, "p2": 20_000}
    assert len(lines) < 3000


def test_a_backlog_of_eight_mebibytes_becomes_one_gap_and_the_responses_stay(reader: Reader) -> None:
    text = "x" * 1000
    for number in range(1, 20_001):
        reader.put(Log(level="info", message=text))
        if number % 1000 == 0:
            reader.say(Response(id=number, cmd="ping", ok=True, result={}))
    assert reader.outbox.size < (8 << 20) + PIPE_BYTES
    lines = reader.read()
    gaps = [line for line in lines if line["type"] == "gap"]
    assert len(gaps) == 1
    seen = [line["seq"] for line in lines if "seq" in line]
    missing = set(range(1, 20_001)) - set(seen)
    assert gaps[0]["counts"] == {"log": len(missing)}
    assert (gaps[0]["from_seq"], gaps[0]["to_seq"]) == (min(missing), max(missing))
    assert gaps[0]["reason"] == "slow_reader"
    assert [line["id"] for line in lines if line["type"] == "response"] == list(range(1000, 20_001, 1000))


def test_a_gap_names_all_that_steps_put_together_stood_for() -> None:
    reader = Reader(max_backlog=200_000)
    for number in range(1, 3001):
        reader.put(step(number))
        reader.put(Log(level="info", message="x" * 300))
    lines = reader.read()
    gap = next(line for line in lines if line["type"] == "gap")
    before = [line for line in lines[: lines.index(gap)] if "seq" in line]
    assert gap["from_seq"] == before[-1]["seq"] + 1
    delivered = sum(line["updates"] for line in lines if line["type"] == "step")
    assert delivered + gap["counts"]["step"] == 3000
    reader.close()


def test_a_replay_waits_for_the_lines_before_it_and_holds_those_after_it(reader: Reader) -> None:
    reader.put(Log(level="info", message="before"))
    reader.outbox.put_replay(
        iter([b'{"n":1}\n', b'{"n":2}\n', b'{"answer":1}\n']), Response(id=1, cmd="replay", ok=True)
    )
    reader.put(Log(level="info", message="after"))
    lines = reader.read()
    assert [line.get("message") or line for line in lines] == ["before", {"n": 1}, {"n": 2}, {"answer": 1}, "after"]
    assert reader.outbox.size == reader.outbox.lines == reader.outbox.response_bytes == 0


def test_a_replay_is_made_only_as_fast_as_it_is_read(reader: Reader) -> None:
    made = []

    def lines() -> Iterator[bytes]:
        for number in range(100_000):
            made.append(number)
            yield b'{"n":%d}\n' % number

    reader.outbox.put_replay(lines(), Response(id=1, cmd="replay", ok=True))
    reader.outbox.flush()
    assert 0 < len(made) < 20_000
    assert len(reader.read()) == 100_000


def test_replays_survive_a_gap() -> None:
    reader = Reader(max_backlog=10_000)
    for _ in range(1000):
        reader.put(Log(level="info", message="x" * 1000))
    reader.outbox.put_replay(iter([b'{"type":"replayed"}\n']), Response(id=1, cmd="replay", ok=True))
    for _ in range(1000):
        reader.put(Log(level="info", message="x" * 1000))
    kinds = [line["type"] for line in reader.read()]
    assert kinds.count("replayed") == 1
    assert kinds.count("gap") >= 1
    reader.close()


def test_a_reader_that_goes_away_costs_nothing_more(reader: Reader) -> None:
    for _ in range(20):
        reader.put(Log(level="info", message="x" * 16_000))
    assert reader.outbox.waiting
    spare, reader.fd = reader.fd, os.open(os.devnull, os.O_RDONLY)
    os.close(spare)
    reader.outbox.flush()
    assert reader.outbox.writer.gone
    assert (reader.outbox.size, reader.outbox.lines, reader.outbox.waiting) == (0, 0, False)
    reader.put(Log(level="info", message="y"))
    assert reader.outbox.lines == 0


@pytest.mark.parametrize("reopened", [True, False])
def test_writing_never_blocks_and_leaves_the_reader_s_flags_alone(
    reopened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not reopened:

        def refuse(*_: Any, **__: Any) -> int:
            raise OSError

        monkeypatch.setattr("trainwire_worker.wire.os.open", refuse)
    read_fd, write_fd = os.pipe()
    writer = Writer(write_fd)
    monkeypatch.undo()
    assert os.get_blocking(write_fd)
    taken = 0
    while written := writer.write(b"x" * 5000):
        taken += written
    assert taken >= PIPE_BYTES // 2
    assert not writer.gone
    assert len(os.read(read_fd, 1 << 20)) == taken
    os.close(read_fd)
    writer.write(b"x")
    assert writer.gone
    writer.close()
    os.close(write_fd)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, 40)),
        st.tuples(st.sampled_from(["log", "progress", "paused", "response", "read"]), st.integers(1, 5)),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(events=EVENTS, max_backlog=st.sampled_from([2_000, 20_000, 8 << 20]))
def test_whatever_a_reader_does_nothing_is_lost_without_a_word(events: list[tuple[str, int]], max_backlog: int) -> None:
    reader = Reader(max_backlog=max_backlog)
    lines: list[Line] = []
    steps = responses = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "COALESCE_AFTER", 3)
        for kind, number in events:
            for _ in range(number):
                if kind == "step":
                    steps += 1
                    reader.put(step(steps))
                elif kind == "log":
                    reader.put(Log(level="info", message="x" * 8000))
                elif kind == "progress":
                    reader.put(Progress(id="p", title="t", done=1, total=1, unit="u"))
                elif kind == "paused":
                    reader.put(Paused(step=steps))
                elif kind == "response":
                    responses += 1
                    reader.say(Response(id=responses, cmd="ping", ok=True, result={}))
            if kind == "read":
                lines += reader.read()
    lines += reader.read()
    reader.close()
    covered: set[int] = set()
    for line in lines:
        if line["type"] == "gap":
            covered |= set(range(line["from_seq"], line["to_seq"] + 1))
        elif "seq" in line:
            covered.add(line["seq"])
    plain = set(range(1, reader.seq + 1)) - covered
    live = [line["seq"] for line in lines if "seq" in line]
    assert live == sorted(set(live))
    delivered = sum(line.get("updates", 0) for line in lines)
    dropped = sum(line["counts"].get("step", 0) for line in lines if line["type"] == "gap")
    assert delivered + dropped == steps
    assert [line["id"] for line in lines if line["type"] == "response"] == list(range(1, responses + 1))
    merged = sum(line.get("updates", 1) - 1 for line in lines if line["type"] == "step")
    progress = sum(number for kind, number in events if kind == "progress")
    assert len(plain) <= merged + progress
