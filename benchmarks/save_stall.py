"""How long a save stops training: the snapshot in the loop, against a write that the loop waits for.

    python benchmarks/save_stall.py [--width 512] [--layers 8] [--vocabulary 16384] [--saves 5] [--folder DIR]

Prints for adapters and for a full model: size of a checkpoint, time of an update, of the save in the loop (the
stall), of a blocking save, and how much slower updates are while one is written behind them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engine"))

from scripted import ScriptedChannel, write_rows
from tiny import tiny_model

from trainwire_engine import native, saving
from trainwire_engine.loop import Parts, update
from trainwire_engine.prepare import prepare
from trainwire_engine.reports import Reports
from trainwire_protocol import channel as ch
from trainwire_protocol.config_load import build_config
from trainwire_protocol.rundir import checkpoint_name


def build(base: Path, model: Path, method: str) -> Parts:
    """The parts of a run that saves only when it is told."""
    import msgspec

    values: dict[str, Any] = {
        "model": str(model),
        "data": str(base / "train.jsonl"),
        "run_dir": str(base / f"run-{method}"),
        "cache_dir": str(base / "cache"),
        "method": method,
        "batch_size": 1,
        "num_epochs": 1000,
        "save_every": 0,
        "max_checkpoints": 1,
    }
    begin = ch.Begin(order=1, config=msgspec.to_builtins(build_config(values, base)), run_id="stall", attempt=1)
    channel: Any = ScriptedChannel(begin)
    return prepare(begin, channel, Reports(channel))


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1000


def step(parts: Parts) -> None:
    """One update, as the loop makes it."""
    state = parts.course.state
    if state.epoch_update >= parts.course.updates_per_epoch:
        state.next_epoch()
    measured, _ = update(parts)
    state.count(measured.loss, measured.tokens, skipped=measured.skipped)


def measure(parts: Parts, saves: int) -> dict[str, float]:
    """Medians in ms, sizes in MB."""
    alone, behind, stalls, blocking, writes = [], [], [], [], []
    for _ in range(2):
        step(parts)
    for _ in range(saves):
        alone += [timed(lambda: step(parts)) for _ in range(2)]
        target = saving.Target(checkpoint_name(parts.course.state.step), "periodic")
        started = time.perf_counter()
        stalls.append(timed(lambda target=target: parts.saves._behind([target])))
        while parts.saves.busy:
            behind.append(timed(lambda: step(parts)))
        parts.saves.settle()
        writes.append((time.perf_counter() - started) * 1000)
        step(parts)
        target = saving.Target(checkpoint_name(parts.course.state.step), "final")
        blocking.append(timed(lambda target=target: parts.saves.now(target)))
        step(parts)
    size = sum(file.stat().st_size for file in (parts.saves.newest or Path()).iterdir())
    return {
        "checkpoint MB": size / 1e6,
        "update ms": statistics.median(alone),
        "stall ms": statistics.median(stalls),
        "blocking save ms": statistics.median(blocking),
        "save behind ms": statistics.median(writes),
        "update while saving ms": statistics.median(behind) if behind else float("nan"),
        "stall / blocking": statistics.median(stalls) / statistics.median(blocking),
        "stall / update": statistics.median(stalls) / statistics.median(alone),
    }


def main() -> None:
    """Measure both kinds of checkpoints and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where checkpoints are written")
    options = parser.parse_args()
    native.prepare()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        base = Path(folder)
        write_rows(base / "train.jsonl", 32)
        tiny_model(
            base / "model",
            hidden_size=options.width,
            intermediate_size=4 * options.width,
            num_hidden_layers=options.layers,
            num_attention_heads=options.width // 64,
            num_key_value_heads=options.width // 64,
            head_dim=64,
            vocab_size=options.vocabulary,
        )
        for method in ("lora", "full"):
            figures = measure(build(base, base / "model", method), options.saves)
            print(f"{method}: " + ", ".join(f"{name} {value:.3g}" for name, value in figures.items()), flush=True)


if __name__ == "__main__":
    main()
