"""Measures how an update's time and memory grow with one thing at a time, and draws it.

    python -m benchmarks.growth [--parts lengths batch vocabulary depth updates events] [--output growth.json]
    python -m benchmarks.growth --draw growth.json [scale.json] --into FOLDER

Each point is a process of its own on one core: a small Qwen3 with random weights, LoRA, made-up rows. Seconds are those
of one update after another one, by the clock and of the core, the fewest of three where they are short; peak memory is
MLX's, above what model and optimizer hold. `updates` trains 1,000 updates of rows of mixed lengths and looks at the
memory on the way; `events` sends steps through the worker from an engine that has them ready. `scale.json` is what
`python benchmarks/data.py --scale … --output` wrote about rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.sides import environment

SMALL: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 65536, "rope_theta": 1000000.0, "tie_word_embeddings": True,
}  # fmt: skip
WIDE = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "head_dim": 64}

Point = dict[str, Any]

PARTS: dict[str, list[Point]] = {
    "lengths": [{"at": n, "rows": 1, "length": n} for n in (512, 1024, 2048, 4096, 8192, 16384, 32768)],
    "batch": [{"at": n, "rows": n, "length": 128, "model": WIDE} for n in (1, 2, 4, 8, 16, 32, 64, 128)],
    "vocabulary": [
        {"at": n, "rows": 8, "length": 64, "model": {**WIDE, "vocab_size": n}}
        for n in (512, 2048, 8192, 32768, 131072, 262144)
    ],
    "depth": [
        {"at": n, "rows": 8, "length": 128, "model": {**WIDE, "num_hidden_layers": n}} for n in (2, 4, 8, 16, 32)
    ],
    "updates": [{"at": 1000, "rows": 8, "length": 256}],
    "events": [{"at": n} for n in (1000, 10_000, 100_000, 1_000_000)],
}
MOST = 2048
"""Padded tokens of a micro-batch."""
SHORT = 10.0
"""Seconds up to which an update is made more than twice."""


def measure(point: Point) -> Point:
    """Make the updates of a point in this process; with `updates` many of them."""
    from trainwire_engine import memory, native

    # One core: threads that wait for each other in loops would measure what else the machine does.
    computing = native.prepare(lanes=1)
    memory.configure()
    import mlx.core as mx

    from trainwire_engine.batches import plan
    from trainwire_engine.model import load_model
    from trainwire_engine.optimizer import Optimizer
    from trainwire_engine.step import UpdateStep
    from trainwire_protocol.config import Config

    with tempfile.TemporaryDirectory(prefix="trainwire-growth-") as name:
        settings = Config(model=str(_model(Path(name), point)), data="made up", learning_rate=1e-4)
        model = load_model(settings)
    step = UpdateStep(model, Optimizer(settings), settings)
    model.release()
    rows = _Rows(point["rows"], point["length"], model.vocab_size, mixed=point["part"] == "updates")

    def update(number: int) -> tuple[float, float]:
        chosen = [number * point["rows"] + i for i in range(point["rows"])]
        began, used = time.perf_counter(), time.process_time()
        step(plan(rows, chosen, MOST), step=number, learning_rate=1e-4, max_grad_norm=1.0)
        return time.perf_counter() - began, time.process_time() - used

    if point["part"] == "updates":
        return {"blas": computing.words, "samples": _samples(update, point["at"], memory)}
    times = [update(1)]
    held = memory.figures(reset_peak=True).active
    mx.clear_cache()
    mx.reset_peak_memory()
    while len(times) < 4 and (len(times) < 2 or sum(seconds for seconds, _ in times) < SHORT):
        times.append(update(1 + len(times)))
    peak = memory.figures().peak - held
    seconds, used = (min(figures) for figures in zip(*times[1:]))
    return {
        "blas": computing.words,
        "seconds": seconds,
        "core_seconds": used,
        "peak_bytes": peak,
        "held_bytes": held,
    }


def _samples(update: Any, count: int, memory: Any) -> list[Point]:
    samples = []
    for number in range(1, count + 1):
        update(number)
        if number % (count // 20) == 0:
            now = memory.figures(reset_peak=True)
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            samples.append(
                {"update": number, "active": now.active, "cache": now.cache, "peak": now.peak, "resident": resident}
            )
    return samples


def _model(folder: Path, point: Point) -> Path:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from trainwire_engine.loading import build_module

    config = {**SMALL, **point.get("model", {})}
    (folder / "config.json").write_text(json.dumps(config))
    mx.random.seed(0)
    weights = dict(tree_flatten(build_module(config).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


class _Rows:
    """As many rows of random tokens as asked for, each trained in its second half."""

    def __init__(self, rows: int, length: int, vocabulary: int, *, mixed: bool) -> None:
        self._rows, self._length, self._vocabulary, self._mixed = rows, length, vocabulary, mixed

    def tokens(self, row: int) -> Any:
        import numpy as np

        return np.random.default_rng(row).integers(0, self._vocabulary, self._size(row) + 1).astype(np.int32)

    def mask(self, row: int) -> Any:
        import numpy as np

        size = self._size(row)
        return np.arange(size + 1) > size // 2

    def _size(self, row: int) -> int:
        return 16 + row * 37 % (self._length - 16) if self._mixed else self._length


def events(count: int) -> Point:
    """Send so many steps through a worker to a reader that takes them all; seconds from `init` to `complete`."""
    from benchmarks.wire_worker import FED, SOURCE, Worker

    with tempfile.TemporaryDirectory(prefix="trainwire-growth-") as name:
        folder = Path(name)
        (folder / "source.py").write_text(SOURCE)
        code = FED.format(source=str(folder / "source.py"), count=str(count))
        worker = Worker(folder / "run", "run", {}, python=["-c", code])
        worker.wait(b'{"type":"init"')
        before, resident, seconds = time.perf_counter(), 0.0, 0.0
        assert worker.process.stdout is not None
        while data := os.read(worker.process.stdout.fileno(), 1 << 20):
            if b'{"type":"complete"' in data:
                seconds, resident = time.perf_counter() - before, worker.resident_mb() * 1e6
        worker.process.wait()
    return {"seconds": seconds, "events_per_second": count / seconds, "resident_bytes": resident}


def one(part: str, point: Point) -> Point:
    """Measure a point in a new process."""
    command = [sys.executable, "-m", "benchmarks.growth", "--point", json.dumps({**point, "part": part})]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=True)
    found: Point = {"at": point["at"], **json.loads(done.stdout.splitlines()[-1])}
    return found


def line(part: str, found: Point) -> str:
    """Say what was found, on one line."""
    if part == "updates":
        first, last = found["samples"][0], found["samples"][-1]
        return "updates: " + ", ".join(
            f"{key} {first[key] / 1e6:.1f} MB after {first['update']}, {last[key] / 1e6:.1f} MB after {last['update']}"
            for key in ("active", "cache", "peak", "resident")
        )
    if part == "events":
        rate, resident = found["events_per_second"], found["resident_bytes"]
        return f"events {found['at']:>9,}: {rate:,.0f} a second, {resident / 1e6:.0f} MB"
    seconds, used, peak = found["seconds"], found["core_seconds"], found["peak_bytes"]
    return (
        f"{part} {found['at']:>9,}: {1000 * seconds:,.1f} ms, {1000 * used:,.1f} of the core, peak {peak / 1e6:,.1f} MB"
    )


def main() -> None:
    """Measure the parts that were asked for, or draw what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--output", type=Path, help="a JSON file, which keeps the parts that are not measured now")
    parser.add_argument(
        "--draw", type=Path, nargs="+", metavar="FILE", help="growth.json and, if there is one, scale.json"
    )
    parser.add_argument("--into", type=Path, default=Path(), help="where the pictures go")
    parser.add_argument("--point", type=json.loads, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.point:
        point = chosen.point
        print(json.dumps(events(point["at"]) if point["part"] == "events" else measure(point)))
        return
    if chosen.draw:
        from benchmarks.growth_pictures import draw

        for file in draw([json.loads(path.read_text()) for path in chosen.draw], chosen.into):
            print(file)
        return
    kept = json.loads(chosen.output.read_text()) if chosen.output and chosen.output.is_file() else {}
    for part in chosen.parts:
        kept[part] = []
        for point in PARTS[part]:
            kept[part].append({**one(part, point), "load": round(os.getloadavg()[0], 1)})
            print(line(part, kept[part][-1]), flush=True)
            if chosen.output:
                chosen.output.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
