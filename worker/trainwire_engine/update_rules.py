"""What each optimizer makes of a gradient: the change of one weight per unit of learning rate, and new slots.

A rule gets (weight, gradient, slots, scalars, arguments), all float32. Scalars depend on the count of updates
alone; they are made once per update, outside the kernels that run over every element.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

Arrays = dict[str, mx.array]
Slots = dict[str, mx.array]
Arguments = dict[str, Any]
Scalars = tuple[mx.array, ...]


def adamw_scalars(count: mx.array, arguments: Arguments) -> Scalars:
    """Bias corrections 1/(1-β₁ᵗ) and 1/sqrt(1-β₂ᵗ); expm1, since 1-βᵗ loses five digits in float32 at first."""
    beta1, beta2 = arguments["betas"]
    one = mx.ones_like(count)
    mean = -mx.expm1(count * math.log(beta1)) if beta1 else one
    square = -mx.expm1(count * math.log(beta2)) if beta2 else one
    return 1 / mean, mx.rsqrt(square)


def adamw(
    weight: mx.array, grad: mx.array, slots: Slots, scalars: Scalars, arguments: Arguments
) -> tuple[mx.array, Slots]:
    """Adam with bias correction, arXiv 1412.6980."""
    (beta1, beta2), eps = arguments["betas"], arguments["eps"]
    mean = beta1 * slots["mean"] + (1 - beta1) * grad
    square = beta2 * slots["square"] + (1 - beta2) * mx.square(grad)
    change = (mean * scalars[0]) / (mx.sqrt(square) * scalars[1] + eps)
    return change, {"mean": mean, "square": square}


def adafactor_scalars(count: mx.array, arguments: Arguments) -> Scalars:
    """The second moments' decay, nearing 1 with the number of updates."""
    return (1 - mx.power(count, arguments["decay_rate"]),)


def adafactor(
    weight: mx.array, grad: mx.array, slots: Slots, scalars: Scalars, arguments: Arguments
) -> tuple[mx.array, Slots]:
    """Adafactor with a given learning rate, arXiv 1804.04235: factored second moments, clipped update."""
    (decay,) = scalars
    square = mx.square(grad) + arguments["eps"]
    if weight.ndim >= 2:
        rows = decay * slots["rows"] + (1 - decay) * mx.mean(square, axis=-1)
        columns = decay * slots["columns"] + (1 - decay) * mx.mean(square, axis=-2)
        row_factor = mx.rsqrt(rows / mx.mean(rows, axis=-1, keepdims=True))[..., None]
        change = grad * row_factor * mx.rsqrt(columns)[..., None, :]
        slots = {"rows": rows, "columns": columns}
    else:
        slots = {"square": decay * slots["square"] + (1 - decay) * square}
        change = grad * mx.rsqrt(slots["square"])
    size = mx.sqrt(mx.mean(mx.square(change)))
    return change / mx.maximum(1.0, size / arguments["clip_threshold"]), slots


def lion(
    weight: mx.array, grad: mx.array, slots: Slots, scalars: Scalars, arguments: Arguments
) -> tuple[mx.array, Slots]:
    """Lion, arXiv 2302.06675: the sign of an interpolated momentum."""
    beta1, beta2 = arguments["betas"]
    change = mx.sign(beta1 * slots["mean"] + (1 - beta1) * grad)
    return change, {"mean": beta2 * slots["mean"] + (1 - beta2) * grad}


def muon(
    weight: mx.array, grad: mx.array, slots: Slots, scalars: Scalars, arguments: Arguments
) -> tuple[mx.array, Slots]:
    """Muon: momentum, orthogonalized by a quintic Newton-Schulz iteration (kellerjordan.github.io/posts/muon)."""
    momentum = arguments["momentum"]
    mean = momentum * slots["mean"] + (1 - momentum) * grad
    matrix = (1 - momentum) * grad + momentum * mean if arguments["nesterov"] else mean
    rows, columns = matrix.shape
    x = matrix / (mx.sqrt(mx.sum(mx.square(matrix))) + 1e-7)
    x = x.T if rows > columns else x
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(arguments["ns_steps"]):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    x = x.T if rows > columns else x
    return x * math.sqrt(max(1.0, rows / columns)), {"mean": mean}


def sgd(
    weight: mx.array, grad: mx.array, slots: Slots, scalars: Scalars, arguments: Arguments
) -> tuple[mx.array, Slots]:
    """Gradient descent, with momentum as torch.optim.SGD has it (no dampening)."""
    momentum = arguments["momentum"]
    if not momentum:
        return grad, {}
    mean = momentum * slots["mean"] + grad
    return (grad + momentum * mean if arguments["nesterov"] else mean), {"mean": mean}


def no_scalars(count: mx.array, arguments: Arguments) -> Scalars:
    """For rules that do not look at the count."""
    return ()


@dataclass(frozen=True)
class Rule:
    """A rule with its scalars; `elementwise` ones may be fused into one pass over the weights."""

    change: Callable[[mx.array, mx.array, Slots, Scalars, Arguments], tuple[mx.array, Slots]]
    scalars: Callable[[mx.array, Arguments], Scalars] = no_scalars
    elementwise: bool = True


RULES: dict[str, tuple[Rule, Arguments]] = {
    "adamw": (Rule(adamw, adamw_scalars), {"betas": (0.9, 0.999), "eps": 1e-8}),
    "adafactor": (
        Rule(adafactor, adafactor_scalars, elementwise=False),
        {"eps": 1e-30, "clip_threshold": 1.0, "decay_rate": -0.8},
    ),
    "lion": (Rule(lion), {"betas": (0.9, 0.99)}),
    "muon": (Rule(muon, elementwise=False), {"momentum": 0.95, "nesterov": True, "ns_steps": 5}),
    "sgd": (Rule(sgd), {"momentum": 0.0, "nesterov": False}),
}
"""The rule of each optimizer and its arguments with their defaults."""

MUON_OTHERS = RULES["adamw"]
