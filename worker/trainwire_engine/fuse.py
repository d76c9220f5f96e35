"""Puts a checkpoint's adapters into the weights of its base model, in float32, and measures what packing loses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from trainwire_engine.unpacking import dense

Arrays = dict[str, mx.array]


@dataclass(frozen=True)
class FuseReport:
    """How far packing moved the fused weights: |packed - fused| over |fused - base|, the worst layer named.

    0 loses nothing; at 1 the rounding is as large as what was trained. `worst` is None for an unpacked base.
    """

    mean: float = 0.0
    worst: float = 0.0
    worst_layer: str | None = None


def split_adapters(tensors: Arrays) -> dict[str, Arrays]:
    """Sort adapter tensors by the layer they belong to: path → {lora_a, lora_b, m}."""
    layers: dict[str, Arrays] = {}
    for name, value in tensors.items():
        path, leaf = name.rsplit(".", 1)
        layers.setdefault(path, {})[leaf] = value.astype(mx.float32)
    return layers


def fused_weight(weight: mx.array, adapter: Arrays, scale: float, *, embedding: bool) -> mx.array:
    """Give W + scale · B A in float32; with a magnitude `m` (DoRA) its rows get that length."""
    a, b = adapter["lora_a"], adapter["lora_b"]
    if a.ndim == 3:
        update = b @ a
    else:
        update = a @ b if embedding else b.T @ a.T
    fused = weight.astype(mx.float32) + scale * update
    if "m" in adapter:
        fused = fused * (adapter["m"] / mx.linalg.norm(fused, axis=-1))[:, None]
    return fused


def fuse(module: nn.Module, tensors: Arrays, scale: float, *, unpack: bool) -> FuseReport:
    """Replace the weights of the adapted layers of a base module.

    A packed layer is packed again as it was, or with `unpack` becomes a plain one; see `unpack_all` for the rest.
    """
    layers = dict(module.named_modules())
    losses: dict[str, float] = {}
    for path, adapter in split_adapters(tensors).items():
        layer = layers[path]
        base = dense(layer)
        fused = fused_weight(base, adapter, scale, embedding=isinstance(layer, nn.Embedding | nn.QuantizedEmbedding))
        if "scales" in layer and not unpack:
            how: dict[str, Any] = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
            packed = mx.quantize(fused.astype(base.dtype), **how)
            layer.weight, layer.scales = packed[0], packed[1]
            if len(packed) > 2:
                layer.biases = packed[2]
            moved = mx.linalg.norm(dense(layer).astype(mx.float32) - fused)
            trained = mx.linalg.norm(fused - base.astype(mx.float32))
            share: Any = (moved / mx.maximum(trained, 1e-12)).item()
            losses[path] = share
        elif "scales" in layer:
            unpack_layer(module, path, layer, fused.astype(layer.scales.dtype))
        else:
            layer.weight = fused.astype(layer.weight.dtype)
        mx.eval(layer.parameters())
    if not losses:
        return FuseReport()
    worst = max(losses, key=lambda path: losses[path])
    return FuseReport(sum(losses.values()) / len(losses), losses[worst], worst)


def unpack_layer(module: nn.Module, path: str, layer: nn.Module, weight: mx.array) -> None:
    """Put a plain layer with `weight` where a packed one was."""
    plain: nn.Module
    if isinstance(layer, nn.QuantizedEmbedding):
        plain = nn.Embedding(1, 1)
    else:
        plain = nn.Linear(1, 1, bias="bias" in layer)
        if "bias" in layer:
            plain.bias = layer.bias
    plain.weight = weight
    module.update_modules(_nested(path, plain))


def unpack_all(module: nn.Module) -> None:
    """Make every packed linear layer and embedding a plain one, in the dtype of its scales."""
    for path, layer in module.named_modules():
        if isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding):
            unpack_layer(module, path, layer, dense(layer).astype(layer.scales.dtype))


def _nested(path: str, module: nn.Module) -> Any:
    from mlx.utils import tree_unflatten

    return tree_unflatten([(path, module)])
