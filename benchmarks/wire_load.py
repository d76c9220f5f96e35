"""What the worker costs: events per second, processor time and memory, and a run whose reader never reads."""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path

from benchmarks.wire_worker import FED, SOURCE, Figure, Worker

STEPS = 10_000
"""Updates of a run whose reader never reads."""


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
