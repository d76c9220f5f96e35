"""Lets a checkpoint's model answer: `python -m trainwire_engine.talk CHECKPOINT [--prompt TEXT]`.

Without a prompt it is a chat on a terminal, and elsewhere the prompt is what stdin holds. Template, template
arguments and the day that a template may tell are those of the run.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from trainwire_engine import memory, native
from trainwire_engine.batches import mix
from trainwire_engine.export import open_checkpoint
from trainwire_engine.failures import as_error, tell
from trainwire_engine.generate import Prompt, prompt_tokens
from trainwire_engine.model import Model, load_model
from trainwire_engine.sampler import answer_tokens
from trainwire_engine.tokenizer import Tokenizer
from trainwire_protocol.config import Config
from trainwire_protocol.errors import TrainwireError
from trainwire_protocol.printable import printable

UNFINISHED = "\ufffd"
"""What a decoder puts where the bytes of a character are not all there yet."""


@dataclass(frozen=True)
class Speaker:
    """A model that answers, with how it is to answer."""

    model: Model
    tokenizer: Tokenizer
    max_tokens: int
    temperature: float
    seed: int
    adapter: bool

    def answer(self, prompt: Prompt, turn: int = 0) -> Iterator[str]:
        """Give the answer piece by piece, in whole characters."""
        ids = prompt_tokens(self.tokenizer, prompt)
        said: list[int] = []
        shown = 0
        seed = self.seed if turn == 0 else mix(self.seed, turn)
        how: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": seed}
        for (token,) in answer_tokens(self.model, [ids], self.tokenizer.eos_ids, adapter=self.adapter, **how):
            if token is None:
                continue
            said.append(token)
            text = self.tokenizer.decode(said)
            if not text.endswith(UNFINISHED):
                yield text[shown:]
                shown = len(text)
        yield self.tokenizer.decode(said)[shown:]


def load(checkpoint: Path, *, base: bool) -> tuple[Model, Tokenizer]:
    """Load a checkpoint's model, or with `base` the one it was trained from, and the run's tokenizer.

    Raises NotFound for a folder that is no whole checkpoint, and ModelLoadFailed.
    """
    state = open_checkpoint(checkpoint).state
    config = msgspec.convert({**state["config"], "trainable_dtype": "model", "start_from": None}, Config)
    if not base and config.method == "full":
        config = msgspec.structs.replace(config, model=str(checkpoint), revision=None)
    elif not base:
        config = msgspec.structs.replace(config, start_from=str(checkpoint))
    model = load_model(config)
    # The file or the text that the config names is in the checkpoint, as it was.
    template = None if config.chat_template is None else str(checkpoint / "chat_template.jinja")
    now = datetime.fromisoformat(state["data_time"])
    return model, Tokenizer.from_folder(model.folder, template, config.chat_template_args, now)


def say(speaker: Speaker, prompt: Prompt, turn: int = 0) -> str:
    """Print an answer as it comes; returns it, as far as it came if Ctrl-C ended it."""
    whole = ""
    safe = sys.stdout.isatty()
    try:
        for piece in speaker.answer(prompt, turn):
            whole += piece
            print(printable(piece) if safe else piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" …", end="")
    print(flush=True)
    return whole


def chat(speaker: Speaker) -> int:
    """Talk until the end of input: each answer sees what was said before, if the model has a chat template."""
    print("Ctrl-C ends an answer, Ctrl-D the chat.", file=sys.stderr)
    said: list[dict[str, Any]] = []
    turn = 0
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if not text:
            continue
        messages = [*said, {"role": "user", "content": text}]
        try:
            answer = say(speaker, Prompt(text, tuple(messages) if speaker.tokenizer.has_template else None), turn)
        except TrainwireError as error:
            print(f"trainwire: {error.message}", file=sys.stderr)
            continue
        said = [*messages, {"role": "assistant", "content": answer}]
        turn += 1


def main(words: list[str] | None = None) -> int:
    """Answer or chat; the exit status: 0, 130 after Ctrl-C, or that of the error."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser(
        prog="trainwire generate", description=__doc__.split("\n\n")[1], allow_abbrev=False
    )
    add = parser.add_argument
    add("checkpoint", type=Path, help="a checkpoint folder, for instance runs/chat/final")
    add("--prompt", metavar="TEXT", help="one question; without it: a chat, or the text on stdin")
    add("--max-tokens", type=int, default=256, metavar="N", help="longest answer (default: 256)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    add("--seed", type=int, default=0, metavar="N", help="of the draws at a temperature above 0")
    add("--base", action="store_true", help="ask the model that the training began from")
    chosen = parser.parse_args(words)
    if chosen.max_tokens < 1 or not 0 <= chosen.temperature < float("inf"):
        parser.error("--max-tokens must be positive, --temperature not negative")
    try:
        native.prepare()
        memory.configure()
        model, tokenizer = load(chosen.checkpoint.absolute(), base=chosen.base)
        adapter = not (chosen.base and model.method != "full")
        speaker = Speaker(model, tokenizer, chosen.max_tokens, chosen.temperature, chosen.seed, adapter)
        if chosen.prompt is None and sys.stdin.isatty():
            return chat(speaker)
        text = sys.stdin.read().strip() if chosen.prompt is None else chosen.prompt
        say(speaker, Prompt(text))
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return tell(as_error(error))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A driver's teardown can hang, and there is nothing left to do.
    os._exit(status)
