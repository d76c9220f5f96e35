"""Small tokenizers with any template, data files of any rows, and trained text made visible."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from trainwire_engine.data import Dataset, Notice, load_dataset
from trainwire_engine.tokenizer import Tokenizer
from trainwire_protocol.config import Config

MARKS = ("<|end|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

WORDS = "system user assistant tool the a question answer is of and to in what does it say yes no hello four . , ?"


def byte_level(marks: Sequence[str] = MARKS, size: int = 400) -> Backend:
    """A byte-level tokenizer with added tokens, trained on a few words."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[AddedToken(mark, special=True) for mark in marks],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([WORDS, WORDS.title()] * 4, trainer)
    return backend


def tokenizer_with(template: str | None, eos: str | None = "<|im_end|>", **arguments: Any) -> Tokenizer:
    """A tokenizer with a template; `arguments` are its chat_template_args."""
    templates = {} if template is None else {"default": template}
    settings = {} if eos is None else {"eos_token": eos}
    return Tokenizer(byte_level(), settings, templates, chat_template_args=arguments)


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """Write rows as .jsonl."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def config_for(data: Path | str | list[str], folder: Path, **keys: Any) -> Config:
    """A config that reads this data and keeps its cache in this folder."""
    data = data if isinstance(data, list) else str(data)
    return Config(**{"model": "m", "data": data, "cache_dir": str(folder / "cache"), **keys})


def load(
    folder: Path,
    rows: Iterable[Any] | Path,
    tokenizer: Tokenizer,
    notices: list[Notice] | None = None,
    vocab_size: int = 2**31 - 1,
    **keys: Any,
) -> Dataset:
    """Load rows, or a data file, as training data."""
    data = rows if isinstance(rows, Path) else write_rows(folder / "train.jsonl", rows)
    config = config_for(data, folder, **keys)
    dataset = load_dataset(config, tokenizer, "train", lambda *_: None, vocab_size, notices)
    assert dataset is not None
    return dataset


def chat(*turns: str) -> dict[str, Any]:
    """A row of messages; each turn is "role: content"."""
    pairs = [turn.split(": ", 1) for turn in turns]
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


def shown(dataset: Dataset, tokenizer: Tokenizer, index: int = 0) -> str:
    """The text of an example with its trained parts in brackets."""
    tokens, mask = dataset.tokens(index), dataset.mask(index)
    assert not mask[0]
    assert mask.sum() == dataset.trained[index]
    assert len(tokens) == dataset.lengths[index]
    return "".join(f"⟦{text}⟧" if on else text for text, on in dataset.pieces(index, tokenizer.decode))


def trained(dataset: Dataset, tokenizer: Tokenizer, index: int = 0) -> list[str]:
    """The trained parts of an example's text."""
    return [part.split("⟧")[0] for part in shown(dataset, tokenizer, index).split("⟦")[1:]]
