"""The exact trained text under templates that hold a trap each, written down by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data.kit import CHATML, chat, load, shown, tokenizer_with, trained

from trainwire_engine.data import Notice
from trainwire_engine.tokenizer import Tokenizer
from trainwire_protocol.errors import DatasetInvalid

TALK = chat("system: Be kind.", "user: Hello?", "assistant: Yes.", "user: What is it?", "assistant: Four.")


def test_every_assistant_turn_is_trained_with_its_end_mark_and_without_its_header(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(CHATML)
    assert shown(load(tmp_path, [TALK], tokenizer), tokenizer) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\n"
        "⟦Yes.<|im_end|>⟧\n<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\n⟦Four.<|im_end|>⟧\n"
    )


def test_the_last_turn_alone_is_trained(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(CHATML)
    assert trained(load(tmp_path, [TALK], tokenizer, train_on="last"), tokenizer) == ["Four.<|im_end|>"]


def test_all_trains_everything_but_the_first_token(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(CHATML)
    dataset = load(tmp_path, [TALK], tokenizer, train_on="all")
    assert dataset.trained[0] == dataset.lengths[0] - 1
    assert shown(dataset, tokenizer).startswith("<|im_start|>⟦system\nBe kind.")


@pytest.mark.parametrize("off", [{"train": False}, {"weight": 0}])
def test_a_turn_is_switched_off(tmp_path: Path, off: dict[str, Any]) -> None:
    tokenizer = tokenizer_with(CHATML)
    row = json.loads(json.dumps(TALK))
    row["messages"][2].update(off)
    assert trained(load(tmp_path, [row], tokenizer), tokenizer) == ["Four.<|im_end|>"]
    row["messages"][4].update(off)
    (tmp_path / "all").mkdir()
    text = shown(load(tmp_path / "all", [row], tokenizer, train_on="all"), tokenizer)
    assert "assistant\n⟧Yes.<|im_end|>⟦\n" in text
    assert text.endswith("assistant\n⟧Four.<|im_end|>⟦\n⟧")


def test_the_last_turn_switched_off_leaves_nothing(tmp_path: Path) -> None:
    row = json.loads(json.dumps(TALK))
    row["messages"][4]["train"] = False
    with pytest.raises(DatasetInvalid, match="no_trained_tokens"):
        load(tmp_path, [row], tokenizer_with(CHATML), train_on="last")


THINKING = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set content = m.content %}
{%- set thought = m.reasoning_content or '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
{{- content + '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if prompt_thinks %}{{ '<think>\\n' }}{% elif enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""


def test_reasoning_kept_in_the_last_turn_only(tmp_path: Path) -> None:
    row = chat("user: a?", "assistant: <think>\nhm\n</think>\n\nYes.", "user: b?", "assistant: <think>so</think>No.")
    tokenizer = tokenizer_with(THINKING)
    parts = trained(load(tmp_path, [row], tokenizer), tokenizer)
    assert parts == ["Yes.<|im_end|>", "<think>\nso\n</think>\n\nNo.<|im_end|>"]


@pytest.mark.parametrize(
    "other",
    [
        "content.split('<think>')[1].split('</think>')[0]",
        "content[content.find('<think>') + 7:content.find('</think>')]",
        "content.partition('</think>')[0].replace('<think>', '')",
    ],
)
def test_reasoning_cut_out_of_a_content_in_another_way_is_trained_too(tmp_path: Path, other: str) -> None:
    template = THINKING.replace("content.split('</think>')[0].split('<think>')[-1]", other)
    assert template != THINKING
    row = chat("user: a?", "assistant: <think>\nhm\n</think>\n\nYes.", "user: b?", "assistant: <think>so</think>No.")
    tokenizer = tokenizer_with(template)
    parts = trained(load(tmp_path, [row], tokenizer), tokenizer)
    assert parts == ["Yes.<|im_end|>", "<think>\nso\n</think>\n\nNo.<|im_end|>"]


def test_reasoning_in_a_field_of_its_own_gives_the_same_tokens(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(THINKING)
    inside = chat("user: a?", "assistant: <think>\nhm\n</think>\n\nYes.")
    apart = {"messages": [inside["messages"][0], {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}]}
    other = {"messages": [inside["messages"][0], {"role": "assistant", "content": "Yes.", "thinking": "hm"}]}
    dataset = load(tmp_path, [inside, apart, other], tokenizer)
    assert shown(dataset, tokenizer, 0) == shown(dataset, tokenizer, 1) == shown(dataset, tokenizer, 2)


def test_an_empty_think_block_is_trained_where_the_model_has_to_write_it(tmp_path: Path) -> None:
    row = chat("user: a?", "assistant: Yes.", "user: b?", "assistant: No.")
    tokenizer = tokenizer_with(THINKING)
    parts = trained(load(tmp_path, [row], tokenizer), tokenizer)
    assert parts == ["Yes.<|im_end|>", "<think>\n\n</think>\n\nNo.<|im_end|>"]


def test_an_empty_think_block_of_the_generation_prompt_is_not_trained(tmp_path: Path) -> None:
    row = chat("user: a?", "assistant: Yes.", "user: b?", "assistant: No.")
    tokenizer = tokenizer_with(THINKING, enable_thinking=False)
    text = shown(load(tmp_path, [row], tokenizer), tokenizer)
    assert "assistant\n⟦Yes.<|im_end|>⟧" in text
    assert text.endswith("assistant\n<think>\n\n</think>\n\n⟦No.<|im_end|>⟧\n")


def test_a_generation_prompt_that_the_finished_text_does_not_contain(tmp_path: Path) -> None:
    row = chat("user: a?", "assistant: Yes.", "user: b?", "assistant: <think>so</think>No.")
    tokenizer = tokenizer_with(THINKING, prompt_thinks=True)
    text = shown(load(tmp_path, [row], tokenizer), tokenizer)
    assert "assistant\n⟦Yes.<|im_end|>⟧" in text
    assert text.endswith("assistant\n<think>\n⟦so\n</think>\n\nNo.<|im_end|>⟧\n")


def test_a_content_that_begins_like_the_generation_prompt_goes_on_is_trained_whole(tmp_path: Path) -> None:
    row = chat("user: a?", "assistant: <b>Yes</b>", "user: b?", "assistant: No.")
    tokenizer = tokenizer_with(THINKING, prompt_thinks=True)
    assert trained(load(tmp_path, [row], tokenizer), tokenizer)[0] == "<b>Yes</b><|im_end|>"


OTHER_PROMPT = (
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ANSWER:' }}{% endif %}"
)


def test_a_generation_prompt_of_another_kind_trains_the_content_and_not_the_header(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(OTHER_PROMPT)
    text = shown(load(tmp_path, [chat("user: a", "assistant: b")], tokenizer), tokenizer)
    assert text == "[user]a<|end|>[assistant]⟦b<|end|>⟧"


NO_PROMPT = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"


def test_a_template_without_a_generation_prompt_trains_no_header(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(NO_PROMPT)
    text = shown(load(tmp_path, [chat("user: a", "assistant: b", "user: c", "assistant: d")], tokenizer), tokenizer)
    assert text == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>⟧\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n⟦d<|im_end|>⟧\n"
    )


MERGED = (
    "{% set ns = namespace(system='') %}{% for m in messages if m.role == 'system' %}"
    "{% set ns.system = ns.system + m.content + ' ' %}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if loop.first and ns.system %}{{ ns.system + '\\n' }}{% endif %}{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_system_turns_merged_into_the_first_question(tmp_path: Path) -> None:
    row = chat("system: A.", "user: a", "assistant: b", "system: B.", "user: c", "assistant: d")
    tokenizer = tokenizer_with(MERGED)
    assert shown(load(tmp_path, [row], tokenizer), tokenizer) == (
        "<|im_start|>user\nA. B. \na<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>⟧\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n⟦d<|im_end|>⟧\n"
    )


MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
)


def test_the_generation_marks_of_a_template_say_what_is_trained(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(MARKED)
    dataset = load(tmp_path, [TALK], tokenizer)
    assert trained(dataset, tokenizer) == ["Yes.<|im_end|>", "Four.<|im_end|>"]
    assert tokenizer.decode(dataset.tokens(0)) == tokenizer.render(TALK["messages"])


def test_generation_marks_obey_the_turn_rules(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(MARKED)
    (tmp_path / "last").mkdir()
    assert trained(load(tmp_path / "last", [TALK], tokenizer, train_on="last"), tokenizer) == ["Four.<|im_end|>"]
    row = json.loads(json.dumps(TALK))
    row["messages"][4]["train"] = False
    assert trained(load(tmp_path, [row], tokenizer), tokenizer) == ["Yes.<|im_end|>"]


def test_generation_marks_inside_a_macro_are_followed(tmp_path: Path) -> None:
    template = (
        "{% macro say(m) %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{% set text = say(m) if m.role == 'assistant' else m.content %}"
        "{{ '[' ~ m.role ~ ']' ~ text }}{% endfor %}"
    )
    tokenizer = tokenizer_with(template)
    text = shown(load(tmp_path, [chat("user: a", "assistant: b", "user: c", "assistant: d")], tokenizer), tokenizer)
    assert text == "[user]a[assistant]⟦b<|im_end|>⟧[user]c[assistant]⟦d<|im_end|>⟧"


ALTERNATING = (
    "{% for m in messages %}\n{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\n"
    "{{ raise_exception('Roles must alternate!') }}{% endif %}" + NO_PROMPT[NO_PROMPT.index("{{") :]
)


def test_a_template_that_refuses_a_row_is_quoted_with_row_and_line(tmp_path: Path) -> None:
    rows = [chat("user: a", "assistant: b"), chat("user: a", "user: b", "assistant: c")]
    with pytest.raises(DatasetInvalid) as caught:
        load(tmp_path, rows, tokenizer_with(ALTERNATING))
    assert f"{tmp_path / 'train.jsonl'}:2: messages:" in caught.value.message
    assert "Roles must alternate! (line 3 of the template)" in caught.value.message
    assert caught.value.details["line"] == 2


def test_roles_that_alternate_are_trained_although_beginnings_may_be_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(ALTERNATING)
    assert trained(load(tmp_path, [chat("user: a", "assistant: b")], tokenizer), tokenizer) == ["b<|im_end|>"]


TRIMMED = CHATML.replace("message['content']", "message['content'] | trim")


def test_trimmed_content(tmp_path: Path) -> None:
    row = chat("user:  \n a ", "assistant: \n\n b  \n", "user: c", "assistant:   d")
    tokenizer = tokenizer_with(TRIMMED)
    assert trained(load(tmp_path, [row], tokenizer), tokenizer) == ["b<|im_end|>", "d<|im_end|>"]


TOOLS = """{% if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.content %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>' }}{{ call.function | tojson }}{{ '</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "zwei"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def tool_row(**reply: Any) -> dict[str, Any]:
    return {
        "tools": [TOOL],
        "messages": [
            {"role": "user", "content": "2+2"},
            {"role": "assistant", **reply},
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "Four."},
        ],
    }


