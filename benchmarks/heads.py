"""Compares the loss's head with the forms it replaces: all logits through `mx.fast.cross_entropy`, or mlx.nn's.

    python -m benchmarks.heads [--words 8192 151936] [--positions 1024] [--rounds 3]

Each round makes loss and gradients once by each form, in turn (A B C A B C); milliseconds are medians, memory is MLX's
peak above what is held. The forms agree to 1e-5 of the gradient's largest entry, or the command fails. Runs on
whatever device MLX has.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from trainwire_engine import native
from trainwire_engine.head import Head
from trainwire_engine.loss import head_sums

Form = Callable[[mx.array, dict[str, mx.array]], mx.array]


def forms(layer: nn.Embedding, targets: mx.array, *, trained: bool) -> dict[str, Form]:
    """The losses, summed, of hidden states [P, D] under a head's weights."""
    model: Any = SimpleNamespace(
        split=Head(lambda tokens: tokens, layer.as_linear, layer, "head"), vocab_size=layer.weight.shape[0]
    )
    batch = (targets, targets, targets, mx.ones(targets.shape))

    def logits(hidden: mx.array, head: dict[str, mx.array]) -> mx.array:
        return hidden @ (head["head.weight"] if trained else layer.weight).T

    def ours(hidden: mx.array, head: dict[str, mx.array]) -> mx.array:
        if trained:
            layer.weight = head["head.weight"]
        return head_sums(model, head if trained else {}, hidden, batch, smoothing=0.0, gradient=True)[0]

    return {
        "trainwire": ours,
        "mx.fast.cross_entropy": lambda hidden, head: mx.fast.cross_entropy(logits(hidden, head), targets).sum(),
        "nn.losses.cross_entropy": lambda hidden, head: nn.losses.cross_entropy(
            logits(hidden, head), targets, reduction="sum"
        ),
    }


def compare(words: int, width: int, positions: int, rounds: int, *, trained: bool) -> None:
    """Print a line for each form."""
    layer = nn.Embedding(words, width)
    weight = layer.weight
    hidden, targets = mx.random.normal((positions, width)), mx.random.randint(0, words, (positions,))
    mx.eval(weight, hidden, targets)
    milliseconds: dict[str, list[float]] = {}
    peaks: dict[str, float] = {}
    expected: mx.array | None = None
    for _ in range(rounds + 1):
        for name, form in forms(layer, targets, trained=trained).items():
            mx.clear_cache()
            mx.reset_peak_memory()
            held, began = mx.get_active_memory(), time.perf_counter()
            arguments = (0, 1) if trained else (0,)
            loss, gradients = mx.value_and_grad(form, argnums=arguments)(hidden, {"head.weight": weight})
            mx.eval(loss, gradients)
            milliseconds.setdefault(name, []).append(1000 * (time.perf_counter() - began))
            peaks[name] = (mx.get_peak_memory() - held) / 1e6
            layer.weight = weight
            found = gradients[0] if trained else gradients if isinstance(gradients, mx.array) else gradients[0]
            expected = found if expected is None else expected
            apart = float(mx.abs(found - expected).max() / mx.abs(expected).max())
            if apart > 1e-5:
                raise SystemExit(f"{name}: the gradient is {apart:.1e} apart")
            del loss, gradients, found
    fastest = statistics.median(milliseconds["trainwire"][1:])
    for name, all_of_them in milliseconds.items():
        median = statistics.median(all_of_them[1:])
        kind = "trained" if trained else "frozen"
        print(
            f"{words:>7,} × {width}, {positions:,} positions, {kind}: {name:<24} {median:8.1f} ms"
            f" ({median / fastest:4.2f}), peak {peaks[name]:8.1f} MB",
            flush=True,
        )


def main() -> None:
    """Compare the forms over the sizes that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, nargs="+", default=[8192, 151936])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    print(native.prepare().words)
    native.use_threads(native.cores())
    for words in chosen.words:
        for trained in (False, True):
            compare(words, chosen.width, chosen.positions, chosen.rounds, trained=trained)


if __name__ == "__main__":
    main()
