"""What the model answers: prompts from the config or a command, greedy or sampled from a seed of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainwire_engine.batches import plan
from trainwire_engine.model import Model
from trainwire_engine.passes import EvaluateSums
from trainwire_engine.sampler import answer_tokens
from trainwire_engine.template import TemplateFailed
from trainwire_protocol.errors import BadParams, ConfigInvalid


@dataclass(frozen=True)
class Prompt:
    """What is asked: messages, or plain text for a model without a chat template; `reference` is a good answer."""

    text: str
    messages: tuple[dict[str, Any], ...] | None = None
    reference: str | None = None


@dataclass(frozen=True)
class Completion:
    """The answer, its number of tokens without the end mark, and the time it took."""

    text: str
    tokens: int
    ms: float


def read_prompts(value: str | Sequence[str]) -> list[Prompt]:
    """Read the config's `prompts`: a list, a text file with one a line, or a .jsonl file.

    A line of a .jsonl file has `prompt` or `messages`, and may have `completion`, the reference. Raises ConfigInvalid.
    """
    if not isinstance(value, str):
        return [Prompt(text) for text in value]
    try:
        lines = Path(value).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(
            f"The file of prompts {value} cannot be read: {error}.",
            hint="prompts is a list of texts, or a file with one prompt a line.",
            key="prompts",
        ) from None
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not value.endswith(".jsonl"):
        return [Prompt(line) for _, line in numbered]
    return [_from_json(line, f"{value}:{number}") for number, line in numbered]


def _from_json(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
        messages = row.get("messages")
        if messages is not None:
            messages = tuple(messages)
        text = row["prompt"] if messages is None else str(messages[-1]["content"])
        reference = row.get("completion")
        if not isinstance(text, str) or not isinstance(reference, str | None):
            raise TypeError("prompt and completion are texts")
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ConfigInvalid(
            f"{where} is no prompt: {type(error).__name__}: {error}.",
            hint='A line is {"prompt": "…"} or {"messages": […]}, with a "completion" if there is a reference.',
            key="prompts",
        ) from None
    return Prompt(text, messages, reference)


def prompt_tokens(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids up to where the answer begins; a plain text is a user's turn if the model has a chat template.

    Raises BadParams for messages that the template refuses.
    """
    if prompt.messages is None and not tokenizer.has_template:
        ids: list[int] = [*tokenizer.text_prefix, *tokenizer.encode(prompt.text)]
        return ids
    messages = [{"role": "user", "content": prompt.text}] if prompt.messages is None else list(prompt.messages)
    try:
        ids = tokenizer.encode(tokenizer.render(messages, add_generation_prompt=True))
    except TemplateFailed as error:
        raise BadParams(f"The chat template cannot write these messages: {error.message}.") from None
    return ids


def generate(
    model: Model,
    tokenizer: Any,
    prompt: Prompt,
    *,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    adapter: bool = True,
    interrupted: Callable[[], bool] = lambda: False,
) -> Completion | None:
    """Let the model answer until its end mark or `max_tokens`; greedy at temperature 0.

    Without `adapter` the base model answers. Between tokens `interrupted` is asked; None is returned if it says
    so. The process's random state is neither used nor changed. Raises BadParams for an empty prompt.
    """
    how: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "adapter": adapter}
    completions = _answers(model, tokenizer, [_ids(tokenizer, prompt)], interrupted, how)
    return completions[0] if completions else None


def generate_all(
    model: Model,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    room: int,
    interrupted: Callable[[], bool] = lambda: False,
) -> Iterator[Completion | None]:
    """Give the greedy answer to each prompt, in order: the answers of `generate`, made several at a time.

    Rounding may decide otherwise only between two tokens that are equally likely to the last bits. Together are as
    many as have `room` for all their tokens. Ends with None if `interrupted`, asked between tokens,
    says so. Raises BadParams for an empty prompt.
    """
    rows = [_ids(tokenizer, prompt) for prompt in prompts]
    start = 0
    while start < len(rows):
        end, longest = start, 0
        while end < len(rows):
            longest = max(longest, len(rows[end]))
            if end > start and (end + 1 - start) * (longest + max_tokens) > room:
                break
            end += 1
        completions = _answers(model, tokenizer, rows[start:end], interrupted, {"max_tokens": max_tokens})
        if completions is None:
            yield None
            return
        yield from completions
        start = end


def _ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    ids = prompt_tokens(tokenizer, prompt)
    if not ids:
        raise BadParams("The prompt is empty.")
    return ids


def _answers(
    model: Model, tokenizer: Any, rows: Sequence[list[int]], interrupted: Callable[[], bool], how: dict[str, Any]
) -> list[Completion] | None:
    started = time.perf_counter()
    answers: list[list[int]] = [[] for _ in rows]
    for tokens in answer_tokens(model, rows, tokenizer.eos_ids, **how):
        for answer, token in zip(answers, tokens, strict=True):
            if token is not None:
                answer.append(token)
        if interrupted():
            return None
    ms = (time.perf_counter() - started) * 1000
    return [Completion(tokenizer.decode(answer), len(answer), ms) for answer in answers]


class _References:
    """Prompts with their references as rows whose answers are trained positions."""

    def __init__(self, rows: Sequence[tuple[list[int], list[int]]]) -> None:
        self._rows = rows

    def tokens(self, row: int) -> np.ndarray:
        prompt, answer = self._rows[row]
        return np.array(prompt + answer, np.int32)

    def mask(self, row: int) -> np.ndarray:
        prompt, answer = self._rows[row]
        return np.array([False] * len(prompt) + [True] * len(answer))


def reference_losses(
    sums: EvaluateSums, tokenizer: Any, prompts: Sequence[Prompt], micro_batch_tokens: int
) -> list[float]:
    """Give the mean loss in nats of each prompt's reference, its end mark included; nan where there is none."""
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    rows = [(prompt_tokens(tokenizer, p), tokenizer.encode(p.reference) + end if p.reference else []) for p in prompts]
    losses = [float("nan")] * len(rows)
    for index in range(len(rows)):
        for batch in plan(_References(rows), [index], micro_batch_tokens):
            loss, _ = sums(batch)
            losses[index] = float(loss) / int(batch.weights.sum())
    return losses


def best_and_worst(losses: Sequence[float]) -> list[int]:
    """Give the indices of the lowest and the highest loss, in that order; one if they are the same."""
    known = [index for index, loss in enumerate(losses) if loss == loss]
    if not known:
        return []
    best, worst = min(known, key=lambda i: losses[i]), max(known, key=lambda i: losses[i])
    return [best] if best == worst else [best, worst]
