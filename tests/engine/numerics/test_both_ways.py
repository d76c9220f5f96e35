"""The numerics without what a machine may lack: a fast BLAS, and a compiler for MLX's fused CPU kernels.

All other tests have both, where there are both.
"""

from __future__ import annotations

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


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere MLX has one BLAS and needs no compiler")
def test_what_is_exact_here_is_exact_on_mlxs_own_blas_and_without_a_compiler(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"),
            *("-k", CHOSEN, *(str(HERE / file) for file in CASES)),
        ],
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path[1:]),
            "PATH": str(empty),
            "TMPDIR": str(empty),
            "TRAINWIRE_TEST_BLAS": "none",
        },
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
