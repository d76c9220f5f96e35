"""The model that `trainwire demo` makes: whole, the same each time, and ready to be trained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from trainwire_engine import demo_model
from trainwire_engine.loading import load_module
from trainwire_engine.model_folder import MARKER
from trainwire_engine.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "model"
    assert demo_model.make(path, demo_model.bundled_rows())
    return path


def rows() -> list[list[dict[str, str]]]:
    text = demo_model.bundled_rows().read_text(encoding="utf-8")
    return [json.loads(line)["messages"] for line in text.splitlines()]


def test_the_folder_has_what_mlx_lm_wants(folder: Path) -> None:
    from mlx_lm import load

    model, tokenizer = load(str(folder))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "What is seq?"}], add_generation_prompt=True)
    assert tokenizer.decode(ids) == "<|user|>What is seq?<|end|><|assistant|>"
    assert tokenizer.eos_token_ids == {tokenizer.eos_token_id} == {0}
    assert model(mx.array([ids])).shape == (1, len(ids), demo_model.VOCABULARY)


def test_the_same_rows_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    demo_model.make(tmp_path / "again", demo_model.bundled_rows())
    for path in folder.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_a_whole_folder_is_reused_and_other_rows_make_another(folder: Path, tmp_path: Path) -> None:
    assert not demo_model.make(folder, demo_model.bundled_rows())
    few = tmp_path / "few.jsonl"
    few.write_text("".join(demo_model.bundled_rows().read_text().splitlines(keepends=True)[:40]))
    assert demo_model.make(tmp_path / "model", few)
    assert not demo_model.make(tmp_path / "model", few)
    assert demo_model.make(tmp_path / "model", demo_model.bundled_rows())
    assert json.loads((tmp_path / "model" / MARKER).read_text()) == json.loads((folder / MARKER).read_text())


def test_every_row_survives_the_tokenizer_and_fits(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    for row in rows():
        text = tokenizer.render(row)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert len(ids) <= 128
    assert tokenizer.encode("\u00fc\u20ac")


def test_the_untrained_model_guesses_and_trains_without_blowing_up(folder: Path) -> None:
    module, _ = load_module(folder)
    tokenizer = Tokenizer.from_folder(folder)
    ids = mx.array([tokenizer.encode(tokenizer.render(rows()[0]))])

    def loss(model: nn.Module) -> mx.array:
        return nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:], reduction="mean")

    value, gradients = nn.value_and_grad(module, loss)(module)
    assert 6.5 < value.item() < 8.5
    norms = [mx.linalg.norm(gradient.reshape(-1)).item() for _, gradient in tree_flatten(gradients)]
    assert all(0 < norm < 10 for norm in norms)


def test_as_a_command_it_says_nothing_and_fails_with_a_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainwire_engine.demo_model"]
    made = subprocess.run([*command, tmp_path / "model"], capture_output=True, text=True)
    assert (made.returncode, made.stdout, made.stderr) == (0, "", "")
    assert (tmp_path / "model" / "model.safetensors").is_file()
    (tmp_path / "bad.jsonl").write_text('{"text": "no chat"}\n')
    refused = subprocess.run([*command, tmp_path / "other", tmp_path / "bad.jsonl"], capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (3, "")
    assert "bad.jsonl" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "other").exists()
