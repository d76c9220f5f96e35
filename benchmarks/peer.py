"""Runs the real `mlx_lm.lora` and reports each of its updates as a line of JSON.

    python -m benchmarks.peer stock|BLAS_THREADS LORA_ARGUMENTS…

Its own command line, model, data set, batches and loop, with three things beside: a callback that prints what it is
told; its batches in the order of the file, so that both sides take the same rows in the same update; and, unless
`stock`, the BLAS that trainwire would use, with so many threads.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main(arguments: list[str]) -> None:
    """Train as `mlx_lm.lora` with these arguments does."""
    if arguments[0] != "stock":
        from trainwire_engine import native

        native.prepare()
        native.use_threads(int(arguments[0]))
    import numpy as np
    from mlx_lm import lora
    from mlx_lm.tuner.callbacks import TrainingCallback

    class Reporter(TrainingCallback):
        def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
            print("UPDATE " + json.dumps({"time": time.time(), **train_info}), flush=True)

    lora.get_reporting_callbacks = lambda *_, **__: Reporter()
    np.random.permutation = np.arange
    sys.argv = ["mlx_lm.lora", *arguments[1:]]
    lora.main()


if __name__ == "__main__":
    main(sys.argv[1:])
