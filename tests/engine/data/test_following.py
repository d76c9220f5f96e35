"""Templates are followed once for each structure, and never wrongly."""

from __future__ import annotations

import random
from typing import Any

import pytest
from data.kit import CHATML, MARKS
from data.test_masks import ALTERNATING, FORGETS, MARKED, MERGED, PARTS, THINKING, TOOLS, TRIMMED

from trainwire_engine.data.conversations import Conversations
from trainwire_engine.data.recorder import Untraceable
from trainwire_engine.data.traced_template import TracedTemplate
from trainwire_engine.data.turns import TurnNotFound
from trainwire_engine.template import ChatTemplate, TemplateFailed
from trainwire_protocol.errors import Internal

FOLLOWED = {
    "chatml": CHATML,
    "thinking": THINKING,
    "merged": MERGED,
    "marked": MARKED,
    "tools": TOOLS,
    "parts": PARTS,
    "trimmed": TRIMMED,
    "alternating": ALTERNATING,
    "joined": "{% for m in messages %}{{ [m.role, m.content] | join(': ') ~ '|' }}{% endfor %}",
    "asked": "{% for m in messages %}{{ m.role }}{% if m.content == 'b' or m.content in ['c'] %}!{% endif %}"
    "{% if m.content.find('x') > 1 %}?{% endif %}{{ m.content[1:] if m.content[0] == ' ' else m.content }}{% endfor %}",
    "json": "{% for m in messages %}{{ m | tojson }}{{ {'x': [m.content]} | tojson(ensure_ascii=True) }}{% endfor %}",
    "macros": "{% macro put(x) %}{% if x is string %}{{ x }}{% elif x is iterable %}-{% endif %}{% endmacro %}"
    "{% for m in messages %}{% set c = put(m.content) | trim %}{{ m.role }}"
    "{% if c.startswith('a') %}A{% endif %}{% set t %}{{ c }}.{% endset %}{{ t.upper() }}{% endfor %}",
    "replaced": "{% for m in messages %}{{ m.role + (m.content | replace('a', 'o')).lower() }}{% endfor %}",
    "set": "{% for m in messages %}{% set c = m.content %}{% set r = '' %}{{ r.strip('x') + c }}{% endfor %}",
    "split": "{% for m in messages %}{% for part in m.content.split('b') %}({{ part }}){% endfor %}{% endfor %}",
}
CONTENTS = ["a", "b", "c", "", " ", " a ", "\n", "x", "axx", "</think>", "<think>q</think>b", "ab\nb", '"é"', "Qz0zQw7"]


def conversation(chance: random.Random) -> list[dict[str, Any]]:
    roles = ["user", "assistant"] * chance.randrange(1, 3)
    return [{"role": role, "content": chance.choice(CONTENTS)} for role in roles]


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_is_followed_is_what_the_template_renders(name: str) -> None:
    template = ChatTemplate(FOLLOWED[name], {})
    conversations = Conversations(template, MARKS)
    chance = random.Random(5)
    for _ in range(400):
        messages = conversation(chance)
        try:
            text, spans = conversations(messages, None, [])
        except TemplateFailed:
            continue
        assert text == template.render(messages)
        assert spans == [] or template.has_generation_marks
    assert conversations._kept


def test_rows_of_one_structure_run_the_template_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(THINKING, {})
    conversations = Conversations(template, MARKS)
    rendered: list[int] = []
    real = template.render
    monkeypatch.setattr(template, "render", lambda *a: rendered.append(1) or real(*a))
    monkeypatch.setattr("trainwire_engine.data.conversations._is_checked", lambda uses: False)
    for i in range(500):
        reply = f"<think>\n{i}\n</think>\n\n{i}" if i % 2 else f"yes {i}"
        messages = [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": reply}]
        text, [(start, end)] = conversations(messages, None, [1])
        thought = str(i) if i % 2 else ""
        content = str(i) if i % 2 else f"yes {i}"
        assert text[start:end] == f"<think>\n{thought}\n</think>\n\n{content}<|im_end|>"
    assert len(rendered) <= 2


def test_a_template_followed_wrongly_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(CHATML, {})
    conversations = Conversations(template, MARKS)
    monkeypatch.setattr("trainwire_engine.data.conversations._is_checked", lambda uses: uses == 5)
    messages = [{"role": "user", "content": "a"}]
    conversations(messages, None, [])
    monkeypatch.setattr(template, "render", lambda *_: "other")
    for _ in range(4):
        conversations(messages, None, [])
    with pytest.raises(Internal, match="followed wrongly"):
        conversations(messages, None, [])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | map(attribute='content') | batch(2) }}",
        "{{ messages[0].content is sameas 'a' }}",
        "{% autoescape true %}{{ messages[0].content }}{% endautoescape %}",
        "{{ 'a' in messages[0].content in 'abc' }}",
        "{{ messages[0].content | safe }}",
        "{{ messages[0].content | indent }}",
    ],
)
def test_templates_that_look_at_contents_unseen_are_not_followed(source: str) -> None:
    with pytest.raises(Untraceable):
        TracedTemplate(ChatTemplate(source, {}))


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% for letter in m.content %}[{{ letter }}]{% endfor %}{% endfor %}",
        "{% for m in messages %}{{ m.content.center(9) }}{% endfor %}",
        "{% for m in messages %}{{ {m.content: 1} }}{% endfor %}",
        "{% for m in messages %}{{ m.content < 'b' }}{% endfor %}",
        "{{ messages[0].content == messages[1].content }}",
        "{% set s = '{}' %}{{ s.format(messages[0].content) }}",
    ],
)
def test_templates_that_do_more_with_contents_are_rendered_each_time(source: str) -> None:
    template = ChatTemplate(source, {})
    conversations = Conversations(template, MARKS)
    chance = random.Random(6)
    for _ in range(60):
        messages = conversation(chance)
        assert conversations(messages, None, [])[0] == template.render(messages)


def test_words_reserved_for_finding_turns_in_a_tool_are_never_mistaken() -> None:
    conversations = Conversations(ChatTemplate(TOOLS, {}), MARKS)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(TurnNotFound):
        conversations(messages, [{"name": "Qz1zQw7"}], [1])


def test_structures_and_answers_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwire_engine.data.conversations._STRUCTURES", 2)
    monkeypatch.setattr("trainwire_engine.data.conversations._PER_STRUCTURE", 2)
    template = ChatTemplate(FOLLOWED["split"], {})
    conversations = Conversations(template, MARKS)
    for count in range(6):
        for bars in range(6):
            messages = [{"role": "user", "content": "b" * bars}] * count
            assert conversations(messages, None, [])[0] == template.render(messages)
    assert len(conversations._kept) == 2
    assert max(map(len, conversations._kept.values())) == 2


def test_a_template_that_forgets_turns_gives_no_span() -> None:
    conversations = Conversations(ChatTemplate(FORGETS, {}), MARKS)
    messages = [{"role": role, "content": role} for role in ("user", "assistant", "user", "assistant")]
    with pytest.raises(TurnNotFound):
        conversations(messages, None, [1, 3])
