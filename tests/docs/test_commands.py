"""Every command that README.md and docs/ show is run as it stands there.

The config is README's own, for a tiny model under the name that it uses. `trainwire run` and `serve` get the scripted
engine by a shim on PATH, all else is the real thing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("mlx.core", reason="the pages' models are trained, exported and asked")

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = {
    "make ": "sets the project up, or runs these very tests",
    "pip install": "needs a network",
    "npm install": "needs a network",
    "trainwire watch": "a live view, which has tests of its own",
    "nohup": "stays behind",
    "trainwire run config.toml --ranks": "several processes, which have tests of their own",
    "trainwire run config.toml --hostfile": "several hosts",
}
EXIT = {"trainwire stop": (3,), "tail ": (0, 141)}
"""What is said of a run that is over, and what becomes of a tail whose reader has seen enough."""
OPTIONAL = ("tensorboard", "wandb")

SHIM = """#!/bin/sh
case "$1" in
  run) case "$*" in *--engine*) ;; *) set -- "$@" --engine fake --script "$SCRIPT" ;; esac ;;
  serve) set -- "$@" --engine fake --script "$SCRIPT" ;;
esac
exec "{python}" -m trainwire_cli "$@"
"""


@dataclass(frozen=True)
class Block:
    """Fenced text of a page."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> Iterator[Block]:
    """Give the fenced blocks of these languages of all pages."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            if found[1] in languages:
                yield Block(page, text.count("\n", 0, found.start()) + 2, found[1], found[2])


def commands() -> Iterator[tuple[str, str]]:
    """Give place and text of each command; unnamed blocks count where they begin with the program's name."""
    for block in blocks("sh", ""):
        if block.language or block.text.startswith("trainwire "):
            lines = block.text.replace("\\\n", "").splitlines()
            for number, line in enumerate(lines, block.line):
                if line.strip() and not line.startswith("#"):
                    yield f"{block.page.relative_to(ROOT)}:{number}", line


def named(language: str) -> dict[str, str]:
    """Give the blocks whose first line is a file's name, by that name."""
    files = {}
    for block in blocks(language):
        first, _, rest = block.text.partition("\n")
        if found := re.fullmatch(r"(?:#|//) (\S+\.\w+)", first):
            files[found[1]] = rest
    return files


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages speak of: model, data, config, a finished run."""
    sys.path[:0] = [str(ROOT / "tests/engine"), str(ROOT / "tests/e2e")]
    try:
        from tiny import tiny_model
        from whole import write_chat
    finally:
        del sys.path[:2]
    folder = tmp_path_factory.mktemp("docs")
    tiny_model(folder / "models/Qwen3-0.6B")
    (folder / "data").mkdir()
    write_chat(folder / "data/chat.jsonl", 24)
    for name, text in {**named("toml"), **named("python")}.items():
        (folder / name).write_text(text)
    shutil.copy(folder / "chat.toml", folder / "config.toml")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "script.json").write_text(json.dumps({"step_ms": 0, "valid_examples": 8}))
    shim = folder / "bin/trainwire"
    shim.parent.mkdir()
    shim.write_text(SHIM.format(python=sys.executable))
    shim.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "trainwire_cli", "run", "chat.toml", "max_steps=3"],
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
    return folder


def environment(folder: Path) -> dict[str, str]:
    """The surroundings of a command: the shim first, the installed tools behind it, no network."""
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    own = {"PATH": path, "SCRIPT": str(folder / "script.json"), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    return {**os.environ, **own, "PYTHONSAFEPATH": "1", "XDG_CACHE_HOME": str(folder / "cache")}


@pytest.fixture
def place(base: Path, tmp_path: Path) -> Path:
    """A copy of the base for one command."""
    copy = tmp_path / "copy"
    shutil.copytree(base, copy, symlinks=True)
    return copy


@pytest.mark.parametrize("where", [pytest.param((at, text), id=at) for at, text in commands()])
def test_a_command_that_a_page_shows_works_as_shown(place: Path, where: tuple[str, str]) -> None:
    at, text = where
    for start, reason in NOT_RUN.items():
        if text.startswith(start):
            pytest.skip(f"{start.strip()}: {reason}")
    for package in OPTIONAL:
        if package in text and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if "jq" in text and shutil.which("jq") is None:
        pytest.skip("jq is not installed")
    if "trainwire run" in text.partition("#")[0]:
        shutil.rmtree(place / "runs")
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", text],
        cwd=place,
        env=environment(place),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=240,
    )
    wanted = next((code for start, code in EXIT.items() if text.startswith(start)), (0,))
    assert done.returncode in wanted, f"{at}: {done.stderr.decode()}"
    shown = done.stdout.decode()
    if target := re.search(r"> (\w\S*)$", text):
        shown = (place / target[1]).read_text()
    if "|" in text and "warn" not in text and "/dev/null" not in text:
        assert shown.strip(), at
    if "| jq" in text and "@csv" in text:
        assert re.fullmatch(r"(\d+,[\d.e-]+,[\d.e-]+\n){200}", shown)


def test_the_recipe_for_a_bad_loss_fails_when_there_is_one(place: Path) -> None:
    if shutil.which("jq") is None:
        pytest.skip("jq is not installed")
    (recipe,) = [text for _, text in commands() if "jq -e -n" in text]
    (place / "script.json").write_text(json.dumps({"step_ms": 0, "acts": [{"do": "non_finite", "step": 5}]}))
    shutil.rmtree(place / "runs")
    done = subprocess.run(["bash", "-c", recipe], cwd=place, env=environment(place), stdin=subprocess.DEVNULL)
    assert done.returncode == 1


def test_every_option_and_command_that_a_page_names_exists() -> None:
    from trainwire_cli.main import COMMANDS
    from trainwire_protocol.config import FIELDS

    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert set(re.findall(r"`trainwire (\w+)", text)) <= {*COMMANDS}
    assert all(f"`trainwire {name}" in text or f"\ntrainwire {name} " in text for name in ("validate", "generate"))
    for key in re.findall(r"`(\w+) = [^`]+`", text):
        assert key in FIELDS or key in ("lora_alpha",), key


def test_every_exit_code_is_explained_to_people() -> None:
    from trainwire_protocol import errors

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme[readme.index("| exit | what it means") :].partition("\n\n")[0]
    shown = {int(code) for codes in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE) for code in codes.split(",")}
    fatal = {kind.exit_code for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "exit_code")}
    assert shown == {0, 2, 20, 21, 129, 130, 143} | {code for code in fatal if code is not None}
