"""The tokenizer of a model folder: what it reads, what it writes, and what it never imports."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from data.kit import CHATML, byte_level, chat, load, trained

from trainwire_engine.template import TemplateFailed
from trainwire_engine.tokenizer import Tokenizer
from trainwire_protocol.errors import ConfigInvalid, ModelLoadFailed

MESSAGES = [{"role": "user", "content": "a"}]


def folder_with(folder: Path, settings: dict[str, Any], **files: Any) -> Path:
    """A model folder; `files` are JSON values or texts by name without ending."""
    folder.mkdir(exist_ok=True)
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, value in files.items():
        text = isinstance(value, str)
        (folder / f"{name}{'.jinja' if text else '.json'}").write_text(value if text else json.dumps(value))
    return folder


def test_transformers_is_not_imported(tmp_path: Path) -> None:
    folder_with(tmp_path, {"eos_token": "<|im_end|>", "chat_template": CHATML})
    (tmp_path / "rows.jsonl").write_text(json.dumps(chat("user: a", "assistant: b")) + "\n")
    script = f"""
import sys
from pathlib import Path
from trainwire_engine.data import load_dataset
from trainwire_engine.tokenizer import Tokenizer
from trainwire_protocol.config import Config
config = Config(model="m", data={str(tmp_path / "rows.jsonl")!r}, cache_dir={str(tmp_path / "cache")!r})
dataset = load_dataset(config, Tokenizer.from_folder({str(tmp_path)!r}), "train", lambda *_: None, 1000)
assert len(dataset) == 1
heavy = {{"transformers", "torch", "mlx", "mlx_lm", "datasets", "pyarrow"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240)


def test_ends_come_from_the_settings_and_the_model(tmp_path: Path) -> None:
    end, start = byte_level().token_to_id("<|end|>"), byte_level().token_to_id("<|im_end|>")
    tokenizer = Tokenizer.from_folder(
        folder_with(tmp_path / "a", {"eos_token": {"content": "<|im_end|>"}}, generation_config={"eos_token_id": [end]})
    )
    assert (tokenizer.eos_id, tokenizer.eos_ids, tokenizer.pad_id) == (start, {end, start}, start)
    tokenizer = Tokenizer.from_folder(
        folder_with(tmp_path / "b", {"pad_token": "<think>"}, config={"eos_token_id": end})
    )
    assert (tokenizer.eos_id, tokenizer.special_tokens["eos_token"]) == (end, "<|end|>")
    assert tokenizer.decode([tokenizer.pad_id]) == "<think>"


def test_the_newest_kind_of_template_file_wins(tmp_path: Path) -> None:
    settings = {"chat_template": "settings"}
    assert Tokenizer.from_folder(folder_with(tmp_path / "a", settings)).render(MESSAGES) == "settings"
    folder = folder_with(tmp_path / "b", {}, chat_template={"chat_template": "json"})
    assert Tokenizer.from_folder(folder).render(MESSAGES) == "json"
    assert Tokenizer.from_folder(folder_with(tmp_path / "b", settings)).render(MESSAGES) == "settings"
    folder = folder_with(tmp_path / "c", settings, chat_template="jinja")
    assert Tokenizer.from_folder(folder).render(MESSAGES) == "jinja"


def test_templates_have_names_and_one_is_for_tools(tmp_path: Path) -> None:
    named = [{"name": name, "template": name} for name in ("default", "tool_use", "rag")]
    folder = folder_with(tmp_path / "m", {"chat_template": named})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.render(MESSAGES) == "default"
    assert tokenizer.render(MESSAGES, [{"name": "f"}]) == "tool_use"
    assert Tokenizer.from_folder(folder, "rag").render(MESSAGES) == "rag"


def test_a_template_is_given_as_text_or_as_a_file(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", {"chat_template": "own", "bos_token": "<|end|>"})
    file = tmp_path / "other.jinja"
    file.write_text("{{ bos_token }}é{{ word }}")
    assert Tokenizer.from_folder(folder, str(file), {"word": "!"}).render(MESSAGES) == "<|end|>é!"
    assert Tokenizer.from_folder(folder, "{{ word }}", {"word": "!"}).render(MESSAGES) == "!"
    with pytest.raises(ConfigInvalid, match="neither a template nor a file"):
        Tokenizer.from_folder(folder, str(tmp_path / "none.jinja"))
    with pytest.raises(ConfigInvalid, match="does not compile in line 2"):
        Tokenizer.from_folder(folder, "{% if a %}\n{% endfor %}")


@pytest.mark.parametrize(
    ("template", "words", "line"),
    [
        ("\n{{ raise_exception('no system turns') }}", "no system turns", 2),
        ("{{ messages[3].content }}", "has no element 3", 1),
        ("\n\n{{ messages[0].content + 1 }}", "TypeError", 3),
        ("{{ messages.__class__ }}", "", None),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses", None),
        ("{% set n = namespace() %}{% set n._x = 1 %}", "_x", 1),
        ("{{ messages.append(1) }}", "", 1),
    ],
)
def test_a_template_that_fails_says_why_and_where(tmp_path: Path, template: str, words: str, line: int | None) -> None:
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path / "m", {}), template)
    if template == "{{ messages.__class__ }}":
        assert tokenizer.render(MESSAGES) == ""
        return
    with pytest.raises(TemplateFailed) as caught:
        tokenizer.render(MESSAGES)
    assert words in caught.value.message
    assert caught.value.line == line


