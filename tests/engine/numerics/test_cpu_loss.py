"""The head in blocks of the CPU against the plain form: same sums, same gradients, no array of all logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from peaks import peak_of

from trainwire_engine import cpu_loss
from trainwire_engine.adapters import LoRALinear
from trainwire_engine.cpu_loss import blockwise_cross_entropy
from trainwire_engine.loss import cross_entropy
from trainwire_engine.unpacking import plain_weight

WORDS, WIDTH, POSITIONS = 96, 32, 50


def inputs(words: int = WORDS, width: int = WIDTH, positions: int = POSITIONS) -> tuple[mx.array, ...]:
    """Hidden states, head, targets and weights; scores lie close together in the first rows and far in the last."""
    mx.random.seed(2)
    hidden = mx.random.normal((positions, width)) * mx.linspace(0.01, 3, positions)[:, None]
    weights = (mx.arange(positions) < positions - 7).astype(mx.float32)
    return hidden, mx.random.normal((words, width)), mx.random.randint(0, words, (positions,)), weights


def gradients(form: Callable[..., Any], arguments: tuple[mx.array, ...], trained: bool) -> Any:
    hidden, head, targets, weights = arguments

    def loss(hidden: mx.array, head: mx.array) -> Any:
        total, correct = form(hidden, head, targets, weights)
        return 3 * total, correct

    (total, correct), pulled = mx.value_and_grad(loss, argnums=(0, 1) if trained else 0)(hidden, head)
    return total, correct, *(pulled if trained else [pulled])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(("rows", "words"), [(512, 512), (16, 40), (7, 96), (50, 1), (1, 13)])
def test_blocks_give_the_sums_and_gradients_of_the_plain_form(
    rows: int, words: int, trained: bool, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_loss, "ROWS", rows)
    monkeypatch.setattr(cpu_loss, "WORDS", words)

    def blocks(hidden: mx.array, head: mx.array, *more: mx.array) -> Any:
        return blockwise_cross_entropy(hidden, head, *more, smoothing=smoothing, trained=trained)

    def plain(hidden: mx.array, head: mx.array, *more: mx.array) -> Any:
        return cross_entropy(hidden @ head.T, *more, smoothing)

    ours, theirs = (gradients(form, inputs(), trained) for form in (blocks, plain))
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6)
    assert ours[1].item() == theirs[1].item()
    for mine, its in zip(ours[2:], theirs[2:], strict=True):
        np.testing.assert_allclose(mine, its, atol=2e-5, rtol=1e-5)


def test_of_words_with_equal_scores_the_first_is_the_guess_as_it_is_of_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_loss, "WORDS", 4)
    hidden, weights = mx.ones((12, 3)), mx.ones((12,))
    for head in (mx.zeros((12, 3)), mx.where(mx.arange(12)[:, None] % 5 == 2, mx.ones((12, 3)), 0.0)):
        _, correct = blockwise_cross_entropy(hidden, head, mx.arange(12), weights, smoothing=0.0, trained=False)
        assert correct.item() == 1
        targets = mx.full((12,), mx.argmax(head[:, 0]))
        _, correct = blockwise_cross_entropy(hidden, head, targets, weights, smoothing=0.0, trained=False)
        assert correct.item() == 12


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["hidden", "head"])
def test_what_is_not_finite_makes_a_loss_that_is_not(where: str, value: float) -> None:
    hidden, head, targets, weights = inputs()
    if where == "hidden":
        hidden[3, 5] = value
    else:
        head[17, 5] = value
    loss, _, pulled = gradients(
        lambda *given: blockwise_cross_entropy(*given, smoothing=0.0, trained=False),
        (hidden, head, targets, weights),
        False,
    )
    assert not mx.isfinite(loss).item()
    assert not mx.isfinite(pulled).all().item()


def test_a_sure_guess_costs_nothing_and_never_less() -> None:
    head = mx.eye(WIDTH) * 30
    targets = mx.arange(WIDTH)
    loss, correct = blockwise_cross_entropy(
        mx.eye(WIDTH) * 9.7, head, targets, mx.ones((WIDTH,)), smoothing=0.0, trained=False
    )
    assert 0 <= loss.item() < 1e-4
    assert correct.item() == WIDTH


def test_scores_further_apart_than_float32_reaches_leave_all_finite() -> None:
    hidden, head, targets, weights = inputs()

    def blocks(*given: mx.array) -> Any:
        return blockwise_cross_entropy(*given, smoothing=0.0, trained=True)

    loss, _, *pulled = gradients(blocks, (hidden * 40, head, targets, weights), True)
    assert mx.isfinite(loss).item()
    assert all(mx.isfinite(part).all().item() for part in pulled)
    np.testing.assert_allclose(loss, 3 * cross_entropy(hidden * 40 @ head.T, targets, weights)[0], rtol=1e-5)


def test_only_a_plain_float32_head_has_blocks() -> None:
    linear = nn.Linear(WIDTH, WORDS, bias=False)
    packed = nn.QuantizedLinear.from_linear(linear, 32, 4)
    for layer in (linear, nn.Embedding(WORDS, WIDTH), packed):
        weight = plain_weight(layer)
        assert weight is not None
        assert weight.shape == (WORDS, WIDTH)
        hidden = mx.random.normal((3, WIDTH))
        logits = getattr(layer, "as_linear", layer)(hidden)
        np.testing.assert_allclose(hidden @ weight.T, logits, atol=1e-5)
    assert plain_weight(nn.Linear(WIDTH, WORDS)) is None
    assert plain_weight(LoRALinear(linear, 4, 2.0, 0.0)) is None
    linear.set_dtype(mx.bfloat16)
    assert plain_weight(linear) is None


@pytest.mark.parametrize("trained", [False, True])
def test_the_peak_is_that_of_a_few_blocks_and_of_the_powers_a_trained_head_keeps(trained: bool) -> None:
    words, width, positions = 32768, 16, 2048
    hidden, head, targets, weights = inputs(words, width, positions)
    mx.eval(hidden, head, targets, weights)

    def work() -> Any:
        def form(*given: mx.array) -> Any:
            return blockwise_cross_entropy(*given, smoothing=0.0, trained=trained)

        return gradients(form, (hidden, head, targets, weights), trained)

    peak = peak_of(work)
    block = cpu_loss.ROWS * cpu_loss.WORDS * 4
    kept = cpu_loss.ROWS * words * 4 if trained else 0
    # A piece is two blocks, and some operations make a block of their own in each. All logits of 256 positions would
    # be 32 blocks.
    assert peak < 27 * block + kept + positions * width * 4 * 3 + (3 * words * width * 4 if trained else 0)
