"""Measures the Python client: events per second on one core, memory on the way, time from launch to the first event.

python benchmarks/client_python.py [--events 500000] [--launches 20]
"""

import argparse
import asyncio
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from trainwire_client import Step, aio, launch
from trainwire_client.testing import LINES, fake_worker

FLOOD = """
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
    program = [sys.executable, "-I", "-c", FLOOD, head]
    return [*program, step.replace("9090909", "%d") + "\n", end.replace("9090909", "%d") + "\n", str(events)]


def resident_mib() -> float:
    """Give this process's resident memory now (Linux), or its peak (elsewhere)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 2**20
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class Consumer:
    """Counts what is delivered, and looks at the memory ten times on the way."""

    def __init__(self, events: int) -> None:
        self._events = events
        self._memory: list[float] = []
        self._updates = self._delivered = 0
        self._clock, self._cpu = time.perf_counter(), time.process_time()

    def take(self, event: object) -> None:
        """Count an event."""
        self._delivered += 1
        if isinstance(event, Step):
            self._updates += event.updates
            if event.step % (self._events // 10) == 0:
                self._memory.append(resident_mib())

    def figures(self) -> dict[str, Any]:
        """Give the figures, once every event has been taken."""
        cpu, clock = time.process_time() - self._cpu, time.perf_counter() - self._clock
        assert self._updates == self._events, (self._updates, self._events)
        return {
            "events": self._events,
            "delivered": self._delivered,
            "events_per_second_of_client_time": round(self._events / cpu),
            "events_per_second_with_the_worker_on_the_same_core": round(self._events / clock),
            "resident_mib": [round(m, 1) for m in self._memory],
        }


def measure_blocking(events: int) -> dict[str, Any]:
    """Consume a flood of events by `for`."""
    with launch(config(), command=flood(events)) as run:
        consumer = Consumer(events)
        for event in run:
            consumer.take(event)
        return consumer.figures()


def measure_asyncio(events: int) -> dict[str, Any]:
    """Consume a flood of events by `async for`."""

    async def work() -> dict[str, Any]:
        async with aio.launch(config(), command=flood(events)) as run:
            consumer = Consumer(events)
            async for event in run:
                consumer.take(event)
            return consumer.figures()

    return asyncio.run(work())


def config() -> dict[str, str]:
    """Give a config with a run folder of its own."""
    return {"model": "m", "data": "d", "run_dir": tempfile.mkdtemp()}


def measure_launch(command: list[str] | None, launches: int, **options: Any) -> dict[str, float]:
    """Time from `launch` to the first event, in ms."""
    times = []
    for _ in range(launches):
        began = time.perf_counter()
        with launch(config(), command=command, **options) as run:
            next(run)
            times.append(1000 * (time.perf_counter() - began))
            run.stop(save=False)
    return {"median_ms": round(statistics.median(times), 1), "worst_ms": round(max(times), 1)}


def stopping_script() -> list[dict[str, Any]]:
    """Give the script of a fake worker that waits for `stop`."""
    stopped = {"outcome": "stopped", "step": 0, "checkpoint": None}
    answer = {"answer": "stop", "result": stopped}
    return [{"hello": {}}, {"start": {}}, {"await": "stop"}, answer, {"finish": {**stopped, "reason": "stop"}}]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=500_000, help="of each flood; 0 leaves the floods out")
    parser.add_argument("--launches", type=int, default=20, help="of each worker; 0 leaves the launches out")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    if options.launches:
        figures["launch_fake_worker"] = measure_launch(fake_worker(stopping_script()), options.launches)
        scripted = ["--engine", "fake"]
        figures["launch_worker"] = measure_launch(None, options.launches, worker_args=scripted)
    if options.events:
        # Client and worker share one core, so that neither works while the other does.
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        figures["blocking"] = measure_blocking(options.events)
        figures["asyncio"] = measure_asyncio(options.events)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
