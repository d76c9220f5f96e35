"""Every shape of a row, and what is said of a row that does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data.kit import CHATML, chat, load, shown, tokenizer_with, trained

from trainwire_engine.data import Notice
from trainwire_protocol.errors import DatasetInvalid

PAIR = "<|im_start|>user\nyes?<|im_end|>\n<|im_start|>assistant\n⟦no.<|im_end|>⟧\n"


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    "row",
    [
        chat("user: yes?", "assistant: no."),
        {"prompt": "yes?", "completion": "no."},
        {"prompt": [message("user", "yes?")], "completion": [message("assistant", "no.")]},
        {"prompt": [message("user", "yes?")], "completion": "no."},
        {"instruction": "yes?", "output": "no."},
        {"instruction": "yes?", "input": "", "output": "no."},
        {"instruction": "", "input": "yes?", "output": "no."},
        {"conversations": [{"from": "human", "value": "yes?"}, {"from": "gpt", "value": "no."}]},
        {"conversations": [message("user", "yes?"), message("assistant", "no.")]},
        {"id": 7, "messages": [message("user", "yes?"), message("assistant", "no.")], "text": "ignored"},
    ],
)
def test_each_shape_gives_the_same_example(tmp_path: Path, row: dict[str, Any]) -> None:
    tokenizer = tokenizer_with(CHATML)
    dataset = load(tmp_path, [row], tokenizer)
    assert shown(dataset, tokenizer) == PAIR
    assert dataset.train_on == "assistant"


def test_instruction_input_system_and_history_make_a_conversation(tmp_path: Path) -> None:
    row = {"instruction": "a", "input": "b", "output": "c", "system": "s", "history": [["q", "r"]]}
    tokenizer = tokenizer_with(CHATML)
    assert shown(load(tmp_path, [row], tokenizer), tokenizer) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n⟦r<|im_end|>⟧\n"
        "<|im_start|>user\na\n\nb<|im_end|>\n<|im_start|>assistant\n⟦c<|im_end|>⟧\n"
    )


def test_assistant_turns_of_a_prompt_are_not_trained(tmp_path: Path) -> None:
    prompt = [message("user", "a"), message("assistant", "b"), message("user", "c")]
    tokenizer = tokenizer_with(CHATML)
    dataset = load(tmp_path, [{"prompt": prompt, "completion": [message("assistant", "d")]}], tokenizer)
    assert trained(dataset, tokenizer) == ["d<|im_end|>"]


def test_conversations_call_functions(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}" + (
        "<tool_call>{{ c.function | tojson }}{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    turns = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "r"},
        {"from": "gpt", "value": "s", "weight": 0},
    ]
    tokenizer = tokenizer_with(template)
    dataset = load(tmp_path, [{"conversations": turns, "system": "y"}], tokenizer)
    assert shown(dataset, tokenizer) == (
        '[system]y<|im_end|>[user]q<|im_end|>[assistant]⟦<tool_call>{"name": "f", "arguments": {"a": 1}}<|im_end|>⟧'
        "[tool]r<|im_end|>[assistant]s<|im_end|>"
    )


def test_plain_text_is_trained_whole_and_gets_an_end_mark(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(None)
    dataset = load(tmp_path, [{"text": "hello<|im_end|>"}, {"text": "hello"}], tokenizer)
    assert dataset.tokens(0).tolist() == dataset.tokens(1).tolist()
    assert dataset.mask(1).tolist() == [False] + [True] * (dataset.lengths[1] - 1)
    assert dataset.tokens(1)[-1] == tokenizer.eos_id
    assert dataset.train_on == "all"


def test_a_tokenizer_without_end_mark_adds_none_and_says_so(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(None, eos=None)
    notices: list[Notice] = []
    dataset = load(tmp_path, [{"text": "hello"}], tokenizer, notices)
    assert tokenizer.decode(dataset.tokens(0)) == "hello"
    assert (tokenizer.eos_id, tokenizer.pad_id) == (None, 0)
    assert [notice.code for notice in notices] == ["no_end_mark"]


def test_prompt_and_completion_without_a_template_are_joined_as_they_are(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(None)
    dataset = load(tmp_path, [{"prompt": "yes?", "completion": " no"}], tokenizer)
    assert shown(dataset, tokenizer) == "yes?⟦ no<|im_end|>⟧"
    (tmp_path / "all").mkdir()
    dataset = load(tmp_path / "all", [{"prompt": "yes?", "completion": " no"}], tokenizer, train_on="all")
    assert dataset.trained[0] == dataset.lengths[0] - 1


def test_token_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    dataset = load(tmp_path, [{"input_ids": [5, 6, 7], "labels": [5, -100, 7]}], tokenizer_with(None))
    assert (dataset.tokens(0).tolist(), dataset.mask(0).tolist()) == ([5, 6, 7], [False, False, True])
    assert dataset.train_on is None


def test_files_may_differ_in_shape(tmp_path: Path) -> None:
    rows = [chat("user: a", "assistant: b"), {"text": "b"}]
    files = []
    for index, row in enumerate(rows):
        files.append(tmp_path / f"{index}.jsonl")
        files[-1].write_text(json.dumps(row) + "\n")
    from data.kit import config_for

    from trainwire_engine.data import load_dataset

    config = config_for([str(file) for file in files], tmp_path)
    dataset = load_dataset(config, tokenizer_with(CHATML), "train", lambda *_: None, 1000)
    assert dataset is not None
    assert [dataset.location(i) for i in range(2)] == [f"{file}:1" for file in files]
    assert dataset.train_on is None


OK = chat("user: a", "assistant: b")


@pytest.mark.parametrize(
    ("row", "field", "reason"),
    [
        ({"text": "x"}, "messages", "missing, while the file's first row has messages"),
        ([], "row", "a list, not an object"),
        ({"messages": "x"}, "messages", "a text, not a list"),
        ({"messages": ["x"]}, "messages[0]", "a text, not an object"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
        ({"messages": [{"role": 1, "content": "x"}]}, "messages[0].role", "a number, not text"),
        ({"messages": [message("user", "a"), {"role": "assistant", "content": 3}]}, "messages[1].content", "a number"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type", "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "missing"),
        ({"messages": [{"role": "assistant", "tool_calls": {"a": 1}}]}, "messages[0].tool_calls", "not a list"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{a"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
            "not JSON",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}]},
            "messages[0].tool_calls[0].arguments",
            "a list, not an object",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "train": "no"}]},
            "messages[0].train",
            "not true or false",
        ),
        ({"messages": [{"role": "user", "content": "a", "train": True}]}, "messages[0].train", "user turn"),
        ({"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}, "messages[0].weight", "0.5"),
        ({"messages": [{"role": "assistant", "reasoning": 1}]}, "messages[0].reasoning", "not text"),
        ({**OK, "tools": "[{"}, "tools", "not JSON"),
        ({**OK, "tools": ["f"]}, "tools[0]", "not an object"),
    ],
)
def test_a_row_that_does_not_fit_is_named_by_file_line_and_field(
    tmp_path: Path, row: Any, field: str, reason: str
) -> None:
    with pytest.raises(DatasetInvalid) as caught:
        load(tmp_path, [OK, row], tokenizer_with(CHATML))
    error = caught.value
    assert (error.details["line"], error.details["field"]) == (2, field)
    assert error.details["path"] == str(tmp_path / "train.jsonl")
    assert error.message.startswith(f"{tmp_path / 'train.jsonl'}:2: {field}: ")
    assert reason in error.details["reason"]


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"question": "a", "answer": "b"}, "row"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels"),
        ({"input_ids": [1, 2], "labels": [1, 3]}, "labels[1]"),
        ({"input_ids": [1, -2], "labels": [1, -2]}, "input_ids[1]"),
        ({"input_ids": [1, 2.0], "labels": [1, 2]}, "input_ids[1]"),
        ({"input_ids": [1, 2**40], "labels": [1, 2**40]}, "input_ids[1]"),
        ({"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [1, 0]}, "attention_mask"),
        ({"conversations": [{"from": "martian", "value": "x"}]}, "conversations[0].from"),
        ({"conversations": [{"from": "gpt"}]}, "conversations[0].value"),
        ({"conversations": [{"from": "function_call", "value": "x"}]}, "conversations[0].value"),
        ({"instruction": "a", "output": "b", "history": [["q"]]}, "history[0]"),
        ({"prompt": "a", "completion": None}, "completion"),
    ],
)
def test_the_first_row_is_named_too(tmp_path: Path, row: Any, field: str) -> None:
    with pytest.raises(DatasetInvalid) as caught:
        load(tmp_path, [row], tokenizer_with(CHATML))
    assert (caught.value.details["line"], caught.value.details["field"]) == (1, field)


def test_chat_rows_need_a_template(tmp_path: Path) -> None:
    with pytest.raises(DatasetInvalid, match="no chat template") as caught:
        load(tmp_path, [OK], tokenizer_with(None))
    assert "chat_template" in str(caught.value.hint)


@pytest.mark.parametrize("train_on", ["assistant", "last"])
def test_plain_text_has_no_turns_to_train(tmp_path: Path, train_on: str) -> None:
    with pytest.raises(DatasetInvalid, match=f"train_on = {train_on}"):
        load(tmp_path, [{"text": "a"}], tokenizer_with(CHATML), train_on=train_on)


def test_turns_of_others_cannot_be_switched_off_where_all_is_trained(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "a", "train": False}, message("assistant", "b")]}
    with pytest.raises(DatasetInvalid, match="only assistant turns"):
        load(tmp_path, [row], tokenizer_with(CHATML), train_on="all")


def test_notices_tell_what_the_template_does_not_write(tmp_path: Path) -> None:
    row = {"tools": [{"name": "f"}], **chat("user: a", "assistant: b")}
    row["messages"][1]["thinking"] = "hm"
    notices: list[Notice] = []
    load(tmp_path, [row], tokenizer_with(CHATML), notices)
    assert [notice.code for notice in notices] == ["reasoning_not_in_template", "tools_not_in_template"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ('{"n": NaN}', "not JSON"),
        ('{"n": "\\ud83d"}', "not JSON"),
        ('{"n": 1, "n": 2}', "'n' stands twice"),
        ('{"n": 123456789012345678901}', "does not fit into 64 bits"),
        ("[1]", "a list, not an object"),
    ],
)
def test_arguments_given_as_text_are_as_strict_as_rows(tmp_path: Path, arguments: str, reason: str) -> None:
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    row = {"messages": [message("user", "a"), {"role": "assistant", "tool_calls": calls}]}
    with pytest.raises(DatasetInvalid, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments: ") as caught:
        load(tmp_path, [row], tokenizer_with(CHATML))
    assert reason in caught.value.message
