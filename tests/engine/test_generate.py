"""Answers that are made together are those that are made alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import FAMILIES

from trainwire_engine import sampler
from trainwire_engine.generate import Prompt, generate, generate_all, prompt_tokens
from trainwire_engine.model import Model, load_model
from trainwire_engine.sampler import answer_tokens
from trainwire_engine.tokenizer import Tokenizer
from trainwire_protocol.config import Config
from trainwire_protocol.errors import BadParams

PROMPTS = [
    Prompt(text) for text in ("what is step 3", "a", "the loss of the model is the loss of a run . " * 3, "say it")
]


@pytest.fixture(params=FAMILIES)
def speaking(config: Callable[..., Config], tiny: Callable[..., Path], request: Any) -> tuple[Model, Tokenizer]:
    """A tiny model of each family, with the tokenizer of its folder."""
    model = load_model(config(model=tiny(request.param)))
    return model, Tokenizer.from_folder(model.folder)


def all_tokens(model: Model, rows: list[list[int]], ends: set[int], **how: Any) -> list[list[int]]:
    """The answers to prompts that are asked together."""
    answers: list[list[int]] = [[] for _ in rows]
    for tokens in answer_tokens(model, rows, ends, max_tokens=24, **how):
        for answer, token in zip(answers, tokens, strict=True):
            answer.extend([] if token is None else [token])
    return answers


@pytest.mark.parametrize("temperature", [0.0, 1.5], ids=["greedy", "drawn"])
def test_prompts_of_any_lengths_asked_together_have_the_answers_they_have_alone(
    speaking: tuple[Model, Tokenizer], temperature: float
) -> None:
    model, tokenizer = speaking
    # One token is no prompt to go through, and 40 are more than a sliding window of 16.
    rows = [*(prompt_tokens(tokenizer, prompt) for prompt in PROMPTS), [7], [*range(20, 60)]]
    how = {"temperature": temperature, "seed": 3}
    alone = [all_tokens(model, [row], set(), **how)[0] for row in rows]
    assert all(len(answer) == 24 for answer in alone)
    # Ends that come at different places, so that the others go on without those that are through.
    ends = {alone[0][5], alone[2][11]}
    assert all_tokens(model, rows, set(), **how) == alone
    assert all_tokens(model, rows, ends, **how) == [all_tokens(model, [row], ends, **how)[0] for row in rows]


@pytest.mark.parametrize("room", [1, 200, 100_000])
def test_every_room_gives_the_answers_in_the_order_of_the_prompts(
    config: Callable[..., Config], tiny: Callable[..., Path], room: int
) -> None:
    model = load_model(config(model=tiny()))
    tokenizer = Tokenizer.from_folder(model.folder)
    alone = [generate(model, tokenizer, prompt, max_tokens=8) for prompt in PROMPTS]
    together = list(generate_all(model, tokenizer, PROMPTS, max_tokens=8, room=room))
    assert [a and (a.text, a.tokens) for a in together] == [a and (a.text, a.tokens) for a in alone]


def test_the_answers_of_all_prompts_take_the_passes_of_one(
    config: Callable[..., Config], tiny: Callable[..., Path]
) -> None:
    model = load_model(config(model=tiny()))
    tokenizer = Tokenizer.from_folder(model.folder)
    asked = 0

    def interrupted() -> bool:
        nonlocal asked
        asked += 1
        return False

    how: dict[str, Any] = {"max_tokens": 8, "room": 100_000, "interrupted": interrupted}
    answers = list(generate_all(model, tokenizer, PROMPTS, **how))
    longest = max(answer.tokens for answer in answers if answer)
    assert asked == 1 + len(PROMPTS) + longest


@pytest.mark.parametrize("moment", [1, 3, 7])
def test_answers_that_are_made_together_give_way_between_tokens(
    config: Callable[..., Config], tiny: Callable[..., Path], moment: int
) -> None:
    model = load_model(config(model=tiny()))
    tokenizer = Tokenizer.from_folder(model.folder)
    told = iter([False] * (moment - 1) + [True])
    answers = generate_all(model, tokenizer, PROMPTS, max_tokens=8, room=100_000, interrupted=lambda: next(told))
    assert list(answers) == [None]
    assert next(told, None) is None


def test_a_model_whose_caches_cannot_be_joined_answers_one_after_another(
    config: Callable[..., Config], tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(config(model=tiny()))
    tokenizer = Tokenizer.from_folder(model.folder)
    rows = [prompt_tokens(tokenizer, prompt) for prompt in PROMPTS]
    together = all_tokens(model, rows, set())
    real = sampler._new_cache

    class Alone:
        """A cache that has no way to be joined."""

        def __init__(self, real: Any) -> None:
            self._real = real

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

    monkeypatch.setattr(sampler, "_new_cache", lambda m: [Alone(layer) for layer in real(m)])
    assert all_tokens(model, rows, set()) == together


def test_an_empty_prompt_is_refused(config: Callable[..., Config], tiny: Callable[..., Path]) -> None:
    model = load_model(config(model=tiny()))
    tokenizer = Tokenizer.from_folder(model.folder)
    empty = Prompt("", ())
    tokenizer.render = lambda *_, **__: ""  # type: ignore[method-assign]
    with pytest.raises(BadParams, match="empty"):
        generate(model, tokenizer, empty, max_tokens=2)
    with pytest.raises(BadParams, match="empty"):
        list(generate_all(model, tokenizer, [empty], max_tokens=2, room=100))
