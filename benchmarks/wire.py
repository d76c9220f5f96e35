"""Measures the worker and its wire, and compares with what is promised: with the scripted engine, but where it is said.

python benchmarks/wire.py [--short] [--json FILE] [PART …]
"""

import argparse
import contextlib
import importlib.util
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TICK = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGESIZE")
LONG = 10**7

SOURCE = """
import os, socket, sys
from trainwire_protocol import channel as ch
from trainwire_protocol.events import Complete, Init, Step
count = int(sys.argv[1])
connection = socket.socket(fileno=int(os.environ[ch.CHANNEL_FD_VARIABLE]))
begin = ch.EngineChannel(connection).next(block=True)
blob = bytearray(ch.encode(Init(
    model="m", config=begin.config, training_type="sft", run_id="r", run_name="r", run_dir="/r", total_steps=count,
    trainable_parameters=1, total_parameters=1, examples=1, start_step=0, device="cpu", head="full")))
blob += ch.encode(ch.Answer(order=begin.order, result={}))
for n in range(1, count + 1):
    blob += ch.encode(Step(
        step=n, loss=2.0 + 1 / n, total_tokens=256, training_time_ms=10.123, updates=1, total_steps=count, epoch=1,
        epoch_progress=n / count, learning_rate=1e-4 / n, grad_norm=1.23456, token_accuracy=0.51234, perplexity=7.3891,
        trained_tokens=256 * n, tokens_per_second=25600.12, padding_fraction=0.05, micro_batches=1, data_time_ms=0.1,
        active_bytes=64 << 20, cache_bytes=16 << 20, peak_bytes=96 << 20, eta_ms=10 * (count - n), skipped=0))
blob += ch.encode(Complete(total_steps=count, total_time_secs=1.0, reason="finished"))
blob += ch.encode(ch.Finished(outcome="completed", step=count))
connection.sendall(blob)
"""
FED = """
import sys
from trainwire_worker import engine_session
engine_session.engine_command = lambda *_: [sys.executable, {source!r}, {count!r}]
from trainwire_worker.__main__ import leave
leave()
"""


