"""Cross entropy over trained positions, summed: the head runs in chunks that never hold all logits.

For a chunk with logits z, target t, weight w and label smoothing ε over V words the loss is
`w · (logsumexp(z) − (1−ε) z_t − ε mean(z))` and its gradient `w · (softmax(z) − (1−ε) onehot(t) − ε/V)`. That
gradient is made in the forward pass and only its products with the head and the hidden states are kept, so at
most one chunk of logits is alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_unflatten

from trainwire_engine.cpu_loss import blockwise_cross_entropy
from trainwire_engine.cuda import kernels
from trainwire_engine.fastmath import exp_below_zero, logsumexp, on_cpu
from trainwire_engine.head import Head
from trainwire_engine.model import Arrays, Model
from trainwire_engine.pieces import note
from trainwire_engine.shapes import policy
from trainwire_engine.taking import taken
from trainwire_engine.unpacking import UnpackedEmbedding, UnpackedLinear, dense, plain_weight

Project = Callable[[mx.array, Arrays], mx.array]


def cross_entropy(
    logits: mx.array, targets: mx.array, weights: mx.array, smoothing: float = 0.0
) -> tuple[mx.array, mx.array]:
    """Sum the weighted loss in nats and count the right guesses; logits [P, V], targets and weights [P]."""
    if kernels.ready(logits):
        return _by_kernel(logits, targets, weights, smoothing)
    scores = logits.astype(mx.float32)
    chosen = mx.take_along_axis(scores, targets[:, None], axis=-1)[:, 0]
    losses = logsumexp(scores)[:, 0] - (1 - smoothing) * chosen
    if smoothing:
        losses = losses - smoothing * mx.mean(scores, axis=-1)
    return mx.sum(losses * weights), _correct(logits, targets, weights)


def _by_kernel(logits: mx.array, targets: mx.array, weights: mx.array, smoothing: float) -> tuple[mx.array, mx.array]:
    @mx.custom_function
    def sums(logits: mx.array) -> tuple[mx.array, ...]:
        return kernels.cross_entropy(logits, targets, weights, smoothing)

    @sums.vjp
    def pull(_: Any, cotangents: Any, outputs: Any) -> mx.array:
        return outputs[2] * cotangents[0].astype(outputs[2].dtype)

    outputs: Any = sums(logits)
    return outputs[0], outputs[1]


def chunked_cross_entropy(
    project: Project,
    hidden: mx.array,
    head: Arrays,
    targets: mx.array,
    weights: mx.array,
    *,
    chunk: int,
    smoothing: float = 0.0,
) -> tuple[mx.array, mx.array]:
    """The same sums as `cross_entropy(project(hidden, head), …)` with gradients for `hidden` and `head`.

    hidden [P, D] in the model's dtype; `head` holds the head's trained weights (empty if it is frozen); the
    gradient with respect to weights that `project` captures is not made.
    """
    names = list(head)

    @mx.custom_function
    def sums(hidden: mx.array, *leaves: mx.array) -> tuple[mx.array, ...]:
        head = dict(zip(names, leaves))
        loss, correct = mx.zeros(()), mx.zeros(())
        d_hidden: list[mx.array] = []
        d_head = [mx.zeros(leaf.shape, mx.float32) for leaf in leaves]
        for start in range(0, hidden.shape[0], chunk):
            piece = hidden[start : start + chunk]
            if d_hidden:
                # Without this, all chunks' logits would be made before the first is used up.
                piece = mx.depends(piece, [d_hidden[-1], loss, correct, *d_head])
                note(piece)
            part = slice(start, start + chunk)
            logits = project(piece, head)
            part_loss, part_correct, d_logits = _forward_and_gradient(logits, targets[part], weights[part], smoothing)
            _, pulled = mx.vjp(lambda h, *leaves: project(h, dict(zip(names, leaves))), [piece, *leaves], [d_logits])
            d_hidden.append(pulled[0])
            d_head = [total + more.astype(mx.float32) for total, more in zip(d_head, pulled[1:])]
            loss, correct = loss + part_loss, correct + part_correct
        return loss, correct, mx.concatenate(d_hidden), *d_head

    @sums.vjp
    def pull(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, ...]:
        _, *leaves = primals if isinstance(primals, tuple | list) else (primals,)
        scale = cotangents[0]
        d_hidden = outputs[2] * scale.astype(outputs[2].dtype)
        return d_hidden, *((d * scale).astype(leaf.dtype) for d, leaf in zip(outputs[3:], leaves))

    outputs: Any = sums(hidden, *head.values())
    return outputs[0], outputs[1]


def _forward_and_gradient(
    logits: mx.array, targets: mx.array, weights: mx.array, smoothing: float
) -> tuple[mx.array, mx.array, mx.array]:
    if kernels.ready(logits):
        return kernels.cross_entropy(logits, targets, weights, smoothing)
    scores = logits.astype(mx.float32)
    top = mx.max(scores, axis=-1, keepdims=True)
    powers = exp_below_zero(scores - top)
    total = mx.sum(powers, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(scores, targets[:, None], axis=-1)
    losses = mx.log(total) + top - (1 - smoothing) * chosen
    gradient = powers * (weights[:, None] / total)
    if smoothing:
        losses = losses - smoothing * mx.mean(scores, axis=-1, keepdims=True)
        gradient = gradient - (smoothing / scores.shape[-1]) * weights[:, None]
    gradient = gradient.at[mx.arange(targets.size), targets].subtract((1 - smoothing) * weights)
    return mx.sum(losses[:, 0] * weights), _correct(logits, targets, weights), gradient.astype(logits.dtype)


def _correct(logits: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
    return mx.sum((mx.argmax(logits, axis=-1) == targets) * weights)


def head_projection(split: Head) -> Project:
    """Make the head a function of its trained weights, given by their names below the head's layer."""
    if isinstance(split.layer, UnpackedLinear | UnpackedEmbedding):
        # Unpacked once for all chunks.
        weight, bias = dense(split.layer), split.layer.get("bias")
        return lambda hidden, _: hidden @ weight.T if bias is None else hidden @ weight.T + bias

    def project(hidden: mx.array, leaves: Arrays) -> mx.array:
        if not leaves:
            return split.logits(hidden)
        bound = {name: _leaf(split.layer, name) for name in leaves}
        split.layer.update(tree_unflatten(list(leaves.items())))
        try:
            return split.logits(hidden)
        finally:
            split.layer.update(tree_unflatten(list(bound.items())))

    return project


