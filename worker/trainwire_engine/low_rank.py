"""What adapted layers compute, their frozen layers' products and their adapters': in few and wide products.

Layers that are given one input (queries, keys and values; gate and up) are made together, where our kernels can.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from trainwire_engine.cuda import low_rank

Arrays = dict[str, mx.array]


@dataclass(frozen=True)
class Branch:
    """A frozen layer and its adapter's weights, a [in, rank] and b [rank, out].

    `names` are those of the weights among the trainable ones, if the layer has a gradient once in a pass.
    """

    linear: Any
    a: mx.array
    b: mx.array
    names: tuple[str, str] | None = None

    def computes_in(self, dtype: mx.Dtype) -> bool:
        """Tell whether the layer gives numbers of the type that it is given."""
        leaves = [leaf for _, leaf in tree_flatten(self.linear.parameters())]
        return all(leaf.dtype == dtype for leaf in leaves if mx.issubdtype(leaf.dtype, mx.floating))


class Collector:
    """Takes gradients of adapters as soon as a pass has what they are made of, and adds them to float32 sums in place.

    Otherwise all of them would be made at the end of a backward pass, which must keep every layer's input and gradient
    until then. `marks` must be evaluated, and name the sums that `names` has. `again` are those whose gradient came
    more than once, of which only the first was taken: the pass is of no use then.
    """

    def __init__(self, into: Arrays) -> None:
        self._into = into
        self.marks: list[mx.array] = []
        self.names: set[str] = set()
        self.again: set[str] = set()

    def takes(self, branches: Sequence[Branch]) -> bool:
        """Tell whether there are sums for the gradients of all these, which will be added to them."""
        names = [name for branch in branches for name in branch.names or ("",)]
        self.again |= self.names.intersection(names)
        if self.again or not all(name in self._into for name in names):
            return False
        self.names.update(names)
        return True

    def sums(self, branches: Sequence[Branch], which: int) -> list[mx.array]:
        """The sums for the branches' a (0) or b (1)."""
        return [self._into[branch.names[which]] for branch in branches if branch.names]


_collector: Collector | None = None


@contextmanager
def collecting(into: Arrays) -> Iterator[Collector]:
    """Let gradients that are made inside the block go to sums, named as the weights, where kernels can add them."""
    global _collector
    _collector = Collector(into)
    try:
        yield _collector
    finally:
        _collector = None


def low_rank_sums(x: mx.array, branches: Sequence[Branch], scale: float) -> list[mx.array]:
    """`linear(x) + scale · x A B` of each branch, whose layers are frozen; x [..., in]."""
    downs, ups = [branch.a for branch in branches], [branch.b for branch in branches]
    if low_rank.fits(x, downs, ups) and all(branch.computes_in(x.dtype) for branch in branches):
        return _by_kernels(x, branches, scale)
    return [low_rank_sum(branch.linear, x, branch.a, branch.b, scale) for branch in branches]


def _by_kernels(x: mx.array, branches: Sequence[Branch], scale: float) -> list[mx.array]:
    count, collector = len(branches), _collector

    @mx.custom_function
    def together(x: mx.array, *weights: mx.array) -> tuple[mx.array, ...]:
        zs = low_rank.narrow_one(x, weights[:count])
        bases = [branch.linear(x) for branch in branches]
        return (*low_rank.widen_each(bases, zs, weights[count:], scale), *zs)

    @together.vjp
    def pull(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, ...]:
        x, *weights = primals
        downs, ups, aboves, zs = weights[:count], weights[count:], cotangents[:count], outputs[count:]
        bases = [mx.vjp(branch.linear, [x], [above])[1][0] for branch, above in zip(branches, aboves)]
        d_zs = low_rank.narrow_each(aboves, ups)
        d_x = low_rank.widen_all(bases, d_zs, downs, scale)
        if collector is not None and collector.takes(branches):
            of_a, of_b = collector.sums(branches, 0), collector.sums(branches, 1)
            mark = low_rank.add_gradients(x, aboves, zs, d_zs, of_a, of_b, scale)
            collector.marks.append(mark)
            # Nobody asks for these.
            d_weights = [mx.zeros_like(weight) for weight in weights]
            return mx.depends(d_x, mark), *d_weights
        d_downs = [_scaled(scale, _rows(d_z).T, _rows(x)).T for d_z in d_zs]
        d_ups = [_scaled(scale, _rows(z).T, _rows(above)) for z, above in zip(zs, aboves)]
        return d_x, *d_downs, *d_ups

    outputs: Any = together(x, *(branch.a for branch in branches), *(branch.b for branch in branches))
    return list(outputs[:count])


def low_rank_sum(linear: Any, x: mx.array, a: mx.array, b: mx.array, scale: float) -> mx.array:
    """`linear(x) + scale · x A B` for a frozen layer, in few and wide products: what a GPU takes most time for.

    x [..., in], a [in, rank], b [rank, out]. The rank-wide parts of the output and of the gradient are added by the
    products that make them, which scale too.
    """

    @mx.custom_function
    def together(x: mx.array, a: mx.array, b: mx.array) -> tuple[mx.array, mx.array]:
        z = x @ a
        return mx.addmm(linear(x), z, b, alpha=scale), z

    @together.vjp
    def pull(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, ...]:
        x, a, b = primals
        above, z = cotangents[0], outputs[1]
        _, (d_x,) = mx.vjp(linear, [x], [above])
        d_z = above @ b.T
        # Rank-wide rows times wide rows: the other way round the card takes twice as long.
        d_a = _scaled(scale, _rows(d_z).T, _rows(x)).T
        return mx.addmm(d_x, d_z, a.T, alpha=scale), d_a, _scaled(scale, _rows(z).T, _rows(above))

    outputs: Any = together(x, a, b)
    return outputs[0]


def _scaled(scale: float, left: mx.array, right: mx.array) -> mx.array:
    """`scale · left right`, by the product itself."""
    return mx.addmm(_zeros(left.shape[0], right.shape[1], left.dtype), left, right, alpha=scale, beta=0.0)


@functools.cache
def _zeros(rows: int, columns: int, dtype: mx.Dtype) -> mx.array:
    """Zeros that nobody reads, made once: inside a trace they would be filled in every pass."""
    zeros = mx.zeros((rows, columns), dtype)
    mx.eval(zeros)
    return zeros


def _rows(x: mx.array) -> mx.array:
    return x.reshape(-1, x.shape[-1])
