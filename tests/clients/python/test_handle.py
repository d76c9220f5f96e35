"""Who consumes events, in which thread, and what the test kit plays."""

import asyncio
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

import trainwire_client as tw
from trainwire_client import End, Init, Step, aio
from trainwire_client.channel import Channel
from trainwire_client.testing import fake_worker
from trainwire_protocol.events import EVENT_TYPES, TRANSPORT_TYPES, type_name

SESSIONS = Path(__file__).parents[3] / "protocol" / "examples"
TRANSPORT = [type_name(kind) for kind in TRANSPORT_TYPES]
CONFIG = {"model": "m", "data": "d"}
BEGIN: list[dict[str, Any]] = [{"hello": {}}, {"start": {}}]
UNTIL_PING: list[dict[str, Any]] = [{"await": "ping"}, {"answer": "ping", "result": {"ts": 1}}]
FINISH: list[dict[str, Any]] = [{"finish": {}}]


def test_wait_leaves_the_events_to_the_thread_that_iterates() -> None:
    with tw.launch(CONFIG, command=fake_worker([*BEGIN, *UNTIL_PING, {"steps": 50}, *FINISH])) as run:
        read: list[Any] = [next(run)]
        iterating = threading.Event()

        def iterate() -> None:
            read.append(next(run))
            iterating.set()
            read.extend(run)

        reader = threading.Thread(target=iterate)
        reader.start()
        iterating.wait(90)
        run.ping()
        result = run.wait(90)
        reader.join(90)
    assert result.outcome == "completed"
    assert [event.seq for event in read] == list(range(1, 55))


def test_wait_after_a_loop_that_was_left_hands_the_rest_to_the_handlers() -> None:
    with tw.launch(CONFIG, command=fake_worker([*BEGIN, {"steps": 9}, *FINISH])) as run:
        rest: list[int] = []
        for event in run:
            if isinstance(event, Step) and event.step == 4:
                break
        run.on("step", lambda event: rest.append(event.step))
        run.wait(90)
        assert list(run) == []
    assert rest == [5, 6, 7, 8, 9]


def test_what_a_handler_raises_reaches_the_consumer_and_loses_no_other_event() -> None:
    with tw.launch(CONFIG, command=fake_worker([*BEGIN, {"steps": 3}, *FINISH])) as run:

        @run.on("step")
        def fail(event: Step) -> None:
            raise KeyError(event.step)

        failures = []
        for _ in range(3):
            with pytest.raises(KeyError) as caught:
                run.wait(90)
            failures.append(caught.value.args[0])
        assert run.wait(90).outcome == "completed"
    assert failures == [1, 2, 3]


def test_a_wait_that_times_out_says_what_the_worker_was_doing() -> None:
    silent = fake_worker([*BEGIN, {"steps": 2}, *UNTIL_PING, *FINISH])
    with tw.launch(CONFIG, command=silent) as run:
        assert [next(run).seq for _ in range(4)] == [1, 2, 3, 4]  # type: ignore[union-attr]
        with pytest.raises(tw.CommandTimeout, match=r"did not end within 0.05 s.*at step 2.*step \(seq 4\)"):
            run.wait(0.05)
        run.ping()
        assert run.wait(90).outcome == "completed"


def test_a_death_is_told_before_hello_with_what_was_printed_to_the_wrong_place() -> None:
    banner = [{"raw": "Fatal: no licence\n"}, {"exit": 4}]
    with pytest.raises(tw.WorkerDied, match=r"exit code 4(.|\n)*no licence"):
        tw.launch(CONFIG, command=fake_worker(banner))


