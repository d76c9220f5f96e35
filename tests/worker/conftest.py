"""Starts workers for a test, and ends them after it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from worker_driver import Spawn, Worker

from trainwire_protocol.rundir import lock_holder


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Spawn]:
    """Start workers that wait for a `start` command: `serve(*words, script=…, config=…)`."""
    yield from _spawner(tmp_path, "serve")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Spawn]:
    """Start workers with a config file: `run(*words, script=…, config=…)`."""
    yield from _spawner(tmp_path, "run")


def _spawner(folder: Path, mode: str) -> Iterator[Spawn]:
    workers: list[Worker] = []

    def spawn(*words: str, **settings: Any) -> Worker:
        workers.append(Worker(folder, mode, *words, **settings))
        return workers[-1]

    yield spawn
    for worker in workers:
        worker.clean()
        holder = lock_holder(worker.run_dir)
        if holder is not None and holder.engine_pid:
            with suppress(OSError):
                os.kill(holder.engine_pid, signal.SIGKILL)