def test_the_time_of_a_template_stands_still(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", {"chat_template": "{{ strftime_now('%Y-%m-%d %H:%M') }}"})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.tells_time
    assert tokenizer.render(MESSAGES) == datetime.now().strftime("%Y-%m-%d 00:00")
    then = Tokenizer.from_folder(folder, now=datetime(2025, 3, 4))
    assert then.render(MESSAGES) == "2025-03-04 00:00"
    assert then.digest != tokenizer.digest
    assert then.digest == Tokenizer.from_recipe(then.recipe or {}).digest
    assert not Tokenizer.from_folder(folder, "{{ 1 }}").tells_time


def test_settings_of_the_file_that_cut_or_pad_are_switched_off(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", {"chat_template": CHATML})
    backend = byte_level()
    backend.enable_truncation(5)
    backend.enable_padding(length=9)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    assert len(tokenizer.encode("a" * 20)) == 20
    assert len(tokenizer.encode("a")) == 1


def test_tokens_that_only_the_settings_know_are_added(tmp_path: Path) -> None:
    size = byte_level().get_vocab_size()
    added = {str(size): {"content": "<|new|>", "special": True}, str(size + 1): {"content": "<|newer|>"}}
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path / "m", {"added_tokens_decoder": added}))
    assert tokenizer.encode("<|new|>a<|newer|>") == [size, *tokenizer.encode("a"), size + 1]


def test_marks_before_plain_text_are_kept_and_not_doubled(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    folder = folder_with(tmp_path / "m", {"eos_token": "<|im_end|>"})
    backend = byte_level()
    start = backend.token_to_id("<|im_start|>")
    backend.post_processor = TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", start)])
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.text_prefix == [start]
    assert tokenizer.encode("a")[0] != start
    dataset = load(tmp_path, [{"text": "a"}, {"text": "<|im_start|>a"}], tokenizer)
    assert dataset.tokens(0).tolist() == dataset.tokens(1).tolist()
    assert trained(dataset, tokenizer) == ["a<|im_end|>"]


def test_a_saved_folder_gives_the_same_tokenizer(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", {"eos_token": "<|im_end|>", "chat_template": "own"})
    tokenizer = Tokenizer.from_folder(folder, CHATML)
    tokenizer.save(tmp_path / "saved")
    again = Tokenizer.from_folder(tmp_path / "saved")
    assert again.render(MESSAGES, add_generation_prompt=True) == tokenizer.render(MESSAGES, add_generation_prompt=True)
    assert again.digest == tokenizer.digest
    assert {file.name for file in (tmp_path / "saved").iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }


def test_a_folder_without_or_with_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadFailed, match="is no tokenizer"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelLoadFailed, match=r"tokenizer_config\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)
