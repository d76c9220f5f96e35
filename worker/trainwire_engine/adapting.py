"""Gives a model its adapters: which layers get one, and of which kind."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from trainwire_engine.adapters import Adapter, DoRALinear, LoRAEmbedding, LoRALinear, LoRASwitchLinear
from trainwire_protocol.errors import ConfigInvalid, Unsupported


def attach(module: nn.Module, config: Any) -> tuple[list[str], dict[str, Any]]:
    """Freeze a module and give its blocks adapters; returns the adapted paths and mlx-lm's adapter config.

    Without `lora_keys` every linear layer of the blocks is adapted; a key is a path within a block
    (`self_attn.q_proj`) or within the model (`lm_head`). Raises ConfigInvalid for a key that fits nothing and
    Unsupported for a layer that the method cannot adapt.
    """
    module.freeze()
    mx.random.seed(config.seed)
    dora = config.method == "dora"
    rank, scale = config.lora_rank, config.lora_alpha / config.lora_rank
    blocks = list(module.layers)
    if config.lora_layers and config.lora_layers > len(blocks):
        raise ConfigInvalid(
            f"lora_layers = {config.lora_layers} is not allowed: the model has {len(blocks)} blocks.", key="lora_layers"
        )
    chosen = blocks[-config.lora_layers :] if config.lora_layers else blocks
    keys = set(config.lora_keys or _default_keys(blocks, dora))
    used: set[str] = set()

    def adapted(layer: nn.Module, key: str) -> nn.Module:
        used.add(key)
        if _is_experts(layer):
            kind: Any = LoRASwitchLinear
        elif isinstance(layer, nn.Embedding | nn.QuantizedEmbedding):
            kind = LoRAEmbedding
        elif isinstance(layer, nn.Linear | nn.QuantizedLinear):
            kind = DoRALinear if dora else LoRALinear
        elif not dora and hasattr(layer, "to_lora"):
            own: nn.Module = layer.to_lora(r=rank, scale=scale, dropout=config.lora_dropout)
            return own
        else:
            raise ConfigInvalid(
                f"lora_keys: {key} is a {type(layer).__name__}, which takes no adapter.", key="lora_keys"
            )
        if dora and kind is not DoRALinear:
            raise Unsupported(
                f"dora cannot adapt {key}, a {type(layer).__name__}.", hint='Use method = "lora", or other lora_keys.'
            )
        return kind(layer, rank, scale, config.lora_dropout)

    for root in (*chosen, module):
        found = [(path, adapted(layer, path)) for path, layer in root.named_modules() if path in keys]
        if found:
            root.update_modules(tree_unflatten(found))
    if missing := sorted(keys - used):
        known = ", ".join(sorted(_default_keys(blocks, dora)))
        raise ConfigInvalid(
            f"lora_keys: the model has no layer {missing[0]!r}.", hint=f"Its blocks have: {known}.", key="lora_keys"
        )
    paths = sorted(path for path, layer in module.named_modules() if _is_adapter(layer))
    draws = mx.random.split(mx.random.key(config.seed), len(paths))
    layers = dict(module.named_modules())
    for path, draw in zip(paths, draws):
        if isinstance(layers[path], Adapter):
            layers[path].initialize(draw)
    return paths, {
        "fine_tune_type": config.method,
        "num_layers": len(chosen),
        "lora_alpha": config.lora_alpha,
        "lora_parameters": {"rank": rank, "scale": scale, "dropout": config.lora_dropout, "keys": sorted(keys)},
    }


def _is_adapter(layer: nn.Module) -> bool:
    return "lora_a" in layer


def _is_experts(layer: nn.Module) -> bool:
    # By what it has, not by class: mlx_lm.models.switch_layers need not be imported for a model without experts.
    return hasattr(layer, "num_experts") and hasattr(layer, "input_dims") and "weight" in layer


def _default_keys(blocks: list[nn.Module], dora: bool) -> set[str]:
    linear = (nn.Linear, nn.QuantizedLinear)
    keys: set[str] = set()
    for block in blocks:
        for path, layer in block.named_modules():
            more = _is_experts(layer) or hasattr(layer, "to_lora") or isinstance(layer, nn.Embedding)
            if isinstance(layer, linear) or (more and not dora):
                keys.add(path)
    return keys
