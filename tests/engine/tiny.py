"""Tiny models with random weights in complete folders: config, weights, tokenizer and chat template."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from trainwire_engine.batches import Order
from trainwire_engine.feed import shapes_of_run
from trainwire_engine.loading import build_module
from trainwire_engine.palette import Palette
from trainwire_engine.shapes import CUDA
from trainwire_protocol.config import Config

FAMILIES = ("qwen3", "qwen3_5", "qwen3_5_moe", "llama", "gemma3_text", "lfm2")
VOCABULARY = 512

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}

_LINEAR_ATTENTION: dict[str, Any] = {
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}

_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}

_NO_BIAS: dict[str, Any] = {"attention_bias": False, "mlp_bias": False, "bias": False, "qkv_bias": False}
_SLIDING: dict[str, Any] = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}

_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "cohere2": {**_NO_BIAS, **_SLIDING, "sliding_window_pattern": 2, "layer_norm_bias": False, "layer_norm_eps": 1e-5},
    "ernie4_5": {"use_bias": False},
    "exaone4": {**_SLIDING, "sliding_window_pattern": "LG", "rope_scaling": None},
    "glm4": {"attention_bias": True, "partial_rotary_factor": 0.5},
    "gpt_oss": {**_SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite": {
        **_NO_BIAS,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
    },
    "helium": _NO_BIAS,
    "internlm3": _NO_BIAS,
    "mimo": {"num_nextn_predict_layers": 0},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo3": _SLIDING,
    "olmoe": _EXPERTS,
    "phi3": {"rope_scaling": None},
    "qwen2_moe": _EXPERTS,
    "qwen3_moe": {**_EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    "seed_oss": {**_NO_BIAS, "attention_out_bias": False},
    "smollm3": {"no_rope_layer_interval": 2},
    "stablelm": {
        "partial_rotary_factor": 0.25,
        "qk_layernorm": False,
        "layer_norm_eps": 1e-5,
        "use_qkv_bias": True,
    },
    "starcoder2": {"norm_epsilon": 1e-5},
    "llama": {"tie_word_embeddings": False},
    "gemma3_text": {"query_pre_attn_scalar": 8, "sliding_window": 16, "sliding_window_pattern": 2},
    "lfm2": {
        "norm_eps": 1e-6,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 32,
        "block_ff_dim": 64,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1],
    },
    "qwen3_5": _LINEAR_ATTENTION,
    "qwen3_5_moe": {**_LINEAR_ATTENTION, **_EXPERTS},
}


def tiny_config(family: str = "qwen3", **overrides: Any) -> dict[str, Any]:
    """The config.json of a tiny model: two blocks, 512 words, three orders of magnitude below a real one."""
    return {"model_type": family, **_COMMON, **_FAMILY.get(family, {}), **overrides}


def tiny_model(
    folder: Path,
    family: str = "qwen3",
    *,
    dtype: mx.Dtype = mx.float32,
    bits: int | None = None,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Make a folder that mlx-lm loads; `bits` packs the linear layers, `overrides` are keys of config.json."""
    config = tiny_config(family, **overrides)
    mx.random.seed(seed)
    module = build_module(config)
    module.update(
        tree_map(lambda p: p.astype(dtype) if mx.issubdtype(p.dtype, mx.floating) else p, module.parameters())
    )
    if family == "gemma3_text" and config["tie_word_embeddings"]:
        module.sanitize({})
    if bits:
        nn.quantize(module, group_size=32, bits=bits)
        config["quantization"] = {"group_size": 32, "bits": bits, "mode": "affine"}
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(module.parameters())), metadata={"format": "mlx"}
    )
    config["eos_token_id"] = write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def write_tokenizer(folder: Path) -> int:
    """Write a byte-level tokenizer with ChatML's marks and a chat template; returns the id of <|im_end|>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 16,
        special_tokens=[AddedToken(mark, special=True) for mark in marks],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words = "system user assistant the a run step update loss model weights is of and to in what does it says ."
    tokenizer.train_from_iterator([words] * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return int(tokenizer.token_to_id("<|im_end|>"))


class RandomRows:
    """A data set of random tokens in memory: lengths from `shortest` to `longest`, about half of them trained."""

    def __init__(self, count: int, *, shortest: int = 4, longest: int = 40, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        sizes = draw.integers(shortest, longest, endpoint=True, size=count)
        self._tokens = [draw.integers(3, VOCABULARY, size=size).astype(np.int32) for size in sizes]
        self._masks = [draw.random(size) < 0.5 for size in sizes]
        for mask in self._masks:
            mask[0], mask[-1] = False, True
        self.lengths = sizes.astype(np.int32)
        self.trained = np.array([mask.sum() for mask in self._masks], np.int32)

    def __len__(self) -> int:
        return len(self._tokens)

    def tokens(self, row: int) -> np.ndarray:
        return self._tokens[row]

    def mask(self, row: int) -> np.ndarray:
        return self._masks[row]

    def followed_by(self, others: RandomRows) -> RandomRows:
        """These rows and others behind them."""
        self._tokens += others._tokens
        self._masks += others._masks
        self.lengths = np.concatenate([self.lengths, others.lengths])
        self.trained = np.concatenate([self.trained, others.trained])
        return self


class ChatRows:
    """Rows of log-normal lengths, three quarters of each trained."""

    def __init__(self, count: int) -> None:
        drawn = np.random.default_rng(7).lognormal(5.4, 0.9, count)
        self.lengths = np.clip(drawn, 16, 1900).astype(int)
        self.trained = self.lengths - np.maximum(1, self.lengths // 4)

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, row: int) -> np.ndarray:
        return np.ones(self.lengths[row], np.int32)

    def mask(self, row: int) -> np.ndarray:
        mask = np.ones(self.lengths[row], bool)
        mask[: max(1, self.lengths[row] // 4)] = False
        return mask


def shapes_in_groups(rows: RandomRows, budget: int) -> Palette:
    """Shapes for short rows, in order and eight an update, whose attention works in several groups when packed."""
    assert CUDA.costs is not None
    run = Config(model="m", data="x", batch_size=8, micro_batch_tokens=budget, packing=True)
    close = replace(CUDA, costs=replace(CUDA.costs, tile=8, group=0, slot=10.0))
    palette = shapes_of_run(rows, Order(len(rows), 8, seed=0, shuffle=False), run, 10**6, device=close)
    assert isinstance(palette, Palette)
    return palette
