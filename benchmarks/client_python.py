"""Measures the Python client: events per second on one core, memory over many events, launch to the first event.

python benchmarks/client_python.py [--events 500000] [--launches 20]
"""

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import trainwire_client
from trainwire_client.testing import LINES, fake_worker

REPEATS_OF_BLOCK = """
import sys
head, line, tail, count = sys.argv[1].encode(), sys.argv[2].encode(), sys.argv[3].encode(), int(sys.argv[4])
out = sys.stdout.buffer
out.write(head)
for start in range(0, count, 1000):
    out.write(b"".join(line % (n, n) for n in range(start + 1, min(start + 1000, count) + 1)))
out.write(tail % (count + 1))
"""


def flood(events: int) -> list[str]:
    """Give the command of a worker that prints that many step events and leaves."""
    step = json.dumps({**LINES["step"], "seq": 9090909, "ts": 1700000000000, "step": 9090909}, separators=(",", ":"))
    end = json.dumps({**LINES["end"], "seq": 9090909, "ts": 1700000000000}, separators=(",", ":"))
    head = json.dumps(LINES["hello"], separators=(",", ":")) + "\n"
    program = [sys.executable, "-I", "-c", REPEATS_OF_BLOCK, head]
    return [*program, step.replace("9090909", "%d") + "\n", end.replace("9090909", "%d") + "\n", str(events)]


def resident_mib() -> float:
    """Give this process's resident memory now (Linux), or its peak (elsewhere)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 2**20
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure_flood(events: int) -> dict[str, Any]:
    """Consume a flood of events as fast as they come, on one core with nobody else but the worker's writes."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    config = {"model": "m", "data": "d", "run_dir": tempfile.mkdtemp()}
    memory: list[float] = []
    updates = delivered = 0
    with trainwire_client.launch(config, command=flood(events)) as run:
        clock, cpu = time.perf_counter(), time.process_time()
        for event in run:
            delivered += 1
            if isinstance(event, trainwire_client.Step):
                updates += event.updates
                if event.step % (events // 10) == 0:
                    memory.append(resident_mib())
        cpu, clock = time.process_time() - cpu, time.perf_counter() - clock
    assert updates == events, (updates, events)
    return {
        "events": events,
        "delivered": delivered,
        "events_per_second_of_client_time": round(events / cpu),
        "events_per_second_with_the_worker_on_the_same_core": round(events / clock),
        "resident_mib": [round(m, 1) for m in memory],
    }


def measure_launch(command: list[str] | None, launches: int, **options: Any) -> dict[str, float]:
    """Time from `launch` to the first event, in ms."""
    times = []
    for _ in range(launches):
        config = {"model": "m", "data": "d", "run_dir": tempfile.mkdtemp()}
        began = time.perf_counter()
        with trainwire_client.launch(config, command=command, **options) as run:
            next(run)
            times.append(1000 * (time.perf_counter() - began))
            run.stop(save=False)
    return {"median_ms": round(statistics.median(times), 1), "worst_ms": round(max(times), 1)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=500_000)
    parser.add_argument("--launches", type=int, default=20)
    options = parser.parse_args()
    script = [
        {"hello": {}},
        {"start": {}},
        {"await": "stop"},
        {"answer": "stop", "result": {"outcome": "stopped", "step": 0}},
    ]
    stopped = {"finish": {"outcome": "stopped", "reason": "stop", "step": 0, "checkpoint": None}}
    figures = {
        "launch to first event, fake worker": measure_launch(fake_worker([*script, stopped]), options.launches),
        "launch to first event, worker with the scripted engine": measure_launch(
            None, options.launches, worker_args=["--engine", "fake"]
        ),
        "flood": measure_flood(options.events),
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
