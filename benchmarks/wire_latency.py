"""How soon the worker answers: from its spawn, to a `ping`, to a stop or a signal, whatever the engine does."""

from __future__ import annotations

import importlib.util
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.wire_worker import Figure, Worker


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


def real_pings(folder: Path, short: bool) -> list[Figure]:
    """Time from `ping` to its response while the real engine loads, traces, trains on every core, and saves."""
    if importlib.util.find_spec("mlx") is None:
        return []
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
