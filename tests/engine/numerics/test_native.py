"""The BLAS under MLX: exchanged in a process of its own, exact, and never a surprise."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainwire_engine import native, relocations
from trainwire_protocol.config import Config

linux = pytest.mark.skipif(sys.platform != "linux", reason="macOS computes with Accelerate")
openblas = pytest.mark.skipif(
    importlib.util.find_spec("scipy_openblas32") is None, reason="the package scipy-openblas32 is not installed"
)

TRAIN = """
import json, sys
from trainwire_engine import native
computing = native.prepare(sys.argv[1])
import numpy as np
from tiny import RandomRows
from trainwire_engine.batches import plan
from trainwire_engine.model import load_model
from trainwire_engine.optimizer import Optimizer
from trainwire_engine.step import UpdateStep
from trainwire_protocol.config import Config
config = Config(model=sys.argv[2], data="unused", optimizer="sgd")
model = load_model(config)
step = UpdateStep(model, Optimizer(config), config)
rows = RandomRows(8)
results = [step(plan(rows, list(range(8)), 128), step=n, learning_rate=0.05, max_grad_norm=1.0) for n in range(3)]
print(json.dumps([computing.blas, computing.path, [(r.loss, r.grad_norm) for r in results]]))
"""


def train(blas: str, folder: Path) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, blas, str(folder)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path[1:]])},
        check=True,
    )
    return json.loads(done.stdout)


@linux
@openblas
def test_training_gives_the_same_numbers_on_another_blas(
    config: Callable[..., Config], tiny: Callable[..., Path]
) -> None:
    own, path, losses = train("none", tiny("qwen3"))
    assert (own, path) == ("MLX's own", None)
    fast, library, others = train("auto", tiny("qwen3"))
    assert fast.startswith("OpenBLAS")
    assert "openblas" in library
    for (loss, norm), (other, its_norm) in zip(losses, others):
        assert loss == pytest.approx(other, abs=1e-5)
        assert norm == pytest.approx(its_norm, rel=1e-5)


LIKE = """
import sys
from trainwire_engine import native
before = native.Native(sys.argv[1], sys.argv[2] or None, 5)
found = native.prepare_like(before)
print(found.blas, found.path, found.lanes, native.lanes(), native.prepare().lanes == native.cores(), sep="|")
"""


def prepared_like(blas: str, path: str) -> list[str]:
    command = [sys.executable, "-c", LIKE, blas, path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    return done.stdout.strip().split("|")


@linux
@openblas
def test_a_resume_computes_with_the_library_and_the_lanes_of_its_checkpoint() -> None:
    blas, path, *_ = prepared_like("another library", "/nowhere/libblas.so")
    assert blas.startswith("OpenBLAS"), "a library that is gone gives way to the one that is there"
    assert prepared_like("MLX's own", "") == ["MLX's own", "None", "5", "5", "True"]
    assert prepared_like(blas, path) == [blas, path, "5", "5", "True"]
    moved = prepared_like(blas, "/moved/libscipy_openblas.so")
    assert moved == [blas, path, "5", "5", "True"], "the same library in another place is as good"


@linux
def test_a_library_without_the_routines_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="libm"):
        native.prepare("libm.so.6")
    with pytest.raises(ValueError, match="nowhere"):
        native.prepare("/nowhere/libblas.so")


@linux
@openblas
def test_a_library_that_computes_something_else_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = relocations.find_slots()
    before = {name: relocations.read_slot(slot) for name, slot in slots.items()}
    monkeypatch.setattr(native, "_computes", lambda: False)
    assert native.prepare().blas == "MLX's own"
    assert {name: relocations.read_slot(slot) for name, slot in slots.items()} == before


GIVEN_BACK = """
import os
from pathlib import Path
from trainwire_engine import memory, native
native.prepare("none")
import mlx.core as mx
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
before = resident()
blocks = [mx.ones((2**20,)) for _ in range(64)]
mx.eval(blocks)
held = resident()
del blocks
memory.clear_cache()
print(held - before, resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is told to keep memory on glibc alone")
def test_a_cleared_cache_goes_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", GIVEN_BACK], capture_output=True, text=True, timeout=120, check=True)
    held, left = map(int, done.stdout.split())
    assert held >= 2**28
    assert left < 2**26


def test_an_allocator_that_refuses_the_largest_threshold_gets_the_one_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def old(name: str, option: int, value: int) -> int:
        accepted = option != -3 or value <= 2**25
        if accepted:
            taken.append((option, value))
        return int(accepted)

    monkeypatch.setattr(native, "_glibc", old)
    native._keep_memory()
    assert taken == [(-3, 2**25), (-1, 2**31 - 1), (-8, 1)]