@pytest.mark.parametrize("name", sorted(path.stem for path in SESSIONS.glob("*.jsonl")))
def test_the_kit_plays_a_recorded_session_with_the_ids_of_this_client(name: str, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (SESSIONS / f"{name}.jsonl").read_text().splitlines()]
    responses = [line for line in lines if line["type"] == "response" and line["id"] is not None]
    expected = [line for line in lines if line["type"] not in TRANSPORT and "replay" not in line]
    expected_gaps = [line for line in lines if line["type"] == "gap"]
    with tw.launch({**CONFIG, "run_dir": str(tmp_path)}, command=fake_worker(SESSIONS / f"{name}.jsonl")) as run:
        answers = [run._core.requests.begin(r["cmd"], {}) for r in responses if r["cmd"] != "start"]
        events: list[Any] = []
        try:
            events.extend(run)
        except tw.WorkerDied:
            # A session whose front end left has no end line.
            assert lines[-1]["type"] != "end"
    ids = {r["id"] for r in responses}
    events_read = [msgspec.to_builtins(event) for event in events]
    assert [event for event in events_read if event["type"] == "gap"] == expected_gaps
    for event, line in zip((e for e in events_read if e["type"] != "gap"), expected, strict=True):
        if line.get("cause") in ids:
            assert isinstance(event.pop("cause"), int)
            del line["cause"]
        assert {key: event.get(key) for key in line} == line
    for answer, response in zip(answers, (r for r in responses if r["cmd"] != "start"), strict=True):
        assert (answer.future.exception(0) is None) == response["ok"]


def test_every_recorded_session_is_read_without_junk_and_every_type_occurs() -> None:
    types = set()
    for path in sorted(SESSIONS.glob("*.jsonl")):
        channel = Channel()
        for received in channel.feed(path.read_bytes()):
            assert not isinstance(received.message, dict), received.message
            types.add(type(received.message))
        assert channel.junk == 0
    assert types == {*EVENT_TYPES, *TRANSPORT_TYPES}


def test_the_kit_says_when_a_command_is_not_what_the_script_expects() -> None:
    script = [*BEGIN, {"await": "set", "with": {"values": {"learning_rate": 1.0}}}]
    with tw.launch(CONFIG, command=fake_worker(script)) as run, pytest.raises(tw.WorkerDied, match="does not match"):
        run.set(learning_rate=2.0)


def test_a_run_over_asyncio_is_iterated_steered_and_awaited() -> None:
    async def work() -> tuple[list[int], tw.Result]:
        script = [*BEGIN, {"steps": 3}, *UNTIL_PING, {"steps": 2}, *FINISH]
        async with aio.launch(CONFIG, command=fake_worker(script)) as run:
            seen: list[int] = []

            @run.on("step")
            async def note(event: Step) -> None:
                await asyncio.sleep(0)
                seen.append(event.step)

            async for event in run:
                if isinstance(event, Init):
                    assert (await run.started()).run_id == "r1"
                if isinstance(event, Step) and event.step == 3:
                    assert (await run.ping()).ts == 1
            return seen, await run.wait()

    seen, result = asyncio.run(work())
    assert seen == [1, 2, 3, 4, 5]
    assert result.outcome == "completed"


def test_over_asyncio_a_waiting_task_leaves_the_events_to_the_one_that_iterates() -> None:
    async def work() -> list[Any]:
        run = await aio.launch(CONFIG, command=fake_worker([*BEGIN, *UNTIL_PING, {"steps": 50}, *FINISH]))
        read: list[Any] = []

        async def iterate() -> None:
            async for event in run:
                read.append(event)

        reader = asyncio.create_task(iterate())
        while not read:
            await asyncio.sleep(0)
        waiter = asyncio.create_task(run.wait(90))
        await run.ping()
        assert (await waiter).outcome == "completed"
        await reader
        await run.close()
        return read

    assert [event.seq for event in asyncio.run(work())] == list(range(1, 55))


def test_over_asyncio_a_cancelled_iteration_loses_no_event() -> None:
    async def work() -> list[Any]:
        async with aio.launch(CONFIG, command=fake_worker([*BEGIN, *UNTIL_PING, {"steps": 5}, *FINISH])) as run:
            read: list[Any] = []

            async def iterate() -> None:
                async for event in run:
                    read.append(event)

            reader = asyncio.create_task(iterate())
            while len(read) < 2:
                await asyncio.sleep(0)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            await run.ping()
            return read + [event async for event in run]

    assert [event.seq for event in asyncio.run(work())] == list(range(1, 10))


def test_over_asyncio_the_loop_turns_while_a_command_waits_and_a_flood_comes() -> None:
    async def work() -> tuple[int, int]:
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        turner = asyncio.create_task(turn())
        async with aio.launch(CONFIG, command=fake_worker([*BEGIN, {"steps": 2000}, *FINISH])) as run:
            events = [event async for event in run]
        turner.cancel()
        return turns, sum(event.updates for event in events if isinstance(event, Step))

    turns, updates = asyncio.run(work())
    assert updates == 2000
    assert turns > 10