def _leaf(layer: Any, name: str) -> mx.array:
    for part in name.split("."):
        layer = layer[part]
    return layer


def micro_batch_sums(
    model: Model, params: Arrays, batch: Sequence[mx.array], *, smoothing: float, gradient: bool
) -> tuple[mx.array, mx.array]:
    """Loss and correct guesses of a micro-batch (as `passes.device_arrays` makes it) under given weights.

    Binds the weights into the module. With `gradient` the head is made differentiable by its own rule.
    """
    hidden = before_head(model, params, batch)
    return head_sums(model, params, hidden, batch, smoothing=smoothing, gradient=gradient)


def before_head(model: Model, params: Arrays, batch: Sequence[mx.array]) -> mx.array:
    """The blocks' half of `micro_batch_sums`: hidden states [P, D] of the trained positions, or their logits [P, V] if
    the head cannot be told apart."""
    tokens, positions, _, _, sources, *_ = batch
    module = model.bind(params)
    states = module(tokens) if model.split is None else model.split.hidden(tokens)
    return taken(states.reshape(-1, states.shape[-1]), positions, sources)


def head_sums(
    model: Model, params: Arrays, hidden: mx.array, batch: Sequence[mx.array], *, smoothing: float, gradient: bool
) -> tuple[mx.array, mx.array]:
    """The head's half of `micro_batch_sums`, from what `before_head` gave; the weights are bound already."""
    _, _, targets, weights, *_ = batch
    if model.split is None:
        return cross_entropy(hidden, targets, weights, smoothing)
    prefix = f"{model.split.prefix}."
    head = {
        name.removeprefix(prefix): _leaf(model.split.layer, name.removeprefix(prefix))
        for name in params
        if name.startswith(prefix)
    }
    weight = plain_weight(model.split.layer) if on_cpu() and gradient and hidden.dtype == mx.float32 else None
    if weight is not None:
        return blockwise_cross_entropy(hidden, weight, targets, weights, smoothing=smoothing, trained=bool(head))
    chunk = policy().chunk(model.vocab_size, hidden.shape[0])
    project = head_projection(model.split)
    if gradient:
        return chunked_cross_entropy(project, hidden, head, targets, weights, chunk=chunk, smoothing=smoothing)
    loss, correct = mx.zeros(()), mx.zeros(())
    for start in range(0, hidden.shape[0], chunk):
        part = slice(start, start + chunk)
        piece = mx.depends(hidden[part], [loss, correct])
        note(piece)
        sums = cross_entropy(project(piece, head), targets[part], weights[part], smoothing)
        loss, correct = loss + sums[0], correct + sums[1]
    return loss, correct
