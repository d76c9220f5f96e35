"""`replay`: stored lines again, marked, while live lines wait."""

from __future__ import annotations

import json
import time

import pytest
from worker_driver import DEADLINE_SECONDS, Spawn, resident_bytes

LONG = {"max_steps": 100_000}


def test_replayed_lines_are_marked_and_counted_and_come_before_the_response(serve: Spawn) -> None:
    worker = serve(config=LONG)
    worker.begin()
    worker.wait("step", step=10)
    worker.send("replay", "again", from_seq=3, to_seq=15)
    response = worker.reader.answer("again")
    assert response["result"] == {"count": 13}
    again = [line for line in worker.lines if line.get("replay")]
    assert [line["seq"] for line in again] == list(range(3, 16))
    assert {line["cause"] for line in again} == {"again"}
    assert worker.lines.index(again[-1]) + 1 == worker.lines.index(response)
    assert worker.lines.index(again[-1]) - worker.lines.index(again[0]) == 12, "live lines wait meanwhile"
    logged = {line["seq"]: line for line in worker.log()}
    for line in again:
        expected = {**logged[line["seq"]], "replay": True, "cause": "again"}
        assert line == expected
    worker.send("stop")
    worker.finish()
    assert not any(line.get("replay") for line in worker.log())


def test_replay_picks_types_and_ends_at_what_is_there(serve: Spawn) -> None:
    worker = serve(config=LONG)
    worker.begin()
    worker.result("pause")
    steps = len(worker.of("step"))
    assert worker.result("replay", types=["step"], to_seq=10**9)["count"] == steps
    assert worker.result("replay", types=["step", "init"])["count"] == steps + 1
    assert worker.result("replay", types=[])["count"] == 0
    assert worker.result("replay", from_seq=10**9)["count"] == 0
    assert worker.refusal("replay", types=["steps"]) == "not_found"
    assert worker.refusal("replay", from_seq=0) == "bad_params"
    worker.send("stop")
    worker.finish()


def test_replay_reaches_over_attempts_and_to_lines_of_later_versions(serve: Spawn) -> None:
    first = serve(config=LONG)
    first.begin()
    first.send("stop")
    first.finish()
    path = first.run_dir / "events.jsonl"
    last = len(first.log())
    with path.open("ab") as log:
        log.write(json.dumps({"type": "from_the_future", "seq": last + 1, "ts": 1, "x": "é"}).encode() + b"\n")
    second = serve(config=LONG, check=lambda raw, limit: json.loads(raw))
    assert second.start()["ok"]
    second.wait("step")
    count = second.result("replay", to_seq=last + 1)["count"]
    assert count == last + 1
    again = [line for line in second.lines if line.get("replay")]
    assert again[-1]["type"] == "from_the_future"
    assert again[-1]["x"] == "é"
    second.send("stop")
    second.finish()


def test_a_replayed_line_keeps_to_the_limit(serve: Spawn) -> None:
    script = {"acts": [{"do": "log", "step": 1, "message": "m" * 6000 + "é"}]}
    first = serve(script=script, config=LONG)
    first.begin()
    first.send("stop")
    first.finish()
    second = serve("--max-line", "6000", config=LONG, limit=6000)
    second.begin()
    second.result("replay", types=["log"])
    cut = next(line for line in second.lines if line.get("replay") and "truncated" in line)
    assert cut["truncated"] == ["message"]
    second.send("stop")
    second.finish()


def test_replays_of_a_reader_that_does_not_read_are_bounded(serve: Spawn) -> None:
    script = {"acts": [{"do": "flood", "at": "load", "events": 150}]}
    worker = serve(script=script, config=LONG, check=lambda raw, limit: json.loads(raw))
    worker.begin()
    for number in range(300):
        worker.send("replay", number, to_seq=150)
    assert worker.reader.answer(299)["error"]["code"] == "busy"
    assert worker.reader.answer(0)["ok"]
    worker.send("stop")
    worker.finish()


@pytest.mark.parametrize("events", [100_000])
def test_a_long_replay_to_a_slow_reader_keeps_the_worker_answering_others_and_small(serve: Spawn, events: int) -> None:
    script = {"acts": [{"do": "flood", "at": "load", "events": events}]}
    worker = serve(script=script, config=LONG, check=lambda raw, limit: json.loads(raw))
    assert worker.start()["ok"]
    worker.wait("step")
    worker.result("pause")
    before = resident_bytes(worker.pid)
    worker.send("replay", "all", types=["log"])
    controller = worker.controller()
    for _ in range(50):
        controller.result("ping")
        worker.reader.read_some(time.monotonic() + DEADLINE_SECONDS)
    assert resident_bytes(worker.pid) < before + (8 << 20)
    assert worker.reader.answer("all")["result"]["count"] >= events
    numbers = [line["seq"] for line in worker.lines if line.get("replay")]
    assert numbers == sorted(set(numbers))
    assert len(numbers) >= events
    controller.close()
    worker.send("stop")
    worker.finish()


def test_a_replay_does_not_keep_a_stopped_worker_alive_when_nobody_reads(serve: Spawn) -> None:
    script = {"acts": [{"do": "flood", "at": "load", "events": 20_000}]}
    worker = serve("--flush-grace", "0.2", script=script, config=LONG)
    worker.begin()
    worker.send("replay")
    worker.send("stop")
    assert worker.exit_code() == 0
