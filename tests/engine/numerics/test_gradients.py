"""Loss, accuracy and every gradient of an update against the plain form: whole logits and automatic gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny import RandomRows

from trainwire_engine.batches import plan
from trainwire_engine.model import Model, load_model
from trainwire_engine.optimizer import Optimizer
from trainwire_engine.shapes import CPU, CUDA
from trainwire_engine.step import UpdateStep
from trainwire_protocol.config import Config

ROWS = RandomRows(6)
HEADS = {"tied": {}, "untied": {"family": "llama"}, "quantized": {"bits": 4}, "capless": {"family": "gemma3_text"}}


def shaken(model: Model) -> Model:
    """Move adapters away from the start, where half of their gradients are zero."""
    mx.random.seed(5)
    moved = {name: value + 0.02 * mx.random.normal(value.shape) for name, value in model.trainable.items()}
    model.set_trainable(moved)
    return model


def plain_form(model: Model, smoothing: float) -> tuple[float, int, dict[str, mx.array]]:
    """Loss sum, right guesses and gradients, row by row, from all logits of the model as it is."""

    def loss(params: dict[str, mx.array]) -> tuple[mx.array, mx.array]:
        module = model.bind(params)
        total, correct = mx.zeros(()), mx.zeros(())
        for row in range(len(ROWS)):
            tokens, trained = mx.array(ROWS.tokens(row)), np.flatnonzero(ROWS.mask(row))
            logits = module(tokens[None, :-1])[0][mx.array(trained - 1)].astype(mx.float32)
            wanted = tokens[mx.array(trained)]
            shares = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            hard = mx.take_along_axis(shares, wanted[:, None], axis=-1)
            total = total - mx.sum((1 - smoothing) * hard) - mx.sum(smoothing * mx.mean(shares, axis=-1))
            correct = correct + mx.sum(mx.argmax(logits, axis=-1) == wanted)
        return total, correct

    model.train_mode(True)
    (total, correct), gradients = mx.value_and_grad(loss)(model.trainable)
    mx.eval(total, correct, gradients)
    model.release()
    return float(total), int(correct), gradients


def ours(model: Model, settings: Config, policy: Any) -> tuple[float, int, dict[str, mx.array]]:
    (total, correct), gradients = UpdateStep(model, Optimizer(settings), settings).sums(
        plan(ROWS, range(len(ROWS)), 100, policy), 1
    )
    return float(total), round(float(correct)), gradients


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    ("head", "method", "keys"),
    [
        *((head, "lora", {}) for head in HEADS),
        *((head, "full", {}) for head in HEADS if head != "quantized"),
        ("tied", "dora", {"gradient_checkpointing": True}),
        ("tied", "lora", {"lora_keys": ["model.embed_tokens", "self_attn.q_proj"]}),
        ("untied", "lora", {"lora_keys": ["lm_head", "mlp.up_proj"]}),
    ],
)
def test_every_gradient_is_that_of_the_plain_form(
    config: Callable[..., Config], tiny: Callable[..., Path], head: str, method: str, keys: Any, smoothing: float
) -> None:
    settings = config(model=tiny(**HEADS[head]), method=method, label_smoothing=smoothing, **keys)
    model = shaken(load_model(settings))
    assert model.head == "chunked"
    # gemma3's normed scores magnify the last bits of the forward pass, in either form.
    near = 3e-5 if head == "capless" else 1e-5
    loss, correct, gradients = plain_form(model, smoothing)
    for policy in (CPU, CUDA):
        own, guessed, made = ours(model, settings, policy)
        assert own == pytest.approx(loss, rel=1e-5)
        assert guessed == correct
        assert made.keys() == gradients.keys()
        for name, gradient in gradients.items():
            scale = max(1.0, float(mx.abs(gradient).max()))
            np.testing.assert_allclose(made[name], gradient, atol=near * scale, rtol=near, err_msg=name)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("head", "method"), [("tied", "full"), ("untied", "lora"), ("quantized", "lora")])
def test_in_bfloat16_gradients_agree_within_rounding(
    config: Callable[..., Config],
    tiny: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    head: str,
    method: str,
    smoothing: float,
) -> None:
    """Both forms are compared with float32: the chunked one is no farther from it than 1.5 times the plain one."""
    settings = config(model=tiny(**HEADS[head], dtype=mx.bfloat16), method=method, label_smoothing=smoothing)
    exact = plain_form(shaken(load_model(settings)), smoothing)
    monkeypatch.setattr("trainwire_engine.memory.total_memory", lambda: 10_000)
    model = shaken(load_model(settings))
    assert model.forward_dtype == mx.bfloat16
    plain, made = plain_form(model, smoothing), ours(model, settings, CPU)
    assert made[0] == pytest.approx(exact[0], rel=2e-3)

    def distance(gradients: dict[str, mx.array]) -> float:
        apart = [np.array(gradients[name].astype(mx.float32) - exact[2][name]).ravel() for name in exact[2]]
        whole = [np.array(exact[2][name]).ravel() for name in exact[2]]
        return float(np.linalg.norm(np.concatenate(apart)) / np.linalg.norm(np.concatenate(whole)))

    assert {gradient.dtype for gradient in made[2].values()} == {mx.float32}
    assert distance(made[2]) < max(0.02, 1.5 * distance(plain[2]))