def test_an_end_is_the_last_event_and_iteration_stays_at_its_end() -> None:
    with tw.launch(CONFIG, command=fake_worker([*BEGIN, *FINISH])) as run:
        assert isinstance(list(run)[-1], End)
        assert list(run) == []


def test_values_of_later_minor_versions_end_no_run_and_reach_on_unknown() -> None:
    unknown: list[dict[str, Any]] = []
    script = [
        *BEGIN,
        {"send": {"type": "status", "phase": "hibernating"}},
        {"await": "status"},
        {"answer": "status", "result": {"phase": "hibernating", "activity": "dream", "step": 3}},
        {"finish": {"outcome": "postponed", "exit_code": 30}},
    ]
    with tw.launch(CONFIG, command=fake_worker(script), on_unknown=unknown.append) as run:
        assert run.status().phase == "hibernating"
        result = run.wait(90)
    assert [(line["type"], line["phase"]) for line in unknown] == [("status", "hibernating")]
    assert (result.outcome, result.exit_code) == ("postponed", 30)


def is_gone(number: str) -> bool:
    """Say whether there is no such process any more."""
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    return False


NOTE_PID = "import os, pathlib, signal, sys, time; pathlib.Path({path!r}).write_text(str(os.getpid()))\n"


def test_ctrl_c_while_the_worker_is_silent_leaves_no_worker(tmp_path: Path) -> None:
    program = NOTE_PID + "os.kill(os.getppid(), signal.SIGINT)\ntime.sleep(600)"
    command = [sys.executable, "-c", program.format(path=str(tmp_path / "pid"))]
    with pytest.raises(KeyboardInterrupt):
        tw.launch(CONFIG, command=command)
    assert is_gone((tmp_path / "pid").read_text())


def test_a_worker_of_another_major_that_stays_is_ended_at_once(tmp_path: Path) -> None:
    program = NOTE_PID + 'print(\'{{"type":"hello","protocol":9}}\', flush=True)\ntime.sleep(600)'
    command = [sys.executable, "-c", program.format(path=str(tmp_path / "pid"))]
    with pytest.raises(tw.ProtocolMismatch, match="protocol 9, this client speaks protocol 1"):
        tw.launch(CONFIG, command=command)
    assert is_gone((tmp_path / "pid").read_text())


FORKING = """
    import json, os, sys, trainwire_client as tw
    with tw.launch({"model": "m", "data": "d"}, command=json.loads(sys.argv[1])) as run:
        next(run)
        child = os.fork()
        if child == 0:
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert run.ping().ts == 1
        print(run.wait().outcome)
"""


def test_a_forked_process_that_leaves_the_block_does_not_stop_the_run() -> None:
    command = json.dumps(fake_worker([*BEGIN, *UNTIL_PING, *FINISH]))
    words = [sys.executable, "-c", textwrap.dedent(FORKING), command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.stdout == "completed\n", done.stderr


def test_many_threads_steer_one_run_and_each_gets_its_own_answer() -> None:
    answers: list[dict[str, Any]] = [{"await": "ping"}, {"answer": "ping", "result": {"ts": 1}}]
    script = [*BEGIN, {"repeat": 200, "do": [*answers, {"steps": 5}]}, *FINISH]
    with tw.launch(CONFIG, command=fake_worker(script)) as run:
        threads = [threading.Thread(target=lambda: [run.ping() for _ in range(20)]) for _ in range(10)]
        for thread in threads:
            thread.start()
        steps = sum(event.updates for event in run if isinstance(event, Step))
        for thread in threads:
            thread.join()
        assert steps == 1000
        assert run.wait().outcome == "completed"


def test_a_fake_worker_that_hangs_leaves_with_its_front_end() -> None:
    program = """
        import json, os, signal, sys, trainwire_client as tw
        print(tw.launch({"model": "m", "data": "d"}, command=json.loads(sys.argv[1])).pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = json.dumps(fake_worker([*BEGIN, {"hang": True}]))
    words = [sys.executable, "-c", textwrap.dedent(program), command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    deadline = time.monotonic() + 90
    while not is_gone(done.stdout):
        assert time.monotonic() < deadline
        time.sleep(0.05)