def test_tool_calls_and_results(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(TOOLS)
    text = shown(load(tmp_path, [tool_row(content=None, tool_calls=[CALL])], tokenizer), tokenizer)
    assert text == (
        f"<|im_start|>system\n[{json.dumps(TOOL)}]<|im_end|>\n<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n"
        '⟦<tool_call>{"name": "add", "arguments": {"a": 2, "b": "zwei"}}</tool_call><|im_end|>⟧\n'
        "<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n⟦Four.<|im_end|>⟧\n"
    )


def test_arguments_as_object_or_text_and_content_null_empty_or_missing_give_the_same_tokens(tmp_path: Path) -> None:
    as_text = {"type": "function", "function": {"name": "add", "arguments": '{"a":2,\n"b":"zwei"}'}}
    flat = {"name": "add", "arguments": {"a": 2, "b": "zwei"}}
    rows = [
        tool_row(content=None, tool_calls=[CALL]),
        tool_row(content="", tool_calls=[as_text]),
        tool_row(tool_calls=[flat]),
        {**tool_row(tool_calls=[as_text]), "tools": json.dumps([TOOL])},
    ]
    for name, template in (("object", TOOLS), ("text", TOOLS.replace("call.function | tojson", WANTS_TEXT))):
        (tmp_path / name).mkdir()
        tokenizer = tokenizer_with(template)
        dataset = load(tmp_path / name, rows, tokenizer)
        assert len({shown(dataset, tokenizer, i) for i in range(4)}) == 1
        assert '"a": 2, "b": "zwei"' in shown(dataset, tokenizer)
        assert "None" not in shown(dataset, tokenizer)


WANTS_TEXT = "call.function.name + call.function.arguments"


def test_a_template_that_prints_null_gets_no_null(tmp_path: Path) -> None:
    template = CHATML.replace("+ message['content'] +", "~ message['content'] ~")
    tokenizer = tokenizer_with(template)
    row = {"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": "b"}]}
    assert shown(load(tmp_path, [row], tokenizer), tokenizer) == (
        "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>⟧\n"
    )


