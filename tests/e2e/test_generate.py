"""`trainwire generate`: a checkpoint answers as the run's own generations did."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from whole import ENVIRONMENT, Session, trainwire, write_config

PROMPT = "say 3"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ opening }}{% endif %}"
)


def trained(base: Path, folder: Path, *words: str, **values: object) -> Session:
    """Train with a prompt that is answered before the first and after the last update."""
    config = {
        "model": str(base / "model"),
        "data": str(base / "chat.jsonl"),
        "cache_dir": str(base / "cache"),
        "learning_rate": 3e-2,
        "max_steps": 6,
        "warmup_steps": 0,
        "prompts": [PROMPT],
        "generate_every": 6,
        "generate_max_tokens": 16,
        "eval_at_start": True,
        **values,
    }
    session = trainwire("run", write_config(folder / "c.toml", **config), *words)
    assert session.exit_code == 0, session.stderr
    return session


def generate(checkpoint: str, *words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run `trainwire generate` with the same length as the run's generations."""
    command = [sys.executable, "-m", "trainwire_cli", "generate", checkpoint, "--max-tokens", "16", *words]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=ENVIRONMENT, timeout=240)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_answers_are_those_of_the_run_before_and_after(base: Path, tmp_path: Path, method: str) -> None:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    words = ["chat_template=template.jinja", 'chat_template_args={opening="number"}'] if method == "lora" else []
    session = trained(base, tmp_path, *words, method=method)
    before, after = session.of("generation")
    assert before["completion"] != after["completion"]
    final = session.one("end")["checkpoint"]
    (tmp_path / "template.jinja").unlink()
    assert generate(final, "--prompt", PROMPT).stdout == after["completion"] + "\n"
    assert generate(final, "--prompt", PROMPT, "--base").stdout == before["completion"] + "\n"
    assert generate(final, stdin=PROMPT + "\n").stdout == after["completion"] + "\n"


@pytest.fixture(scope="module")
def checkpoint(base: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A trained adapter."""
    return str(trained(base, tmp_path_factory.mktemp("trained"), max_steps=2).one("end")["checkpoint"])


def test_a_seed_gives_the_same_draws_again(checkpoint: str) -> None:
    first, again, other = (
        generate(checkpoint, "--prompt", PROMPT, "--temperature", "1.5", "--seed", seed).stdout for seed in "112"
    )
    assert first == again
    assert first != other


def test_a_folder_that_is_no_checkpoint_is_one_sentence(tmp_path: Path) -> None:
    done = generate(str(tmp_path), "--prompt", PROMPT)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert "is no checkpoint" in done.stderr


def test_a_chat_on_a_terminal_goes_on_after_ctrl_c_and_ends_with_ctrl_d(checkpoint: str) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "trainwire_cli", "generate", checkpoint, "--max-tokens", "100000"]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=ENVIRONMENT, start_new_session=True
    )
    os.close(theirs)
    seen = b""

    def until(text: bytes) -> None:
        nonlocal seen
        deadline = time.monotonic() + 90
        while text not in seen:
            ready, _, _ = select.select([ours], [], [], deadline - time.monotonic())
            assert ready, seen
            seen += os.read(ours, 4096)
        seen = seen.split(text, 1)[1]

    try:
        until(b"> ")
        for _ in range(2):
            os.write(ours, b"say 1\n")
            until(b"say 1\r\n")
            # Some of the answer, so that the signal meets it in the middle.
            while len(seen) < 20 and b"> " not in seen:
                seen += os.read(ours, 4096)
            if b"> " not in seen:
                os.killpg(process.pid, signal.SIGINT)
            until(b"> ")
        os.write(ours, b"\x04")
        assert process.wait(90) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
