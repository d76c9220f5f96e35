"""AdamW on all weights of a model in a few launches on a CUDA card."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from trainwire_engine.cuda import many
from trainwire_engine.cuda.many import Arrays

_ADAMW = """
    float g = grad[i] * with[2], w = weight[i];
    float m = beta1 * mean[i] + (1.0f - beta1) * g;
    float v = beta2 * square[i] + (1.0f - beta2) * g * g;
    float change = m * with[4] / (sqrtf(v) * with[5] + eps);
    float next = (decays ? w * with[1] : w) - with[0] * change;
    bool accept = with[3] != 0.0f;
    new_weight[i] = accept ? next : w;
    new_mean[i] = accept ? m : mean[i];
    new_square[i] = accept ? v : square[i];
"""


def adamw(
    params: Arrays,
    grads: Arrays,
    means: Arrays,
    squares: Arrays,
    scalars: mx.array,
    *,
    betas: tuple[float, float],
    eps: float,
    decays: Callable[[mx.array], bool],
) -> tuple[Arrays, Arrays, Arrays]:
    """AdamW on float32 arrays, as `update_rules.adamw` has it; returns weights, means and squares.

    `scalars` float32 [6]: learning rate, what decay leaves of a weight, scale of the gradient, whether to accept, and
    the two bias corrections. `decays` tells which weights decay.
    """
    made: tuple[Arrays, Arrays, Arrays] = ({}, {}, {})
    for decaying in (False, True):
        names = [name for name, param in params.items() if decays(param) == decaying]
        for part in many.parts(names, params):
            ins = dict.fromkeys(("weight", "grad", "mean", "square"), "float")
            outs = dict.fromkeys(("new_weight", "new_mean", "new_square"), "float")
            constants = (
                f"const float beta1 = {_float(betas[0])}, beta2 = {_float(betas[1])}, eps = {_float(eps)};\n"
                f"const bool decays = {str(decaying).lower()};\n"
            )
            code = many.compiled("adamw", ins, outs, _ADAMW, len(part), constants, shared="const float* with")
            columns = [[source[name] for name in part] for source in (params, grads, means, squares)]
            results = many.launch("adamw", code, columns, [mx.float32] * 3, scalars)
            for index, target in enumerate(made):
                target |= dict(zip(part, results[index * len(part) : (index + 1) * len(part)]))
    return tuple({name: target[name] for name in params} for target in made)  # type: ignore[return-value]


def _float(value: float) -> str:
    return f"{float(value)!r}f"