@dataclass
class Figure:
    """One measured value with what is promised of it."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    at_least: bool = False

    @property
    def kept(self) -> bool:
        """Say whether the promise is kept."""
        if self.limit is None:
            return True
        return self.value >= self.limit if self.at_least else self.value <= self.limit


class Worker:
    """A worker process whose lines are taken as fast as they come."""

    def __init__(
        self,
        folder: Path,
        mode: str,
        script: dict[str, Any] | None,
        *words: str,
        python: list[str] | None = None,
        config: dict[str, Any] | None = None,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "script.json").write_text(json.dumps(script))
        self.config = {"model": "m", "data": "d", "run_dir": str(folder / "run"), "save_every": 0, "max_steps": LONG}
        self.config |= config or {}
        self.log = folder / "run" / "events.jsonl"
        command = [sys.executable, *(python or ["-m", "trainwire_worker"]), mode]
        if mode == "run":
            text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in self.config.items())
            (folder / "config.toml").write_text(text)
            command.append(str(folder / "config.toml"))
        if script is not None:
            command += ["--engine", "fake", "--script", str(folder / "script.json")]
        command += words
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0, cwd=folder
        )
        self._rest = b""
        self._lines: list[bytes] = []
        self.pings = 0
        """Pings so far: the next one's id."""

    def send(self, **command: Any) -> None:
        """Send a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")

    def line(self, seconds: float = 60.0) -> bytes:
        """Give the next line."""
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        while not self._lines:
            if not select.select([fd], [], [], seconds)[0]:
                raise TimeoutError
            data = os.read(fd, 1 << 20)
            if not data:
                raise EOFError
            *self._lines, self._rest = (self._rest + data).split(b"\n")
        return self._lines.pop(0)

    def wait(self, *parts: bytes) -> bytes:
        """Read on to a line that has these parts."""
        line = self.line()
        while not all(part in line for part in parts):
            line = self.line()
        return line

    def start(self) -> "Worker":
        """Start the run and wait for its first update."""
        self.send(cmd="start", config=self.config)
        self.wait(b'{"type":"step"')
        return self

    def drain(self) -> int:
        """Read to the end; the number of lines."""
        lines = len(self._lines)
        assert self.process.stdout is not None
        while data := os.read(self.process.stdout.fileno(), 1 << 20):
            lines += data.count(b"\n")
        self.process.wait()
        return lines

    def cpu_seconds(self) -> float:
        """Give the processor time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    def resident_mb(self) -> float:
        """Give the resident memory now."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * PAGE / 1e6

    def end(self) -> None:
        """Kill what is left."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        pids = children.read_text().split() if self.process.poll() is None else []
        for pid in [self.process.pid, *map(int, pids)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def hello(folder: Path, short: bool) -> list[Figure]:
    """Time from spawn to the first line."""
    times = []
    for number in range(10 if short else 40):
        worker = Worker(folder / str(number), "serve", {})
        worker.wait(b'{"type":"hello"')
        times.append(1000 * (time.perf_counter() - worker.started))
        worker.end()
    return [
        Figure("spawn to hello, median", statistics.median(times), "ms", 100.0),
        Figure("spawn to hello, fastest", min(times), "ms"),
        Figure("spawn to hello, slowest", max(times), "ms"),
    ]


def pings(folder: Path, short: bool) -> list[Figure]:
    """Time from `ping` to its response, whatever the engine does."""
    cases: dict[str, dict[str, Any]] = {
        "steps": {"step_ms": 2},
        "tracing": {"acts": [{"do": "hang", "step": 2}]},
        "load": {"acts": [{"do": "hang", "at": "load"}]},
        "save": {"acts": [{"do": "hang", "at": "save"}]},
    }
    figures = []
    for name, script in cases.items():
        worker = Worker(folder / name, "serve", script)
        worker.config["save_every"] = 2 if name == "save" else 0
        worker.send(cmd="start", config=worker.config)
        worker.wait(b'"activity":"load"') if name == "load" else worker.wait(b'{"type":"step"')
        times = ping(worker, 200 if short else 2000)
        worker.end()
        figures += latencies(f"ping during {name}", times)
    return figures


def ping(worker: Worker, count: int, until: bytes | None = None) -> list[float]:
    """Ping so often, or until a line with this part comes; milliseconds to each response."""
    times: list[float] = []
    over = False
    while len(times) < count and not over:
        mark = b'"id":%d,' % worker.pings
        before = time.perf_counter()
        worker.send(cmd="ping", id=worker.pings)
        worker.pings += 1
        while not ((line := worker.line()).startswith(b'{"type":"response"') and mark in line):
            over = over or (until is not None and until in line)
        times.append(1000 * (time.perf_counter() - before))
        time.sleep(0.0005)
    return times


def latencies(name: str, times: list[float]) -> list[Figure]:
    """Give the figures of a row of pings."""
    return [
        Figure(f"{name}, p99", statistics.quantiles(times, n=100)[98], "ms", 10.0),
        Figure(f"{name}, median of {len(times)}", statistics.median(times), "ms"),
    ]


def real_pings(folder: Path, short: bool) -> list[Figure]:
    """Time from `ping` to its response while the real engine loads, traces, trains on every core, and saves."""
    if importlib.util.find_spec("mlx") is None:
        return []
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from benchmarks.inputs import make_model, make_rows

    inputs = {
        "data": str(make_rows(folder, 2000, 250) / "train.jsonl"),
        "model": str(make_model("tiny", folder)),
        "cache_dir": str(folder / "cache"),
        "eval_every": 0,
        "max_seq_length": 512,
    }
    count = 200 if short else 2000
    times: dict[str, list[float]] = {"loading and tokenizing": [], "the first updates": []}
    for number in range(2 if short else 5):
        worker = Worker(folder / str(number), "serve", None, config=inputs)
        worker.wait(b'{"type":"hello"')
        worker.send(cmd="start", config=worker.config)
        times["loading and tokenizing"] += ping(worker, 10**6, b'{"type":"init"')
        times["the first updates"] += ping(worker, 10**6, b'"step":3,')
        if number == 0:
            times["steps"] = ping(worker, count)
        worker.end()
    saving = {**inputs, "method": "full", "save_every": 1, "max_checkpoints": 1}
    worker = Worker(folder / "saves", "serve", None, config=saving).start()
    times["saves after every step"] = ping(worker, count)
    worker.end()
    return [figure for name, row in times.items() for figure in latencies(f"ping during {name}, real engine", row)]


def throughput(folder: Path, short: bool) -> list[Figure]:
    """Step events per second from an engine that has them all ready to a reader that takes them all."""
    count = 100_000 if short else 400_000
    folder.mkdir(parents=True)
    (folder / "source.py").write_text(SOURCE)
    code = FED.format(source=str(folder / "source.py"), count=str(count))
    rates, per_cpu = [], []
    for number in range(3):
        worker = Worker(folder / str(number), "run", {}, python=["-c", code])
        worker.wait(b'{"type":"init"')
        before, cpu = time.perf_counter(), worker.cpu_seconds()
        assert worker.process.stdout is not None
        last = cpu
        while data := os.read(worker.process.stdout.fileno(), 1 << 20):
            if b'{"type":"complete"' in data:
                seconds, last = time.perf_counter() - before, worker.cpu_seconds()
        worker.process.wait()
        rates.append(count / seconds)
        per_cpu.append(count / (last - cpu))
    return [
        Figure("step events per second of the worker's processor time", max(per_cpu), "1/s", 100_000.0, at_least=True),
        Figure("step events per second, wall clock", max(rates), "1/s"),
    ]


def duration(log: Path) -> float:
    """Give the seconds from `init` to `complete`, by the log."""
    stamps = {}
    steps = 0
    for raw in log.open("rb"):
        if raw.startswith(b'{"type":"step"'):
            steps += 1
        elif raw.startswith((b'{"type":"init"', b'{"type":"complete"')):
            line = json.loads(raw)
            stamps[line["type"]] = line["ts"]
    assert steps == STEPS, f"the log has {steps} updates"
    return (stamps["complete"] - stamps["init"]) / 1000


STEPS = 10_000


def never_reading(folder: Path, short: bool) -> list[Figure]:
    """What a reader that never reads costs a run of 10,000 updates."""
    figures = []
    for step_ms in (1.0,) if short else (1.0, 0.0):
        times: dict[bool, list[float]] = {True: [], False: []}
        growth = 0.0
        for number in range(2 if short else 5):
            for reads in (True, False):
                name = f"{step_ms:g}-{number}-{reads}"
                words = (f"max_steps={STEPS}", "--flush-grace", "0")
                worker = Worker(folder / name, "run", {"step_ms": step_ms}, *words)
                if reads:
                    worker.drain()
                else:
                    while not worker.log.exists() or worker.log.stat().st_size < 1_000_000:
                        time.sleep(0.01)
                    early = worker.resident_mb()
                    while worker.process.poll() is None and worker.log.stat().st_size < 4_200_000:
                        time.sleep(0.01)
                    if worker.process.poll() is None:
                        growth = max(growth, worker.resident_mb() - early)
                    worker.process.wait()
                times[reads].append(duration(worker.log))
        slower = 100 * (statistics.median(times[False]) / statistics.median(times[True]) - 1)
        name = "as fast as they go" if step_ms == 0 else f"{step_ms:g} ms each"
        figures.append(Figure(f"never read, {STEPS} steps {name}: longer by", slower, "%", 5.0))
        figures.append(Figure(f"never read, {STEPS} steps {name}: memory grows by", growth, "MB", 2.0))
    return figures


def reaction(folder: Path, short: bool) -> list[Figure]:
    """Time to the first line after a stop or a signal, in the middle of a long step."""
    cases: dict[str, Callable[[Worker], None]] = {
        "stop": lambda worker: worker.send(cmd="stop"),
        "SIGTERM": lambda worker: worker.process.send_signal(signal.SIGTERM),
    }
    figures = []
    for name, act in cases.items():
        times = []
        for number in range(5 if short else 20):
            worker = Worker(folder / f"{name}-{number}", "serve", {"acts": [{"do": "hang", "step": 2}]}).start()
            time.sleep(0.02)
            before = time.perf_counter()
            act(worker)
            worker.line()
            times.append(1000 * (time.perf_counter() - before))
            worker.end()
        figures.append(Figure(f"first line after {name} in a long step, slowest", max(times), "ms", 100.0))
    return figures


def upkeep(folder: Path, short: bool) -> list[Figure]:
    """Memory of the worker, and its processor time at 50 updates a second."""
    worker = Worker(folder / "steady", "serve", {"step_ms": 20}).start()
    before, cpu = time.perf_counter(), worker.cpu_seconds()
    while time.perf_counter() - before < (3 if short else 15):
        worker.line()
    share = 100 * (worker.cpu_seconds() - cpu) / (time.perf_counter() - before)
    resident = worker.resident_mb()
    worker.end()
    return [
        Figure("worker's processor time at 50 updates a second", share, "%", 1.0),
        Figure("worker's memory", resident, "MB", 40.0),
    ]


PARTS: dict[str, Callable[[Path, bool], list[Figure]]] = {
    measure.__name__: measure for measure in (hello, pings, real_pings, throughput, never_reading, reaction, upkeep)
}


def main() -> int:
    """Print a table; 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON, too")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"instead of all: {', '.join(PARTS)}")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(unknown)}")
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="trainwire-wire-") as name:
        for part in arguments.parts or PARTS:
            measure = PARTS[part]
            for figure in measure(Path(name) / measure.__name__, arguments.short):
                figures.append(figure)
                sign = "≥" if figure.at_least else "≤"
                promise = f"{sign} {figure.limit:,.0f}" if figure.limit is not None else ""
                verdict = "" if figure.limit is None else "kept" if figure.kept else "BROKEN"
                print(f"{figure.name:<62} {figure.value:>12,.2f} {figure.unit:<4} {promise:<10} {verdict}", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([{**asdict(f), "kept": f.kept} for f in figures], indent=2) + "\n")
    return 0 if all(figure.kept for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
