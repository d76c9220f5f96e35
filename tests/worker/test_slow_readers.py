"""Readers that lag, that never read, and that are waited for: training goes on and nothing is lost without a word."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from worker_driver import DEADLINE_SECONDS, Spawn, Worker, is_gone, read_log, resident_bytes, wait_until


def unread_run(worker: Worker) -> None:
    """Wait, without reading anything, until the run has said its last line to the log."""
    path = worker.run_dir / "events.jsonl"

    def ended() -> bool:
        if not path.exists():
            return False
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - 2000))
            return b'{"type":"end"' in log.read()

    wait_until(ended, "the run ends")


def test_a_reader_that_lags_gets_every_sum_and_the_log_every_update(run: Spawn) -> None:
    worker = run("--flush-grace", "30", script={"step_ms": 0}, config={"max_steps": 8000, "save_every": 0})
    unread_run(worker)
    assert worker.finish()["step"] == 8000
    steps = worker.of("step")
    logged = [line for line in worker.log() if line["type"] == "step"]
    assert [line["step"] for line in logged] == list(range(1, 8001))
    assert len(steps) < 8000
    assert sum(line["updates"] for line in steps) == 8000
    assert sum(line["total_tokens"] for line in steps) == sum(line["total_tokens"] for line in logged)
    assert sum(line["training_time_ms"] for line in steps) == pytest.approx(
        sum(line["training_time_ms"] for line in logged)
    )
    mean = sum(line["loss"] * line["total_tokens"] for line in steps)
    assert mean == pytest.approx(sum(line["loss"] * line["total_tokens"] for line in logged))
    assert not worker.of("gap")


def test_a_backlog_of_eight_mebibytes_becomes_a_gap_that_a_replay_fills(serve: Spawn) -> None:
    text = "m" * 900
    script = {"acts": [{"do": "log", "message": text}] * 8, "step_ms": 0}
    worker = serve(script=script, config={"max_steps": 1500, "save_every": 0}, check=lambda raw, limit: json.loads(raw))
    worker.send("start", "start", config=worker.config, linger=True)
    path = worker.run_dir / "events.jsonl"
    wait_until(lambda: path.exists() and b'"phase":"lingering"' in path.read_bytes()[-3000:], "it lingers")
    assert path.stat().st_size > 11 << 20
    assert worker.reader.answer("start")["ok"], "responses are never dropped"
    gap = worker.wait("gap")
    assert gap["reason"] == "slow_reader"
    assert gap["counts"]["log"] > 5000
    worker.result("replay", from_seq=gap["from_seq"], to_seq=gap["to_seq"])
    again = {line["seq"] for line in worker.lines if line.get("replay")}
    assert again == set(range(gap["from_seq"], gap["to_seq"] + 1))
    worker.send("stop")
    worker.finish()
    seen = {line["seq"] for line in worker.lines if "seq" in line}
    last = worker.lines[-1]["seq"]
    steps_and_progress = {x["seq"] for x in read_log(worker.run_dir) if x["type"] in ("step", "progress")}
    assert set(range(1, last + 1)) - seen <= steps_and_progress


def test_a_reader_that_never_reads_costs_neither_the_run_nor_memory_nor_the_log(run: Spawn) -> None:
    worker = run("--flush-grace", "0.1", script={"step_ms": 0.1}, config={"max_steps": 10_000, "save_every": 0})
    path = worker.run_dir / "events.jsonl"
    wait_until(lambda: path.exists() and path.stat().st_size > 300_000, "some hundred updates")
    before = resident_bytes(worker.pid)
    wait_until(lambda: is_gone(worker.pid) or path.stat().st_size > 4_000_000, "most of the updates")
    if not is_gone(worker.pid):
        assert resident_bytes(worker.pid) < before + (3 << 20)
    assert worker.exit_code() == 0
    logged = read_log(worker.run_dir)
    assert [line["step"] for line in logged if line["type"] == "step"] == list(range(1, 10_001))
    assert logged[-1]["type"] == "end"


def test_stdin_is_read_while_stdout_is_full(serve: Spawn) -> None:
    worker = serve(script={"step_ms": 0}, config={"max_steps": 10**6, "save_every": 0})
    worker.send("start", config=worker.config)
    path = worker.run_dir / "events.jsonl"
    wait_until(lambda: path.exists() and path.stat().st_size > 500_000, "a full pipe")
    worker.send("pause", "p")
    wait_until(lambda: b'{"type":"paused"' in path.read_bytes()[-4000:], "the pause takes effect")
    assert worker.reader.answer("p")["ok"]
    worker.send("stop")
    worker.finish()


def test_a_client_that_does_not_read_its_responses_is_heard_again_when_it_does(serve: Spawn) -> None:
    worker = serve(check=lambda raw, limit: json.loads(raw))
    ping = json.dumps({"cmd": "ping", "id": "x" * 128}).encode() + b"\n"
    assert worker.process.stdin is not None
    os.set_blocking(worker.process.stdin.fileno(), False)
    sent = 0
    last_taken = time.monotonic()
    while time.monotonic() - last_taken < 0.5 and sent < 400_000:
        if select.select([], [worker.process.stdin], [], 0.1)[1]:
            sent += os.write(worker.process.stdin.fileno(), ping * 20) // len(ping)
            last_taken = time.monotonic()
    assert sent < 400_000, "it stops reading when 8 MiB of responses are unread"
    assert resident_bytes(worker.pid) < 100 << 20
    while len(worker.lines) < sent:
        worker.reader.read_some(time.monotonic() + DEADLINE_SECONDS)
    os.set_blocking(worker.process.stdin.fileno(), True)


def test_backpressure_block_makes_training_wait_for_the_reader_and_drops_nothing(serve: Spawn) -> None:
    worker = serve("--backpressure", "block", script={"step_ms": 0}, config={"max_steps": 5000, "save_every": 0})
    worker.send("start", config=worker.config)
    path = worker.run_dir / "events.jsonl"
    wait_until(lambda: path.exists() and path.stat().st_size > 60_000, "a full pipe")
    sizes = [0, 1]
    while sizes[-1] != sizes[-2]:
        before = time.monotonic()
        wait_until(lambda start=before: time.monotonic() > start + 0.3, "a moment")
        sizes.append(path.stat().st_size)
    assert sizes[-1] < 2 << 20, "training waits"
    worker.send("ping", 1)
    end = worker.finish()
    assert end["step"] == 5000
    assert [line["step"] for line in worker.of("step")] == list(range(1, 5001))
    assert not worker.of("gap")


def test_backpressure_block_still_obeys_a_signal(serve: Spawn) -> None:
    worker = serve(
        "--backpressure", "block", "--flush-grace", "0.1", script={"step_ms": 0}, config={"max_steps": 10**6}
    )
    worker.send("start", config=worker.config)
    path = worker.run_dir / "events.jsonl"
    wait_until(lambda: path.exists() and path.stat().st_size > 60_000, "a full pipe")
    worker.process.terminate()
    wait_until(lambda: b'"phase":"stopping"' in path.read_bytes(), "the signal is heard")
    worker.process.kill()


def test_one_line_is_one_write(run: Spawn, tmp_path: Path) -> None:
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    trace = tmp_path / "trace"
    probe = run(config={"max_steps": 5})
    probe.finish()
    command = ["strace", "-e", "trace=write", "-s", "100000", "-o", str(trace), *probe.command]
    done = subprocess.run(
        [*command, f"run_dir={tmp_path / 'second'}"], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if b"ptrace" in done.stderr:
        pytest.skip("strace is not allowed here")
    lines = done.stdout.splitlines()
    written = [text for text in trace.read_text().splitlines() if '"{\\"type\\"' in text]
    to_stdout = [text for text in written if text.count('\\n"') == 1 and text.count("\\n") == 1]
    assert len(to_stdout) >= len(lines)


def test_a_file_on_a_full_disk_is_a_slow_reader_and_no_broken_pipe(run: Spawn, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], check=False).returncode
    ):
        pytest.skip("no tmpfs can be mounted here")
    try:
        with (disk / "out.jsonl").open("wb") as out:
            worker = run("--flush-grace", "0.1", stdout=out, script={"step_ms": 1}, config={"max_steps": 500})
            assert worker.exit_code() == 0
        assert read_log(worker.run_dir)[-1]["outcome"] == "completed"
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
