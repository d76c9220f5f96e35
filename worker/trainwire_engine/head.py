"""Where a model's blocks end and its head begins, found by trying and proved by comparing.

The loss needs the hidden states before the head, so that only trained positions go through it. mlx-lm's models
do not say where that is. Candidates are a child that has the blocks and a linear layer or embedding of the
vocabulary's size; a pair counts only if `head(body(x))` equals `model(x)` bit for bit on a few tokens. A model
that scales, caps or wraps its logits fails the comparison, and then the loss takes its full logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

BODY_NAMES = ("model", "transformer", "backbone", "language_model", "text_model", "decoder", "encoder")
PROBE_TOKENS = 8


@dataclass(frozen=True)
class Head:
    """A proved split: `hidden(tokens)` gives [rows, length, width], `logits(hidden)` the vocabulary's scores.

    `prefix` is the path of the layer that `logits` uses; trained weights under it belong to the head.
    """

    hidden: Callable[[mx.array], mx.array]
    logits: Callable[[mx.array], mx.array]
    layer: nn.Module
    prefix: str


def find_head(module: nn.Module) -> tuple[Head | None, str | None, mx.array]:
    """Return the proved split (or None with the reason) and the logits of the probe, [1, 8, vocabulary]."""
    tokens = mx.arange(1, PROBE_TOKENS + 1)[None]
    expected = module(tokens)
    mx.eval(expected)
    tried = 0
    for head in _candidates(module, expected.shape[-1]):
        tried += 1
        if _equals(head, tokens, expected):
            return head, None, expected
    reason = "its logits are scaled, capped or wrapped" if tried else "no layer of the vocabulary's size was found"
    return None, f"the head is not separable: {reason}", expected


def _equals(head: Head, tokens: mx.array, expected: mx.array) -> bool:
    try:
        hidden = head.hidden(tokens)
        if not isinstance(hidden, mx.array) or hidden.ndim != 3:
            return False
        logits = head.logits(hidden)
        return logits.shape == expected.shape and bool(mx.array_equal(logits, expected).item())
    except (TypeError, ValueError, AttributeError, IndexError, KeyError):
        return False


def _candidates(module: nn.Module, vocabulary: int) -> Iterator[Head]:
    for owner_path, owner in _owners(module):
        for name, body in owner.children().items():
            if not isinstance(body, nn.Module) or name not in BODY_NAMES:
                continue
            for path, layer in _vocabulary_layers(owner, vocabulary):
                logits = layer.as_linear if hasattr(layer, "as_linear") else layer
                yield Head(body, logits, layer, f"{owner_path}{path}")


def _owners(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The module itself and, for models wrapped in another one, its children."""
    yield "", module
    for name, child in module.children().items():
        if isinstance(child, nn.Module):
            yield f"{name}.", child


def _vocabulary_layers(owner: nn.Module, vocabulary: int) -> list[tuple[str, Any]]:
    layers = [
        (path, layer)
        for path, layer in owner.named_modules()
        if path and path.count(".") <= 2 and _rows(layer) == vocabulary
    ]
    # A linear head first: where both exist, the embedding is not tied.
    return sorted(layers, key=lambda item: hasattr(item[1], "as_linear"))


def _rows(layer: nn.Module) -> int | None:
    inner = layer.get("linear", layer.get("embedding", layer))
    weight = inner.get("weight") if isinstance(inner, nn.Module) else None
    return int(weight.shape[0]) if isinstance(weight, mx.array) and weight.ndim == 2 else None
