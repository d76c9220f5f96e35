"""What `trainwire demo` decides before it needs an engine."""

import json
import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from trainwire_cli.demo import HEADER, MODELS, _write_config
from trainwire_protocol.config_load import build_config


@pytest.mark.parametrize("name", MODELS)
def test_the_embedded_config_is_valid_and_its_paths_are_there(name: str, tmp_path: Path) -> None:
    file = tmp_path / 'a "quoted" folder' / "demo.toml"
    rows = _write_config(file, MODELS[name].config, tmp_path / "model", file.with_name("demo"), None)
    assert rows >= 300
    assert file.read_text().startswith(HEADER)
    config = build_config(tomllib.loads(file.read_text()), file.parent)
    assert config.run_dir == str(file.with_name("demo"))
    assert isinstance(config.data, str)
    assert Path(config.data).is_file()
    assert Path(str(config.valid_data)).is_file()
    assert config.eval_at_start, "without it there is no generation before the first step"
    assert config.generate_every > 0


def test_steps_replace_the_length_that_the_config_names(tmp_path: Path) -> None:
    for name, choice in MODELS.items():
        file = tmp_path / f"{name}.toml"
        _write_config(file, choice.config, tmp_path, tmp_path / name, 3)
        config = build_config(tomllib.loads(file.read_text()), tmp_path)
        assert (config.max_steps, config.num_epochs) == (3, 1)


def test_the_small_model_is_asked_what_it_is_taught() -> None:
    text = (files("trainwire_cli") / "demo_data" / "train.jsonl").read_text()
    taught = {json.loads(line)["messages"][0]["content"] for line in text.splitlines()}
    values = tomllib.loads(MODELS["small"].config.format(model='""', data='""', valid_data='""', run_dir='""'))
    assert set(values["prompts"]) <= taught


def test_a_config_that_the_demo_did_not_write_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text("model = 'm'\n")
    refused = subprocess.run(
        [sys.executable, "-m", "trainwire_cli", "demo", "--out", tmp_path / "mine"], capture_output=True, text=True
    )
    assert (refused.returncode, refused.stdout) == (3, "")
    assert refused.stderr.count("\n") == 1
    assert "--out" in refused.stderr
    assert mine.read_text() == "model = 'm'\n"
    assert sorted(tmp_path.iterdir()) == [mine]


@pytest.mark.parametrize("words", [["--steps", "0"], ["--model", "gpt"], ["extra"]])
def test_wrong_arguments_exit_with_2(words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainwire_cli", "demo", *words]
    refused = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert list(tmp_path.iterdir()) == []
