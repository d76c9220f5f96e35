"""Weights joined to a few long arrays, so that an update of hundreds of small ones is a few operations.

An adapter on every layer is some hundred weights; on a GPU the host needs longer to name them all in every operation of
an update than the device to make it. Elementwise rules do not care where a weight ends, and whether it decays depends
on its axes alone: weights with two and more are joined to arrays [1, n], the others to arrays [n].
"""

from __future__ import annotations

import math

import mlx.core as mx

from trainwire_engine.cuda import tensors
from trainwire_engine.optimizer import Optimizer

Arrays = dict[str, mx.array]

_ALIGNED = 4
"""Weights begin at a multiple of so many elements, 16 bytes, which kernels read at a time."""
_MOST = 2**30
"""Elements of a joined array, unless a single weight has more."""
COUNT = "count"


class Apart:
    """Leaves weights as they are."""

    def join(self, named: Arrays) -> Arrays:
        """Join arrays that are named and shaped as the weights."""
        return named

    def split(self, joined: Arrays) -> Arrays:
        """Give the arrays of the weights, in the weights' order, as views."""
        return joined

    def join_state(self, named: Arrays) -> Arrays:
        """Join an optimizer's state, `<slot>.<weight>` and its count."""
        return named

    def split_state(self, joined: Arrays) -> Arrays:
        """Give an optimizer's state by weights."""
        return joined


class Joined(Apart):
    """Joins weights with the shapes of those given."""

    def __init__(self, weights: Arrays) -> None:
        self._shapes = {name: weight.shape for name, weight in weights.items()}
        self._parts: dict[str, list[str]] = {}
        room: dict[bool, int] = {}
        for name, weight in weights.items():
            matrix, size = weight.ndim >= 2, _up(weight.size)
            if room.get(matrix, 0) < size:
                room[matrix] = _MOST
                self._parts[f"{'matrices' if matrix else 'others'}.{len(self._parts)}"] = []
            room[matrix] -= size
            last = [part for part in self._parts if part.startswith("matrices") == matrix][-1]
            self._parts[last].append(name)

    def join(self, named: Arrays) -> Arrays:
        joined = {}
        for part, names in self._parts.items():
            flat = mx.concatenate([piece for name in names for piece in _padded(named[name].reshape(-1))])
            joined[part] = flat[None] if part.startswith("matrices") else flat
        return joined

    def split(self, joined: Arrays) -> Arrays:
        views = {}
        for part, names in self._parts.items():
            flat, start = joined[part].reshape(-1), 0
            for name in names:
                end = start + math.prod(self._shapes[name])
                views[name] = flat[start:end].reshape(self._shapes[name])
                start = _up(end)
        return {name: views[name] for name in self._shapes}

    def join_state(self, named: Arrays) -> Arrays:
        state = {COUNT: named[COUNT]}
        for slot in _slots(named):
            of_weights = {name: named[f"{slot}.{name}"] for name in self._shapes}
            state |= {f"{slot}.{part}": array for part, array in self.join(of_weights).items()}
        return state

    def split_state(self, joined: Arrays) -> Arrays:
        slots = {slot: self.split({part: joined[f"{slot}.{part}"] for part in self._parts}) for slot in _slots(joined)}
        by_weight = {f"{slot}.{name}": views[name] for name in self._shapes for slot, views in slots.items()}
        return {COUNT: joined[COUNT], **by_weight}


def layout(weights: Arrays, optimizer: Optimizer) -> Apart:
    """Join the weights if kernels for long arrays are there and the optimizer's rule is elementwise."""
    fitting = tensors.usable(weights) and all(weight.dtype == mx.float32 for weight in weights.values())
    return Joined(weights) if fitting and optimizer.elementwise else Apart()


def _up(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _padded(flat: mx.array) -> list[mx.array]:
    """An array, and the zeros behind it, which have no gradient and stay zeros."""
    more = _up(flat.size) - flat.size
    return [flat, mx.zeros(more, flat.dtype)] if more else [flat]


def _slots(state: Arrays) -> list[str]:
    return list(dict.fromkeys(name.partition(".")[0] for name in state if name != COUNT))
