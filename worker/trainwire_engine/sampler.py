"""Makes answers token by token: the one place where a model is asked what comes next."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Generator, Sequence
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from trainwire_engine.batches import mix
from trainwire_engine.model import Model

_PREFILL = 512
"""Prompt tokens that go through the model at once."""


def answer_tokens(
    model: Model,
    prompts: Sequence[Sequence[int]],
    eos_ids: Collection[int],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    adapter: bool = True,
) -> Generator[list[int | None], None, None]:
    """Go through the prompts and give, token by token, the next one of each answer, without the end marks.

    None stands for an answer that has ended. Nothing but None is a part of a prompt that is through: a moment to
    give way. Each prompt goes through the model by itself; the answers are made together where the model's caches
    can be joined, and one after another where they cannot.
    """

    def through(parts: Sequence[Sequence[int]], cache: list[Any]) -> mx.array:
        # What happens while this waits may use the model too: an evaluation during a pause, another answer.
        with nullcontext(model.module) if adapter else model.adapter_disabled() as module:
            if not cache:
                cache.extend(_new_cache(module))
            logits: mx.array = module(mx.array([list(part) for part in parts]), cache=cache)[:, -1]
            mx.eval(logits if len(parts[0]) == 1 else (), [layer.state for layer in cache])
        return logits

    nothing: list[int | None] = [None] * len(prompts)
    yield nothing
    caches: list[list[Any]] = [[] for _ in prompts]
    for ids, cache in zip(prompts, caches, strict=True):
        for start in range(0, len(ids) - 1, _PREFILL):
            through([ids[start : min(start + _PREFILL, len(ids) - 1)]], cache)
            yield nothing
    for group, cache in _joined(caches):
        last = {row: prompts[row][-1] for row in group}
        for number in range(max_tokens):
            logits = through([[token] for token in last.values()], cache).astype(mx.float32)
            chosen = _chosen(logits, temperature, mix(seed, number))
            going = [place for place, token in enumerate(chosen) if token not in eos_ids]
            last = {list(last)[place]: chosen[place] for place in going}
            if not last:
                break
            if len(going) < len(chosen):
                for layer in cache:
                    layer.filter(mx.array(going))
            yield [last.get(row) for row in range(len(prompts))]


def _joined(caches: list[list[Any]]) -> list[tuple[list[int], list[Any]]]:
    """Give the rows that are answered together, with their common cache."""
    kinds = [type(layer) for layer in caches[0]]
    if len(caches) == 1 or not all(caches) or not all(hasattr(kind, "merge") for kind in kinds):
        return [([row], cache) for row, cache in enumerate(caches)]
    together = [kind.merge(list(layers)) for kind, *layers in zip(kinds, *caches, strict=True)]
    return [(list(range(len(caches))), together)]


def _chosen(logits: mx.array, temperature: float, seed: int) -> list[int]:
    if temperature == 0:
        return [int(token) for token in np.array(mx.argmax(logits, axis=-1))]
    key = mx.random.key(seed)
    # Row by row: a draw does not depend on how many there are.
    return [int(mx.random.categorical(row / temperature, key=key)) for row in logits]


def _new_cache(module: nn.Module) -> list[Any]:
    if hasattr(module, "make_cache"):
        return list(module.make_cache())
    kinds = importlib.import_module("mlx_lm.models.cache")
    return [kinds.KVCache() for _ in module.layers]
