"""Runs the real `mlx_lm.lora` and reports each of its updates as a line of JSON.

    python -m benchmarks.peer stock|BLAS_THREADS LORA_ARGUMENTS…

Its own command line, model, data set, batches and loop. What is changed is what the comparison needs to be one: a
callback prints what it is told; the batches come in the order of the file, so that both sides take the same rows in
the same update; its loss leaves out the place behind the end of a padded row, which it would count as trained; with
`--fine-tune-type full` every weight is trained, where its own command leaves embedding, head and last norm frozen;
adapters begin with the numbers that trainwire draws; and, unless `stock`, it has the BLAS that trainwire would use,
with so many threads.
"""

from __future__ import annotations

import json
import math
import sys
import time
from typing import Any

from benchmarks.sides import SEED


def main(arguments: list[str]) -> None:
    """Train as `mlx_lm.lora` with these arguments does."""
    if arguments[0] != "stock":
        from trainwire_engine import native

        native.prepare()
        native.use_threads(int(arguments[0]))
    import mlx.core as mx
    import numpy as np
    from mlx_lm import lora
    from mlx_lm.tuner.callbacks import TrainingCallback
    from mlx_lm.tuner.trainer import default_loss, train

    class Reporter(TrainingCallback):
        def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
            print("UPDATE " + json.dumps({"time": time.time(), **train_info}), flush=True)

    def loss(model: Any, batch: mx.array, lengths: mx.array) -> Any:
        return default_loss(model, batch, lengths - mx.array([0, 1]))

    def train_alike(model: Any, **parts: Any) -> None:
        if arguments[arguments.index("--fine-tune-type") + 1] == "full":
            model.unfreeze()
        else:
            draw_adapters(model, mx)
        train(model=model, loss=loss, **parts)

    lora.train = train_alike
    lora.get_reporting_callbacks = lambda *_, **__: Reporter()
    np.random.permutation = np.arange
    sys.argv = ["mlx_lm.lora", *arguments[1:]]
    lora.main()


def draw_adapters(model: Any, mx: Any) -> None:
    """Let adapters begin as trainwire's do, as `adapters.attach` draws them."""
    layers = dict(model.named_modules())
    paths = sorted(path for path, layer in layers.items() if "lora_a" in layer)
    for path, key in zip(paths, mx.random.split(mx.random.key(SEED), len(paths))):
        bound = 1 / math.sqrt(layers[path].lora_a.shape[0])
        layers[path].lora_a = mx.random.uniform(-bound, bound, layers[path].lora_a.shape, key=key)


if __name__ == "__main__":
    main(sys.argv[1:])
