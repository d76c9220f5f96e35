"""Makes the updates of a config with the engine's parts alone: no worker, no reports, no checkpoints.

    python -m benchmarks.alone CONFIG.toml [--blas auto|none|PATH] [--plain-allocator]

Prints a line of JSON for each update: its time since the epoch, trained tokens and loss.
"""

from __future__ import annotations

import argparse
import json
import time
import tomllib
from pathlib import Path


def main() -> None:
    """Train, and print what each update did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--blas", default="auto")
    parser.add_argument("--plain-allocator", action="store_true", help="leave glibc's settings as they are")
    chosen = parser.parse_args()
    from trainwire_engine import native

    if chosen.plain_allocator:
        native._keep_memory = lambda: None
    native.prepare(chosen.blas)
    import mlx.core as mx

    from trainwire_engine import memory
    from trainwire_engine.batches import Order, plan
    from trainwire_engine.data import load_dataset
    from trainwire_engine.model import load_model
    from trainwire_engine.optimizer import Optimizer
    from trainwire_engine.step import UpdateStep
    from trainwire_engine.tokenizer import Tokenizer
    from trainwire_protocol.config_load import build_config

    config = build_config(tomllib.loads(chosen.config.read_text()), chosen.config.parent)
    memory.configure()
    model = load_model(config)
    tokenizer = Tokenizer.from_folder(Path(config.model), config.chat_template, config.chat_template_args, None)
    dataset = load_dataset(config, tokenizer, "train", lambda *_: None, model.vocab_size, [])
    assert dataset is not None
    order = Order(len(dataset), config.batch_size, config.seed, config.shuffle)
    budget = memory.default_micro_batch_tokens(model.model_config, config.method, config.max_seq_length)
    step = UpdateStep(model, Optimizer(config), config)
    for update in range(config.max_steps or 0):
        batches = plan(dataset, order.rows(0, update), budget)
        rate = config.learning_rate or 0.0
        result = step(batches, step=update + 1, learning_rate=rate, max_grad_norm=None)
        told = {"time": time.time(), "tokens": result.tokens, "loss": result.loss, "peak": mx.get_peak_memory()}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
