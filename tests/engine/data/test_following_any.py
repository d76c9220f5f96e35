"""Generated templates are followed exactly, and no mask depends on the rows before."""

from __future__ import annotations

from typing import Any

import pytest
from data.kit import MARKS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainwire_engine.data.conversations import Conversations
from trainwire_engine.data.stand_in import StandIn
from trainwire_engine.data.turns import TurnNotFound
from trainwire_engine.template import ChatTemplate, TemplateFailed

CONTENTS = [
    "a",
    "b",
    "ab",
    "abab",
    "",
    " ",
    " a ",
    "A",
    "Yes",
    "two words",
    "5",
    "12",
    "%Y",
    "a\nb",
    '"é<',
    "Qz0zQw7",
    "{}",
]

texts: st.SearchStrategy[str] = st.deferred(lambda: leaves | changed | built)
leaves = st.sampled_from(["m.content", "m.content", "m.role", "'a'", "ns.last", "s", "messages[0].content", "m.none"])
changed = st.builds(
    "({}{})".format,
    texts,
    st.sampled_from(
        [
            *(" | trim", " | upper", " | title", " | capitalize", " | replace('a', 'xa')", " | string", " | indent"),
            *(" | tojson", " | int | string", " | first", " | last", " | list | join", " | length | string", " | safe"),
            *(
                " | escape",
                " | reverse",
                " | center(9)",
                " | wordwrap(2)",
                " | float | string",
                " | default('d', true)",
            ),
            *(".strip()", ".lstrip('a')", ".rstrip('b')", ".upper()", ".title()", ".replace('a', '')", ".zfill(3)"),
            *(".rsplit('a', 1)[-1]", ".partition('a')[2]", ".removeprefix('a')", ".split('b')[0]", ".swapcase()"),
            *(
                "[1:]",
                "[:2]",
                "[-1:]",
                "[::-1]",
                "[0]",
                ".splitlines() | join('/')",
                ".casefold()",
                ".join(['x', 'y'])",
            ),
        ]
    ),
)
built = st.one_of(
    st.builds("({} ~ {})".format, texts, texts),
    st.builds("({} + {})".format, texts, texts),
    st.builds("([{}, {}] | join({}))".format, texts, texts, texts),
    st.builds("(({}).join([{}, {}]))".format, texts, texts, texts),
    st.builds("({} or {})".format, texts, texts),
    st.builds("('%s' % {})".format, texts),
    st.builds("('%s' % ({},))".format, texts),
    st.builds("('<{{}}>'.format({}))".format, texts),
    st.builds("({} | replace({}, {}))".format, texts, texts, texts),
    st.builds("(2 * {})".format, texts),
    st.builds("({{'k': [{}], 'n': 1}} | tojson)".format, texts),
    st.builds("({} if {} else {})".format, texts, st.deferred(lambda: facts), texts),
    st.builds("(({}) | string)".format, st.deferred(lambda: numbers)),
    st.builds("f({})".format, texts),
    st.builds("strftime_now({})".format, texts),
    st.builds("({{'a': 'x'}}[{}] | default('?'))".format, texts),
    st.builds("({{'a': 'x'}}.get({}, '?'))".format, texts),
    st.builds(
        "(messages | map(attribute='content') | map('{}') | join('+'))".format, st.sampled_from(["trim", "title"])
    ),
    st.builds("(messages | selectattr('content', 'in', {}) | map(attribute='role') | join)".format, texts),
)
numbers = st.one_of(
    st.builds("({} | length)".format, texts),
    st.builds("{}.count({})".format, texts, texts),
    st.builds("{}.find({})".format, texts, texts),
    st.builds("({}.split({}) | length)".format, texts, texts),
    st.builds("({} | int)".format, texts),
    st.sampled_from(["loop.index", "loop.index0", "(messages | length)", "ns.count", "loop.length"]),
)
facts: st.SearchStrategy[str] = st.one_of(
    texts,
    st.builds("({} == {})".format, texts, texts),
    st.builds("({} != {})".format, texts, texts),
    st.builds("({} in {})".format, texts, texts),
    st.builds("({} not in {})".format, texts, texts),
    st.builds("({} in ['a', {}])".format, texts, texts),
    st.builds("({} is in {})".format, texts, texts),
    st.builds("({} < {})".format, texts, texts),
    st.builds("{}.startswith({})".format, texts, texts),
    st.builds("{}.endswith(('a', {}))".format, texts, texts),
    st.builds(
        "({} is {})".format, texts, st.sampled_from(["string", "upper", "iterable", "mapping", "none", "eq 'a'"])
    ),
    st.builds("({} > 1)".format, numbers),
    st.builds("(not {})".format, st.deferred(lambda: facts)),
    st.builds("({} and {})".format, texts, st.deferred(lambda: facts)),
    st.sampled_from(["loop.last", "loop.first", "m.role == 'user'", "loop.changed(m.content)"]),
)
parts: st.SearchStrategy[str] = st.deferred(lambda: simple | nested)
simple = st.one_of(
    st.builds("{{{{ {} }}}}".format, texts),
    st.builds("{{% set ns.last = {} %}}".format, texts),
    st.builds("{{% set ns.count = ns.count + {} %}}".format, numbers),
    st.just("{{ m.content }}"),
)
nested = st.one_of(
    st.builds("{{% if {} %}}{}{{% else %}}{}{{% endif %}}".format, facts, parts, parts),
    st.builds("{{% if {} %}}{{% break %}}{{% endif %}}".format, facts),
    st.builds(
        "{{% for p in {}.split({}) %}}({{{{ p }}}}){{% endfor %}}".format, texts, st.sampled_from(["'a'", "'b'"])
    ),
    st.builds("{{% set v %}}{}{{% endset %}}{{{{ v }}}}{{% if 'a' in v %}}!{{% endif %}}".format, parts),
    st.builds("{{% filter upper %}}{}{{% endfilter %}}".format, parts),
    st.builds("{{% autoescape true %}}{}{{% endautoescape %}}".format, parts),
    st.builds("{{% call w() %}}{}{{% endcall %}}".format, parts),
    st.builds("{{% generation %}}{}{{% endgeneration %}}".format, parts),
)
TEMPLATE = """{%- set s = 'abab' %}{% set ns = namespace(last='', count=0) %}
{%- macro f(x) %}<{{ x }}{% if 'a' in x %}!{% endif %}>{% endmacro %}{% macro w() %}[{{ caller() }}]{% endmacro %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + ':' }}PARTS{{ '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}"""
rows = st.lists(st.lists(st.sampled_from(CONTENTS), min_size=1, max_size=4), min_size=6, max_size=10)


def answer(conversations: Conversations, messages: list[dict[str, Any]], turns: list[int]) -> Any:
    try:
        return conversations(messages, None, turns)
    except TurnNotFound:
        return "not found"


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(parts, min_size=1, max_size=3).map("".join), rows)
def test_generated_templates_are_followed_exactly(body: str, chosen: list[list[str]]) -> None:
    try:
        template = ChatTemplate(TEMPLATE.replace("PARTS", body), {})
    except TemplateFailed:
        return  # a break outside of the loop
    used, fresh = Conversations(template, MARKS), Conversations(template, MARKS)
    for contents in chosen:
        messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(contents)]
        turns = [at for at in range(len(messages)) if at % 2 and contents[at]]
        try:
            text = template.render(messages)
        except TemplateFailed:
            continue
        assert used(messages, None, [])[0] == text
        fresh._kept.clear()
        assert answer(used, messages, turns) == answer(fresh, messages, turns)


@pytest.mark.parametrize("name", sorted(set(dir(str)) - set(dir(object))))
def test_a_stand_in_answers_every_method_of_a_text_itself(name: str) -> None:
    assert name in vars(StandIn) or name == "__getnewargs__"