def test_a_template_that_loses_tool_calls_of_empty_content_gets_null(tmp_path: Path) -> None:
    template = TOOLS.replace("{%- for call in m.tool_calls or [] %}", "{%- for call in m.tool_calls or [] if NULL %}")
    tokenizer = tokenizer_with(template.replace("NULL", "m.content is none"))
    rows = [tool_row(content=content, tool_calls=[CALL]) for content in ("", None)]
    dataset = load(tmp_path, rows, tokenizer)
    assert [len(trained(dataset, tokenizer, i)) for i in range(2)] == [2, 2]


def test_tool_calls_that_the_template_does_not_write_drop_the_row(tmp_path: Path) -> None:
    dataset = load(tmp_path, [tool_row(tool_calls=[CALL]), TALK], tokenizer_with(CHATML))
    assert len(dataset) == 1
    assert dataset.report.rows_dropped["tool_calls_not_in_template"].lines == [f"{tmp_path / 'train.jsonl'}:1"]


PARTS = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.content is string %}{{ m.content }}
{%- else %}{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


@pytest.mark.parametrize(("template", "expected"), [(PARTS, "yesno"), (CHATML, "yes no ")])
def test_content_in_parts(tmp_path: Path, template: str, expected: str) -> None:
    parts = [{"type": "text", "text": "yes "}, {"type": "text", "text": "no "}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": parts}]}
    tokenizer = tokenizer_with(template)
    assert trained(load(tmp_path, [row], tokenizer), tokenizer) == [expected + "<|im_end|>"]


FORGETS = CHATML.replace("in messages", "in messages[-2:]")


def test_a_row_whose_turns_the_template_leaves_out_is_dropped_and_never_guessed(tmp_path: Path) -> None:
    short = chat("user: a", "assistant: b")
    tokenizer = tokenizer_with(FORGETS)
    dataset = load(tmp_path, [TALK, short], tokenizer)
    assert dataset.report.rows_dropped["turn_not_found"].count == 1
    assert trained(dataset, tokenizer) == ["b<|im_end|>"]


REORDERS = (
    "{% for m in messages if m.role == 'assistant' %}{{ m.content + '<|end|>' }}{% endfor %}"
    "{% for m in messages if m.role == 'user' %}{{ 'Q ' + m.content + '<|im_end|>' }}{% endfor %}"
)


def test_a_template_that_reorders_trains_the_contents_where_they_stand(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(REORDERS)
    row = chat("user: a", "assistant: b", "user: c", "assistant: d")
    text = shown(load(tmp_path, [row], tokenizer), tokenizer)
    assert text == "b⟦<|end|>d<|end|>⟧Q a<|im_end|>Q c<|im_end|>"


NOT_FOLLOWED = CHATML.replace("message['content']", "message['content'] | list | join")


@pytest.mark.parametrize("template", [NOT_FOLLOWED, NOT_FOLLOWED.replace("| list", "| trim | list")])
def test_turns_are_found_under_templates_that_cannot_be_followed(tmp_path: Path, template: str) -> None:
    tokenizer = tokenizer_with(template)
    assert trained(load(tmp_path, [TALK], tokenizer), tokenizer) == ["Yes.<|im_end|>", "Four.<|im_end|>"]


def test_text_that_looks_like_turns_fools_nothing(tmp_path: Path) -> None:
    fake = "<|im_end|>\n<|im_start|>assistant\nNo.<|im_end|>\n<|im_start|>user\n"
    row = chat(f"user: {fake}", f"assistant: Yes.{fake}Yes.", "user: Yes.", "assistant: Qz0zQw7 Yes.")
    tokenizer = tokenizer_with(CHATML)
    assert trained(load(tmp_path, [row], tokenizer), tokenizer) == [
        f"Yes.{fake}Yes.<|im_end|>",
        "Qz0zQw7 Yes.<|im_end|>",
    ]


def test_a_token_belongs_to_the_turn_that_holds_its_first_character(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    tokenizer = tokenizer_with(template)
    assert tokenizer.encode(" yes") != [*tokenizer.encode(" "), *tokenizer.encode("yes")]
    text = shown(load(tmp_path, [chat("user: a ", "assistant:  yes")], tokenizer), tokenizer)
    assert text == "user:a assistant:⟦ yes⟧"
    header_ends_with_space = tokenizer_with(template.replace("':'", "': '").replace("assistant:", "assistant: "))
    (tmp_path / "other").mkdir()
    dataset = load(tmp_path / "other", [chat("user: a", "assistant: yes no")], header_ends_with_space)
    assert shown(dataset, header_ends_with_space) == "user: aassistant: yes⟦ no⟧"


def test_a_conversation_may_begin_with_or_repeat_assistant_turns_and_end_with_a_question(tmp_path: Path) -> None:
    row = chat("assistant: yes", "assistant: no", "user: a", "assistant: b", "user: c")
    tokenizer = tokenizer_with(CHATML)
    assert trained(load(tmp_path, [row], tokenizer), tokenizer) == [
        "yes<|im_end|>",
        "no<|im_end|>",
        "b<|im_end|>",
    ]


def test_an_empty_assistant_turn_is_not_trained(tmp_path: Path) -> None:
    row = chat("user: a", "assistant: ", "user: b", "assistant: c")
    tokenizer = tokenizer_with(CHATML)
    assert trained(load(tmp_path, [row], tokenizer), tokenizer) == ["c<|im_end|>"]


def test_rows_without_an_assistant_turn_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [chat("system: a"), chat("user: a"), TALK]
    dataset = load(tmp_path, rows, tokenizer_with(CHATML))
    assert (len(dataset), dataset.report.rows_read, dataset.report.rows_used) == (1, 3, 1)
    assert dataset.report.rows_dropped["no_assistant_turn"].count == 2


def test_the_end_mark_is_trained_also_where_it_pads(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(CHATML)
    assert tokenizer.pad_id == tokenizer.eos_id
    dataset = load(tmp_path, [TALK], tokenizer)
    assert (dataset.tokens(0)[dataset.mask(0)] == tokenizer.eos_id).sum() == 2


def test_masks_do_not_depend_on_what_was_learnt_from_rows_before(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(THINKING)
    contents = ["Yes.", "<think>a</think>b", " \n x", "</think>", "<think>", "</think>\n\n</think>z", "a<think>b", ""]
    rows = [chat("user: q", f"assistant: {a}", "user: r", f"assistant: {b}!") for a in contents for b in contents]
    together = load(tmp_path, rows, tokenizer)
    for index, row in enumerate(rows):
        folder = tmp_path / str(index)
        folder.mkdir()
        alone = load(folder, [row], Tokenizer(tokenizer.backend, {"eos_token": "<|im_end|>"}, {"default": THINKING}))
        assert shown(alone, tokenizer) == shown(together, tokenizer, index)


MARKED_SHORT = MARKED.replace(
    "m.content + '<|im_end|>' }}{% endgeneration %}", "m.content }}{% endgeneration %}<|im_end|>"
)
UNMARKED = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "noticed"),
    [(CHATML, []), (MARKED, []), (MARKED_SHORT, ["no_end_of_turn"]), (UNMARKED, ["no_end_of_turn"])],
)
def test_a_template_that_trains_no_end_of_a_turn_is_noticed(tmp_path: Path, template: str, noticed: list[str]) -> None:
    notices: list[Notice] = []
    load(tmp_path, [TALK], tokenizer_with(template), notices)
    assert [notice.code for notice in notices] == noticed


def test_a_template_that_trains_no_end_of_a_tool_call_is_noticed(tmp_path: Path) -> None:
    open_calls = TOOLS.replace("{{ '<|im_end|>\\n' }}", "{% if not m.tool_calls %}{{ '<|im_end|>\\n' }}{% endif %}")
    assert open_calls != TOOLS
    for template, row, noticed in [
        (TOOLS, tool_row(content="", tool_calls=[CALL]), []),
        (open_calls, TALK, []),
        (open_calls, tool_row(content="", tool_calls=[CALL]), ["no_end_of_tool_call"]),
    ]:
        notices: list[Notice] = []
        load(tmp_path, [row], tokenizer_with(template), notices)
        assert [notice.code for notice in notices] == noticed


def test_nested_generation_blocks_are_one(tmp_path: Path) -> None:
    nested = MARKED.replace("m.content +", "m.content }}{% generation %}{{ '!' }}{% endgeneration %}{{", 1)
    tokenizer = tokenizer_with(nested)
    assert trained(load(tmp_path, [TALK], tokenizer), tokenizer) == ["Yes.!<|im_end|>", "Four.!<|im_end|>"]


def test_characters_that_bracket_generation_blocks_shift_no_mask(tmp_path: Path) -> None:
    unseen = MARKED.replace("m.content + '<|im_end|>'", "(m.content | indent) + '<|im_end|>'")
    rows = [chat("user: \ufdd0\ufdd1", "assistant: b"), chat("user: a", "assistant: b")]
    tokenizer = tokenizer_with(unseen)
    dataset = load(tmp_path, rows, tokenizer)
    assert dataset.report.rows_dropped["turn_not_found"].count == 1
    assert trained(dataset, tokenizer) == ["b<|im_end|>"]


def test_words_reserved_for_signs_harm_nothing(tmp_path: Path) -> None:
    rows = [tool_row(content="", tool_calls=[{"function": {"name": "add", "arguments": {"n": "Qz99zQw7"}}}])]
    tokenizer = tokenizer_with(TOOLS)
    assert "Qz99zQw7" in trained(load(tmp_path, rows, tokenizer), tokenizer)[0]
    rows[0]["tools"] = [{"type": "function", "function": {"name": "Qz99zQw7"}}]
    with pytest.raises(DatasetInvalid, match="turn_not_found"):
        load(tmp_path, rows, tokenizer)


HEADED = "{{ '<|im_start|>' + m.role + '\\n' + m.content"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        pytest.param(
            "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
            "{% else %}{{ ' ' + m.content + '<|end|>' }}{% endif %}{% endfor %}",
            "[INST] one [/INST]⟦ two<|end|>⟧[INST] three [/INST]⟦ four<|end|>⟧",
            id="a space before the answer and no generation prompt",
        ),
        pytest.param(
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
            "{{ m.role ~ ns.n ~ ':' ~ m.content ~ '<|end|>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant' ~ (ns.n + 1) ~ ':' }}{% endif %}",
            "user1:one<|end|>assistant2:⟦two<|end|>⟧user3:three<|end|>assistant4:⟦four<|end|>⟧",
            id="a state over the messages",
        ),
        pytest.param(
            "{% for m in messages %}{% if not loop.first %}<|end|>{% endif %}{{ m.role + ':' + m.content }}{% endfor %}"
            "{% if add_generation_prompt %}<|end|>assistant:{% endif %}",
            "user:one<|end|>assistant:⟦two⟧<|end|>user:three<|end|>assistant:⟦four⟧",
            id="marks between the turns",
        ),
        pytest.param(
            "{% for m in messages %}" + HEADED + " }}{% endfor %}<|end|>" + PROMPT,
            "<|im_start|>user\none<|im_start|>assistant\n⟦two⟧<|im_start|>user\nthree"
            "<|im_start|>assistant\n⟦four<|end|>⟧",
            id="one mark at the end of all",
        ),
        pytest.param(
            "{{ messages | map(attribute='content') | join | length }}|{% for m in messages %}"
            + HEADED.replace("m.content", "(m.content | upper)[:3]")
            + " + '<|im_end|>' }}{% endfor %}"
            + PROMPT,
            "15|<|im_start|>user\nONE<|im_end|><|im_start|>assistant\n⟦TWO<|im_end|>⟧"
            "<|im_start|>user\nTHR<|im_end|><|im_start|>assistant\n⟦FOU<|im_end|>⟧",
            id="lengths and parts of contents",
        ),
        pytest.param(
            "{% for m in messages %}" + HEADED + " + '<|im_end|>' }}{% endfor %}{{ messages[-1].content }}" + PROMPT,
            None,
            id="the last content again at the end",
        ),
        *(
            pytest.param(
                "{% for m in messages %}" + HEADED + " + '<|im_end|>' }}{% endfor %}Sum: {{ " + echo + " }}" + PROMPT,
                None,
                id=f"the last content again, {echo}",
            )
            for echo in (
                "messages[-1].content | upper",
                "messages[-1].content | replace('u', 'o')",
                "(messages[-1].content ~ '!') | upper",
                "messages[-1].content.split('o')[0]",
                "messages[-1].content[:2]",
                "messages | map(attribute='content') | join | upper",
            )
        ),
        pytest.param(
            "{% for m in messages %}"
            + HEADED
            + " + '<|im_end|>' }}{% endfor %}Sum: {{ messages[-1].content | length }}"
            + PROMPT,
            "<|im_start|>user\none<|im_end|><|im_start|>assistant\n⟦two<|im_end|>⟧"
            "<|im_start|>user\nthree<|im_end|><|im_start|>assistant\n⟦four<|im_end|>⟧Sum: 4",
            id="the length of the last content at the end",
        ),
        pytest.param(
            "{% for m in messages %}" + HEADED + " + '<|im_end|>\\n--\\n' }}{% endfor %}" + PROMPT,
            "<|im_start|>user\none<|im_end|>\n--\n<|im_start|>assistant\n⟦two<|im_end|>⟧\n--\n"
            "<|im_start|>user\nthree<|im_end|>\n--\n<|im_start|>assistant\n⟦four<|im_end|>⟧\n--\n",
            id="text behind the end mark",
        ),
        pytest.param(
            "{% for m in messages %}"
            + HEADED.replace("m.role", "('seer' if 'w' in m.content else m.role)")
            + " + '<|im_end|>' }}{% endfor %}"
            + PROMPT,
            "<|im_start|>user\none<|im_end|><|im_start|>seer\n⟦two<|im_end|>⟧"
            "<|im_start|>user\nthree<|im_end|><|im_start|>assistant\n⟦four<|im_end|>⟧",
            id="a role that the content renames",
        ),
        pytest.param(
            "{% for m in messages %}"
            + HEADED.replace("+ m.content", "}}{{ m.content | e }}{{ ''")
            + " + '<|im_end|>' }}{% endfor %}"
            + PROMPT,
            "<|im_start|>user\none<|im_end|><|im_start|>assistant\n⟦two<|im_end|>⟧"
            "<|im_start|>user\nthree<|im_end|><|im_start|>assistant\n⟦four<|im_end|>⟧",
            id="escaped contents",
        ),
        pytest.param(
            "{% for m in messages %}"
            + HEADED.replace("m.content", "m.content[:1] + '|' + m.content[1:]")
            + " + '<|im_end|>' }}{% endfor %}"
            + PROMPT,
            "<|im_start|>user\no|ne<|im_end|><|im_start|>assistant\n⟦t|wo<|im_end|>⟧"
            "<|im_start|>user\nt|hree<|im_end|><|im_start|>assistant\n⟦f|our<|im_end|>⟧",
            id="contents in two slices",
        ),
    ],
)
def test_nasty_templates(tmp_path: Path, template: str, expected: str | None) -> None:
    row, tokenizer = chat("user: one", "assistant: two", "user: three", "assistant: four"), tokenizer_with(template)
    if expected is None:
        with pytest.raises(DatasetInvalid, match="turn_not_found"):
            load(tmp_path, [row], tokenizer)
    else:
        assert shown(load(tmp_path, [row], tokenizer), tokenizer) == expected
