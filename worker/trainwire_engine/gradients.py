"""Gradients of all weights, by their names: added up, rounded as the masters are, and their norm."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from trainwire_engine import pieces
from trainwire_engine.cuda import tensors
from trainwire_engine.model import Arrays
from trainwire_engine.pieces import note


def added(totals: Any, sums: Any) -> Any:
    """Add ((loss sum, correct), gradient sums) up."""
    (loss, correct), grads = totals
    (more_loss, more_correct), more = sums
    if _together(grads) and _together(more):
        grads = tensors.added(grads, more)
    else:
        grads = {name: grad + more[name] for name, grad in grads.items()}
    return (loss + more_loss, correct + more_correct), grads


def as_masters(grads: Arrays, params: Arrays) -> Arrays:
    """Cast gradients to the dtypes of the weights they are for."""
    if tensors.usable(grads):
        return tensors.cast(grads, {name: param.dtype for name, param in params.items()})
    return {name: grad.astype(params[name].dtype) for name, grad in grads.items()}


def whole_norm(grads: Arrays) -> mx.array:
    """The norm of all gradients together."""
    if _together(grads):
        return mx.sqrt(tensors.square_sum(grads))
    total = mx.zeros(())
    for grad in grads.values():
        total = total + mx.sum(mx.square(grad))
        if grad.size >= pieces.LARGE:
            note(total)
    return mx.sqrt(total)


def _together(arrays: Arrays) -> bool:
    return tensors.usable(arrays) and all(array.dtype == mx.float32 for array in arrays.values())
