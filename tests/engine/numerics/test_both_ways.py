"""The numerics with and without what a machine may lack: a fast BLAS, and a compiler for MLX's fused CPU kernels."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASES = {
    "test_cpu_ops.py": "not memory",
    "test_loss.py": "plain_form",
    "test_gradients.py": "plain_form and (lora or full)",
    "test_optimizer.py": "decay or refused or lion or muon",
    "test_step.py": "every_split and (qwen3-lora or qwen3-full or packed)",
}
CHOSEN = " or ".join(f"({file} and ({chosen}))" for file, chosen in CASES.items())
RUN = """
import sys
from trainwire_engine import native
found = native.prepare(sys.argv[1])
assert (found.path is None) == (sys.argv[1] == "none"), found
import pytest
sys.exit(pytest.main(["-q", "-p", "no:xdist", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


def run(blas: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, blas, "-k", CHOSEN, *(str(HERE / file) for file in CASES)],
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[1:]), **environment},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.skipif(
    sys.platform != "linux" or importlib.util.find_spec("scipy_openblas32") is None,
    reason="there is no other BLAS here that MLX can compute with",
)
def test_what_is_exact_on_mlxs_own_blas_is_exact_on_another() -> None:
    run("auto")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere MLX needs no compiler")
def test_what_is_exact_with_fused_kernels_is_exact_without_a_compiler(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    run("none", PATH=str(empty), TMPDIR=str(empty))
