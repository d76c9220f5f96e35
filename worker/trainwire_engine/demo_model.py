"""The small model of `trainwire demo`: a tokenizer of its own and random weights, made on the spot.

`python -m trainwire_engine.demo_model OUT_FOLDER [ROWS]` makes the folder, or leaves a whole one as it is. ROWS is the
chat file whose text the tokenizer is trained on; without it, the one that comes with `trainwire_cli`.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from trainwire_engine.failures import tell
from trainwire_engine.model_folder import make_once, write_json
from trainwire_protocol.errors import DatasetInvalid, TrainwireError

SEED = 7

VOCABULARY = 1024
"""Tokens, the 256 bytes and the four marks included: large enough that most words of the text are one or two."""

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
"""Small enough to learn a few hundred rows in about a minute where matrix products are slow."""

END, SYSTEM, USER, ASSISTANT = MARKS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

RECIPE = 1
"""Counts up when this module makes something else from the same rows, so that older folders are made again."""


def make(folder: Path, rows: Path) -> bool:
    """Make the model folder for a chat file, unless it is there and whole; True if it was made now."""
    try:
        content = rows.read_bytes()
        texts = [message["content"] for line in content.splitlines() for message in json.loads(line)["messages"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DatasetInvalid(f"{rows} is no file of chat rows: {error}.", path=str(rows)) from error
    key = f"demo-{RECIPE}-{hashlib.sha256(content).hexdigest()}"
    return make_once(folder, key, lambda aside: _write(aside, texts))


def _write(folder: Path, texts: list[str]) -> None:
    backend = train_tokenizer(texts)
    vocabulary = backend.get_vocab_size()
    end = backend.token_to_id(END)
    backend.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": END,
            "additional_special_tokens": list(MARKS),
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONFIG["max_position_embeddings"],
        },
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    write_json(folder / "config.json", {**CONFIG, "vocab_size": vocabulary, "eos_token_id": end, "pad_token_id": end})
    _save_weights(folder / "model.safetensors", vocabulary)


def train_tokenizer(texts: list[str]) -> Any:
    """Train a byte-level BPE `tokenizers.Tokenizer` on the texts; the marks are its first tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def _save_weights(path: Path, vocabulary: int) -> None:
    """Write the starting weights: normal with deviation 1/√width, the projections back into the stream smaller.

    NumPy draws them, whose generator gives the same numbers on every machine.
    """
    import mlx.core as mx
    import numpy as np

    width, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocabulary, width), "lm_head": (vocabulary, width)}
    for layer in range(CONFIG["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        shapes |= {f"{block}.self_attn.{name}_proj": (width, width) for name in "qkvo"}
        shapes |= {f"{block}.mlp.{name}_proj": (inner, width) for name in ("gate", "up")}
        shapes |= {f"{block}.mlp.down_proj": (width, inner)}
        shapes |= {f"{block}.{name}_layernorm": (width,) for name in ("input", "post_attention")}
    shapes["model.norm"] = (width,)
    draw = np.random.Generator(np.random.PCG64(SEED))
    weights = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            array = np.ones(shape)
        else:
            into_stream = name.endswith(("o_proj", "down_proj"))
            scale = 1 / math.sqrt(width * (2 * CONFIG["num_hidden_layers"] if into_stream else 1))
            array = draw.normal(0.0, scale, shape)
        weights[f"{name}.weight"] = mx.array(array.astype(np.float32))
    mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})


def bundled_rows() -> Path:
    """Find the chat file that comes with the command-line tool."""
    return Path(str(files("trainwire_cli"))) / "demo_data" / "train.jsonl"


def main(argv: list[str]) -> int:
    """Make the folder named by the first argument; the process's exit status."""
    if not 1 <= len(argv) <= 2:
        print("usage: python -m trainwire_engine.demo_model OUT_FOLDER [ROWS]", file=sys.stderr)
        return 2
    try:
        make(Path(argv[0]), Path(argv[1]) if len(argv) == 2 else bundled_rows())
    except (TrainwireError, ImportError) as error:
        return tell(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
