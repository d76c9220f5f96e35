"""What each of the CPU's settings is worth: the BLAS under MLX, glibc's allocator, kernels for this very processor.

    python -m benchmarks.settings [--model tiny] [--method lora] [--updates 8] [--rounds 2] [--folder FOLDER]

The same updates with the engine's parts alone, in turn: as trainwire sets the process up; with MLX's own BLAS; with
glibc as it is; and with a compiler in front on the PATH that adds `-march=native` to the kernels that MLX compiles at
run time (`native-kernels`; its first, compiling run is not counted). Prints trained tokens per second, the ratio to
the first, and how far the losses part.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.arguments import folder_of, parser
from benchmarks.inputs import make_model, make_rows
from benchmarks.sides import BATCH, Job, Training, alone


def main() -> None:
    """Measure and print one line of JSON for each setting."""
    words = parser(__doc__, model="tiny", updates=8, rounds=2)
    words.add_argument("--method", default="lora")
    chosen = words.parse_args()
    with folder_of(chosen) as folder, tempfile.TemporaryDirectory(prefix="trainwire-bench-") as temporary:
        model = make_model(chosen.model, folder)
        rows = make_rows(folder / "rows-settings", BATCH * chosen.updates, 400)
        job = Job(model, rows, folder / "settings", chosen.method)
        settings: dict[str, tuple[list[str], dict[str, str]]] = {
            "as-set-up": ([], {}),
            "mlx-blas": (["--blas", "none"], {}),
            "plain-allocator": (["--plain-allocator"], {}),
        }
        if compiler := shutil.which("g++"):
            settings["native-kernels"] = ([], _native_compiler(Path(temporary), compiler))
        runs: dict[str, list[Training]] = {name: [] for name in settings}
        for number in range(chosen.rounds + 1):
            for name, (options, environment) in settings.items():
                run = alone(job, chosen.updates, *options, **environment)
                if number:
                    runs[name].append(run)
        for name, found in runs.items():
            print(json.dumps(_line(name, found, runs["as-set-up"], chosen.updates)), flush=True)


def _native_compiler(folder: Path, compiler: str) -> dict[str, str]:
    """Put a compiler in front that adds the flag; MLX keeps its kernels under TMPDIR."""
    wrapper = folder / "bin" / "g++"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {compiler} -march=native "$@"\n')
    wrapper.chmod(0o755)
    (folder / "kernels").mkdir()
    return {"PATH": f"{wrapper.parent}{os.pathsep}{os.environ['PATH']}", "TMPDIR": str(folder / "kernels")}


def _line(name: str, found: list[Training], first: list[Training], updates: int) -> dict[str, Any]:
    rate, base = (statistics.median(run.rate(updates) for run in side) for side in (found, first))
    apart = max(abs(a - b) / b for a, b in zip(found[0].losses, first[0].losses))
    return {"setting": name, "tokens_per_second": round(rate, 1), "ratio": round(rate / base, 3), "losses_apart": apart}


if __name__ == "__main__":
    main()
