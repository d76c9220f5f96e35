"""Throws random and mutated control lines at a worker, and kills processes at random moments."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from worker_driver import LineReader, Spawn, Worker, is_gone, read_log, resident_bytes, wait_until

from trainwire_protocol.codec import Refusal, decode_command
from trainwire_protocol.commands import Set, Stop
from trainwire_protocol.limits import MAX_LINE_IN
from trainwire_protocol.rundir import lock_holder, newest_whole_checkpoint

COMMANDS: tuple[dict[str, object], ...] = (
    {"cmd": "ping"},
    {"cmd": "status"},
    {"cmd": "pause"},
    {"cmd": "resume"},
    {"cmd": "resume", "steps": 2},
    {"cmd": "checkpoint"},
    {"cmd": "set", "values": {"save_every": 7}},
    {"cmd": "set", "values": {"learning_rate": 1e-3, "log_every": 3}},
    {"cmd": "eval", "max_batches": 1},
    {"cmd": "generate", "prompt": "Hello", "max_tokens": 3},
    {"cmd": "generate", "messages": [{"role": "user", "content": "Hi \u2028"}], "adapter": False},
    {"cmd": "replay", "from_seq": 1, "to_seq": 3, "types": ["attempt"]},
    {"cmd": "validate", "config": {"model": "m"}},
    {"cmd": "start", "config": {"model": "m", "data": "d"}},
    {"cmd": "detach"},
)
WORDS = (b"PAUSE", b"RESUME", b"SET save_every=3", b"SET log_every=2", b"SET sample_display=all", b"SET x")
VALUES: tuple[object, ...] = (
    None,
    True,
    0,
    -1,
    2**53,
    2**63,
    -(2**64),
    10**400,
    1e308,
    0.1,
    "",
    "x" * 300,
    "\u0000",
    "\u2028\u2029",
    "\U0001f600",
    "../..",
    [],
    {},
    [[[[]]]],
    {"cmd": "ping"},
    ["a"] * 300,
)


def make_line(rng: random.Random) -> bytes:
    """Make a control line, without its line feed: valid, nearly valid, or nonsense."""
    kind = rng.random()
    if kind < 0.08:
        return rng.choice(WORDS)
    if kind < 0.11:
        return rng.randbytes(rng.randrange(200)).replace(b"\n", b"")
    if kind < 0.13:
        depth = rng.choice((5, 200, 1100, 5000))
        return b'{"cmd":"ping","id":' + rng.choice((b"[", b'{"a":')) * depth
    command = dict(rng.choice(COMMANDS))
    if rng.random() < 0.7:
        command["id"] = rng.choice((1, "a", rng.randrange(10**6), "\u00e9", *VALUES))
    while rng.random() < 0.4:
        key = rng.choice([*command, "values", "steps", "name", "prompt", "x", ""])
        command[key] = rng.choice(VALUES)
    line = json.dumps(command, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    return mutate(line, rng) if rng.random() < 0.5 else line


def mutate(line: bytes, rng: random.Random) -> bytes:
    """Damage a line in a few places."""
    data = bytearray(line)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data) + 1)
        how = rng.randrange(6)
        if how == 0 and data:
            del data[at - 1 :]
        elif how == 1 and data:
            data[at - 1] = rng.randrange(256)
        elif how == 2:
            data[at:at] = rng.choice((b"\xff", b"\xc3", b"\xed\xa0\x80", b"\0", b"\\ud800", b"\r", b"\xe2\x80\xa8"))
        elif how == 3:
            data[at:at] = rng.choice((b"{", b"}", b'"', b",", b"[", b"]", b":", b"\\", b"NaN", b"1e999"))
        elif how == 4:
            end = min(len(data), at + rng.randrange(20))
            data[at:at] = data[at:end]
        else:
            data = data + data
    return bytes(data).replace(b"\n", b"")


def ends_the_run(line: bytes) -> bool:
    """Say whether a line would end the run by right, so that it is no part of an attack."""
    try:
        decoded = decode_command(line)
    except (Refusal, RecursionError):
        return False
    command = decoded[0] if decoded else None
    return isinstance(command, Stop) or (isinstance(command, Set) and "max_steps" in command.values)


def is_blank(line: bytes) -> bool:
    """Say whether a line asks for no answer."""
    try:
        return not line.decode("utf-8").strip(" \t\r\n")
    except UnicodeDecodeError:
        return False


class Attack:
    """Lines on their way to a worker whose answers are counted as they come."""

    def __init__(self, worker: Worker, seed: int) -> None:
        self._worker = worker
        self._rng = random.Random(seed)
        self.expected = 0
        self.answered = 0
        self.most_memory = 0
        self._tail = b""
        assert worker.process.stdin is not None
        assert worker.process.stdout is not None
        self._in, self._out = worker.process.stdin.fileno(), worker.process.stdout.fileno()
        os.set_blocking(self._in, False)

    def _lines(self, count: int) -> Iterator[bytes]:
        for number in range(count):
            if number % 20_000 == 10_000:
                yield b'{"cmd":"ping","id":"' + b"y" * (MAX_LINE_IN + self._rng.randrange(-100, 100)) + b'"}'
            while ends_the_run(line := make_line(self._rng)):
                pass
            yield line

    def throw(self, count: int, seconds: float) -> None:
        """Send lines in pieces of any size, reading all the while."""
        deadline = time.monotonic() + seconds
        lines = self._lines(count)
        waiting = bytearray()
        more = True
        while more or waiting:
            while more and len(waiting) < 1 << 16:
                line = next(lines, None)
                if line is None:
                    more = False
                    break
                self.expected += not is_blank(line)
                waiting += line + self._rng.choice((b"\n", b"\n", b"\r\n", b"\n\n"))
            self._turn(waiting, deadline)

    def _turn(self, waiting: bytearray, deadline: float) -> None:
        assert time.monotonic() < deadline, f"{self.answered} of {self.expected} are answered"
        ready, writable, _ = select.select([self._out], [self._in] if waiting else [], [], 1)
        if ready:
            self._read()
        if writable:
            piece = bytes(waiting[: self._rng.randrange(1, 40_000)])
            del waiting[: os.write(self._in, piece)]

    def _read(self) -> None:
        data = os.read(self._out, 1 << 20)
        assert data, f"the worker is gone: {self._worker.stderr()[-2000:]}"
        *lines, self._tail = (self._tail + data).split(b"\n")
        for line in lines:
            assert line.startswith(b"{"), line[:200]
            assert line.isascii(), line[:200]
            self.answered += line.startswith(b'{"type":"response"')
        self.most_memory = max(self.most_memory, resident_bytes(self._worker.pid))

    def settle(self, seconds: float) -> None:
        """Wait until every line is answered, those that the engine answers included, and a last ping."""
        deadline = time.monotonic() + seconds
        self.expected += 2
        waiting = bytearray(b'\n{"cmd":"resume"}\n{"cmd":"ping","id":"last"}\n')
        while self.answered < self.expected:
            self._turn(waiting, deadline)
        assert self.answered == self.expected
        os.set_blocking(self._in, True)


LONG = {"max_steps": 10**8, "save_every": 0}
PARENT = "import subprocess, sys; p = subprocess.Popen({!r}); print(p.pid, file=sys.stderr, flush=True); p.wait()"


def wait_for_a_moment(worker: Worker, rng: random.Random, moments: tuple[str, ...]) -> None:
    """Start the run and wait for some moment of it, perhaps for some updates more."""
    worker.send("start", "start", config=worker.config)
    worker.wait(rng.choice(moments))
    for _ in range(rng.choice((0, 0, 1, 5, 20))):
        worker.wait("step")


def kill_the_worker(serve: Spawn, rng: random.Random) -> None:
    """Kill a worker: its engine saves and leaves, and the run goes on without a hole in its log."""
    worker = serve(script={"step_ms": 2}, config=LONG | {"save_every": rng.choice((20, 50))})
    wait_for_a_moment(worker, rng, ("attempt", "init", "epoch_start", "step", "checkpoint"))
    holder = lock_holder(worker.run_dir)
    worker.process.kill()
    worker.process.wait()
    engine = holder.engine_pid if holder else None
    wait_until(lambda: lock_holder(worker.run_dir) is None, "nobody holds the lock")
    wait_until(lambda: engine is None or is_gone(engine), "the engine is gone")
    found, broken = newest_whole_checkpoint(worker.run_dir)
    assert not broken
    again = serve(script={"step_ms": 2}, config=LONG)
    again.begin()
    again.send("stop")
    again.finish()
    log = read_log(worker.run_dir)
    second = next(n for n, line in enumerate(log) if line["type"] == "attempt" and line["attempt"] == 2)
    before = [line["step"] for line in log[:second] if line["type"] == "step"]
    after = [line["step"] for line in log[second:] if line["type"] == "step"]
    start = log[second].get("resumed_from_step", 0)
    assert start >= max(before, default=0), "no update is lost"
    assert sorted({*before, *after}) == list(range(1, max(after) + 1))
    assert (found.step if found else 0) == start


def kill_the_engine(serve: Spawn, rng: random.Random) -> None:
    """Kill an engine: the worker tells it, with the last checkpoint."""
    worker = serve(script={"step_ms": 2}, config=LONG | {"save_every": rng.choice((20, 50))})
    wait_for_a_moment(worker, rng, ("attempt", "init", "epoch_start", "step", "checkpoint"))
    holder = wait_until(lambda: (h := lock_holder(worker.run_dir)) and h.engine_pid and h, "there is an engine")
    os.kill(holder.engine_pid, signal.SIGKILL)
    end = worker.finish()
    assert (end["reason"], end["exit_code"]) == ("engine_died", 9)
    told = worker.of("checkpoint")
    assert end["checkpoint"] == (told[-1]["path"] if told else None)
    assert not newest_whole_checkpoint(worker.run_dir)[1]


def kill_the_parent(serve: Spawn, rng: random.Random) -> None:
    """Kill a worker's parent: it is missed, and the run is saved."""
    worker = serve(config=LONG)
    worker.clean()
    code = PARENT.format(worker.command)
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=-1, stdout=-1, stderr=-1, cwd=worker.folder, bufsize=0
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    assert parent.stderr is not None
    pid = int(parent.stderr.readline())
    worker.process, worker.reader = parent, LineReader(parent.stdout.fileno())
    wait_for_a_moment(worker, rng, ("attempt", "init", "step"))
    parent.kill()
    parent.wait()
    if rng.random() < 0.5:
        parent.stdin.close()
    worker.reader.rest()
    wait_until(lambda: is_gone(pid), "the worker is gone")
    end = worker.lines[-1]
    assert (end["outcome"], end["exit_code"]) == ("interrupted", 20)
    assert (end["checkpoint"] is not None) is (end["step"] > 0)
    for stream in (parent.stdin, parent.stdout, parent.stderr):
        stream.close()


def throw_lines(serve: Spawn, seed: int, count: int, seconds: float) -> None:
    """Attack a worker that trains: each line is answered once, and neither life nor memory changes."""
    worker = serve(script={"valid_examples": 8, "step_ms": 20}, config=LONG)
    worker.begin()
    attack = Attack(worker, seed)
    attack.throw(min(count // 2, 20_000), seconds)
    attack.settle(60)
    before = resident_bytes(worker.pid)
    attack.throw(count - min(count // 2, 20_000), seconds)
    attack.settle(60)
    assert attack.most_memory < before + (12 << 20), (before, attack.most_memory)
    worker.reader = LineReader(worker.reader.fd)
    phase = worker.result("status")["phase"]
    assert phase == "running"
    worker.raw(b'{"cmd":"stop"}\n')
    worker.reader.rest()
    assert worker.exit_code() == 0
    assert worker.lines[-1]["type"] == "end"
