"""Real tokenizers with their own templates: the exact trained text, written down by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data.kit import chat, load, shown, trained

from trainwire_engine.data.conversations import Conversations
from trainwire_engine.tokenizer import Tokenizer
from trainwire_protocol.errors import DatasetInvalid

Fetch = Callable[[str], Path]

TALK = chat("system: Be kind.", "user: Hi", "assistant:  Hello! ", "user: 2+2?", "assistant: 4")
THOUGHT = chat("user: Hi", "assistant: <think>\nhm\n</think>\n\nHello!", "user: 2?", "assistant: <think>so</think>4")
CALLS: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}],
    "messages": [
        {"role": "user", "content": "2+2?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": '{"a":2}'}}],
        },
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ],
}


@pytest.fixture
def qwen3(real_tokenizer: Fetch) -> Path:
    return real_tokenizer("qwen3")


def test_qwen3_writes_an_empty_think_block_in_its_last_turn(qwen3: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(qwen3)
    assert shown(load(tmp_path, [TALK], tokenizer), tokenizer) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "⟦ Hello! <|im_end|>⟧\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
        "⟦<think>\n\n</think>\n\n4<|im_end|>⟧\n"
    )


def test_qwen3_without_thinking_gets_the_think_block_in_its_prompt(qwen3: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(qwen3, None, {"enable_thinking": False})
    text = shown(load(tmp_path, [TALK], tokenizer), tokenizer)
    assert "assistant\n⟦ Hello! <|im_end|>⟧" in text
    assert text.endswith("assistant\n<think>\n\n</think>\n\n⟦4<|im_end|>⟧\n")


def test_qwen3_keeps_the_reasoning_of_the_last_turn_only(qwen3: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(qwen3)
    assert trained(load(tmp_path, [THOUGHT], tokenizer), tokenizer) == [
        "Hello!<|im_end|>",
        "<think>\nso\n</think>\n\n4<|im_end|>",
    ]


def test_qwen3_calls_tools(qwen3: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(qwen3)
    assert trained(load(tmp_path, [CALLS], tokenizer), tokenizer) == [
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>',
        "<think>\n\n</think>\n\nIt is 4.<|im_end|>",
    ]


def test_llama_3_1_trims_contents(real_tokenizer: Fetch, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(real_tokenizer("llama3_1"))
    assert shown(load(tmp_path, [TALK], tokenizer), tokenizer) == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello!<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦4<|eot_id|>⟧"
    )


def test_gemma_3_merges_the_system_turn(real_tokenizer: Fetch, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(real_tokenizer("gemma3"))
    assert shown(load(tmp_path, [TALK], tokenizer), tokenizer) == (
        "<bos><start_of_turn>user\nBe kind.\n\nHi<end_of_turn>\n<start_of_turn>model\n⟦Hello!<end_of_turn>⟧\n"
        "<start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n⟦4<end_of_turn>⟧\n"
    )


def test_gemma_3_refuses_roles_that_do_not_alternate(real_tokenizer: Fetch, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(real_tokenizer("gemma3"))
    with pytest.raises(DatasetInvalid, match=r":1: messages: .*Conversation roles must alternate"):
        load(tmp_path, [chat("user: a", "user: b", "assistant: c")], tokenizer)


def test_deepseek_v3_opens_tool_results_in_its_prompt(real_tokenizer: Fetch, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(real_tokenizer("deepseek_v3"))
    dataset = load(tmp_path, [TALK, CALLS], tokenizer)
    assert shown(dataset, tokenizer, 0) == (
        "<｜begin▁of▁sentence｜>Be kind.<｜User｜>Hi<｜Assistant｜>⟦ Hello! <｜end▁of▁sentence｜>⟧"
        "<｜User｜>2+2?<｜Assistant｜>⟦4<｜end▁of▁sentence｜>⟧"
    )
    assert trained(dataset, tokenizer, 1) == [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
        '```json\n{"a": 2}\n```<｜tool▁call▁end｜>',
        "It is 4.<｜end▁of▁sentence｜>",
    ]


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gemma3", "deepseek_v3"])
def test_real_templates_run_once_for_each_structure(
    real_tokenizer: Fetch, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tokenizer = Tokenizer.from_folder(real_tokenizer(name))
    template, _ = tokenizer.template_for(None)
    conversations = Conversations(template, tokenizer.marks)
    conversations(TALK["messages"], None, [2, 4])
    other = chat("system: No.", "user: 1?", "assistant: Two", "user: 3?", "assistant:  4 ")["messages"]
    text = template.render(other)
    monkeypatch.setattr("trainwire_engine.data.conversations._is_checked", lambda uses: False)
    monkeypatch.setattr(template, "render", None)
    assert conversations(other, None, [2, 4])[0] == text


HARMONY = """{{- "<|start|>system<|message|>You are ChatGPT." }}
{%- if today %}{{ "\\nCurrent date: " + strftime_now("%Y-%m-%d") }}{% endif %}{{ "<|end|>" }}
{%- for m in messages %}{% if m.role == "assistant" %}
{%- if m.thinking and loop.last %}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + m.thinking + "<|end|>" }}{% endif %}
{{- "<|start|>assistant<|channel|>final<|message|>" + m.content + ("<|return|>" if loop.last else "<|end|>") }}
{%- else %}{{ "<|start|>" + m.role + "<|message|>" + m.content + "<|end|>" }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ "<|start|>assistant" }}{% endif %}"""


def test_a_model_with_channels_learns_them_and_both_end_marks(real_tokenizer: Fetch, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(real_tokenizer("gptoss"), HARMONY)
    row = chat("user: Hi", "assistant: Hello!", "user: 2+2?", "assistant: 4")
    row["messages"][3]["reasoning_content"] = "Sum."
    assert trained(load(tmp_path, [row], tokenizer), tokenizer) == [
        "<|channel|>final<|message|>Hello!<|end|>",
        "<|channel|>analysis<|message|>Sum.<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
    ]


def test_smollm2_adds_a_system_turn(smollm2_folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(smollm2_folder)
    row = chat("user: Hi", "assistant: Hello 42!")
    text = shown(load(tmp_path, [row], tokenizer), tokenizer)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello 42!<|im_end|>⟧\n")
