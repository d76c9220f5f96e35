"""What each optimizer makes of a gradient: the change of one weight per unit of learning rate, and new slots."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx

Arrays = dict[str, mx.array]
Slots = dict[str, mx.array]
Arguments = dict[str, Any]


def adamw(
    weight: mx.array, grad: mx.array, slots: Slots, count: mx.array, arguments: Arguments
) -> tuple[mx.array, Slots]:
    """Adam with bias correction, arXiv 1412.6980."""
    (beta1, beta2), eps = arguments["betas"], arguments["eps"]
    mean = beta1 * slots["mean"] + (1 - beta1) * grad
    square = beta2 * slots["square"] + (1 - beta2) * mx.square(grad)
    # 1 - beta^count loses five digits in float32 at the first updates; expm1 does not.
    correction1 = -mx.expm1(count * math.log(beta1)) if beta1 else mx.ones_like(count)
    correction2 = -mx.expm1(count * math.log(beta2)) if beta2 else mx.ones_like(count)
    change = (mean / correction1) / (mx.sqrt(square / correction2) + eps)
    return change, {"mean": mean, "square": square}


def adafactor(
    weight: mx.array, grad: mx.array, slots: Slots, count: mx.array, arguments: Arguments
) -> tuple[mx.array, Slots]:
    """Adafactor with a given learning rate, arXiv 1804.04235: factored second moments, clipped update."""
    decay = 1 - mx.power(count, arguments["decay_rate"])
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
    weight: mx.array, grad: mx.array, slots: Slots, count: mx.array, arguments: Arguments
) -> tuple[mx.array, Slots]:
    """Lion, arXiv 2302.06675: the sign of an interpolated momentum."""
    beta1, beta2 = arguments["betas"]
    change = mx.sign(beta1 * slots["mean"] + (1 - beta1) * grad)
    return change, {"mean": beta2 * slots["mean"] + (1 - beta2) * grad}


def muon(
    weight: mx.array, grad: mx.array, slots: Slots, count: mx.array, arguments: Arguments
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
    weight: mx.array, grad: mx.array, slots: Slots, count: mx.array, arguments: Arguments
) -> tuple[mx.array, Slots]:
    """Gradient descent, with momentum as torch.optim.SGD has it (no dampening)."""
    momentum = arguments["momentum"]
    if not momentum:
        return grad, {}
    mean = momentum * slots["mean"] + grad
    return (grad + momentum * mean if arguments["nesterov"] else mean), {"mean": mean}


Rule = Callable[[mx.array, mx.array, Slots, mx.array, Arguments], tuple[mx.array, Slots]]

RULES: dict[str, tuple[Rule, Arguments]] = {
    "adamw": (adamw, {"betas": (0.9, 0.999), "eps": 1e-8}),
    "adafactor": (adafactor, {"eps": 1e-30, "clip_threshold": 1.0, "decay_rate": -0.8}),
    "lion": (lion, {"betas": (0.9, 0.99)}),
    "muon": (muon, {"momentum": 0.95, "nesterov": True, "ns_steps": 5}),
    "sgd": (sgd, {"momentum": 0.0, "nesterov": False}),
}
"""The rule of each optimizer and its arguments with their defaults."""

MUON_OTHERS = RULES["adamw"][1]
