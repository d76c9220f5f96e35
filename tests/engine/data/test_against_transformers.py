"""Templates render, and masks fall, as in transformers, which is not needed anywhere else."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.kit import byte_level, load, tokenizer_with
from data.test_masks import CALL, CHATML, MARKED, MERGED, PARTS, TALK, THINKING, TOOLS, tool_row

from trainwire_engine.tokenizer import Tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")

CONVERSATIONS: list[dict[str, Any]] = [
    TALK,
    {"messages": TALK["messages"][1:]},
    {"messages": [*TALK["messages"][1:4], {"role": "assistant", "content": "<think>\nso\n</think>\n\nFour."}]},
    {"messages": [*TALK["messages"][1:4], {"role": "assistant", "content": "4", "reasoning_content": "so"}]},
    tool_row(content="Wait. ", tool_calls=[CALL]),
    {"messages": [{"role": "user", "content": " é\u2028日本 '\"<&>\t "}, {"role": "assistant", "content": "\n🙂 \n"}]},
]
TEMPLATES = {
    "chatml": CHATML,
    "thinking": THINKING,
    "merged": MERGED,
    "marked": MARKED,
    "tools": TOOLS,
    "parts": PARTS,
    "dated": "{{ strftime_now('%d %B %Y') }}{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{{ m | tojson(indent=2) }}{{ m.content | tojson(ensure_ascii=True) }}{% endfor %}",
    "blocks": "  {% set text %}[{{ messages | length }}]{% endset %}\n  {{ text ~ '!' }}\n  {# none #}\n"
    "{% macro put(m) %}{{ m.content | trim | upper }}{% endmacro %}\n"
    "    {% for m in messages if m.role != 'system' %}\n{{ put(m) }}\n    {% endfor %}\nend\n",
}


def reference(template: str | None = None, folder: Path | None = None) -> Any:
    if folder is not None:
        return transformers.AutoTokenizer.from_pretrained(str(folder))
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|im_end|>")
    made.chat_template = template
    return made


@pytest.mark.parametrize("name", TEMPLATES)
def test_small_templates_render_alike(name: str) -> None:
    ours, theirs = tokenizer_with(TEMPLATES[name]), reference(TEMPLATES[name])
    for row in CONVERSATIONS:
        for prompt in (False, True):
            given = {"tools": row.get("tools"), "add_generation_prompt": prompt}
            assert ours.render(row["messages"], **given) == theirs.apply_chat_template(
                row["messages"], tokenize=False, **given
            )


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gemma3", "deepseek_v3"])
def test_real_tokenizers_render_and_encode_alike(
    real_tokenizer: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    folder = real_tokenizer(name)
    ours, theirs = Tokenizer.from_folder(folder), reference(folder=folder)
    rows = [row for row in CONVERSATIONS if name == "qwen3" or "tools" not in row]
    dataset = load(tmp_path, rows, ours)
    assert len(dataset) == len(rows)
    for index, row in enumerate(rows):
        given = {"tools": row.get("tools")}
        assert ours.render(row["messages"], **given) == theirs.apply_chat_template(
            row["messages"], tokenize=False, **given
        )
        ids = theirs.apply_chat_template(row["messages"], return_dict=True, **given)["input_ids"]
        assert dataset.tokens(index).tolist() == list(ids)
    assert (ours.eos_id, ours.bos_id) == (theirs.eos_token_id, theirs.bos_token_id)
    if name != "deepseek_v3":  # its settings name a class that does not fit its tokenizer.json
        assert ours.text_prefix + ours.encode("one two") == theirs("one two")["input_ids"]


MARKED_WHOLE = MARKED.replace("+ '<|im_end|>' }}{% endgen", "+ '<|im_end|>\\n' }}{% endgen").replace("{{ '\\n' }}", "")


@pytest.mark.parametrize("template", [MARKED, MARKED_WHOLE])
def test_generation_marks_give_the_mask_of_transformers(tmp_path: Path, template: str) -> None:
    ours, theirs = tokenizer_with(template), reference(template)
    rows = [row for row in CONVERSATIONS if "tools" not in row]
    dataset = load(tmp_path, rows, ours)
    for index, row in enumerate(rows):
        found = theirs.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
        assert dataset.tokens(index).tolist() == found["input_ids"]
        assert np.flatnonzero(dataset.mask(index)).tolist() == np.flatnonzero(found["assistant_masks"]).tolist()
