"""The CUDA kernels against NumPy in double precision, on a machine with a card."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from doubles import close, draw, exact

from trainwire_engine.cuda import install, kernels, moving, norms, rotary, tensors, tracing
from trainwire_engine.cuda.adamw import adamw
from trainwire_engine.taking import taken

pytestmark = pytest.mark.skipif(
    mx.default_device() == mx.cpu or not kernels.available(), reason="no CUDA card that MLX computes on"
)

TYPES = [(mx.float32, 1e-6), (mx.bfloat16, 4e-3), (mx.float16, 6e-4)]
"""Each type with half the distance of its numbers at 1, and a little."""


@pytest.mark.parametrize(("dtype", "relative"), TYPES)
@pytest.mark.parametrize("shape", [(64, 96), (3, 5), (1, 8191)])
def test_swiglu_and_its_gradient(dtype: Any, relative: float, shape: tuple[int, int]) -> None:
    gate, up, upstream = (draw(seed, *shape, dtype=dtype, scale=2) for seed in (1, 2, 3))
    x, u, d = exact(gate), exact(up), exact(upstream)
    share = 1 / (1 + np.exp(-x))
    close(kernels.swiglu(gate, up), x * share * u, relative)
    (value,), (d_gate, d_up) = mx.vjp(kernels.swiglu, [gate, up], [upstream])
    close(value, x * share * u, relative)
    close(d_gate, d * u * (share + x * share * (1 - share)), relative)
    close(d_up, d * x * share, relative)


@pytest.mark.parametrize(("dtype", "relative"), TYPES)
@pytest.mark.parametrize(("rows", "words"), [(5, 64), (3, 1001), (4, 20000), (2, 151936)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_and_its_gradient(dtype: Any, relative: float, rows: int, words: int, smoothing: float) -> None:
    logits = draw(words, rows, words, dtype=dtype, scale=4)
    targets = np.random.default_rng(1).integers(0, words, rows).astype(np.int32)
    scores = exact(logits)
    targets[0] = scores[0].argmax()
    weights = np.ones(rows, np.float32)
    weights[-1] = 0
    loss, correct, gradient = kernels.cross_entropy(logits, mx.array(targets), mx.array(weights), smoothing)
    top = scores.max(axis=1, keepdims=True)
    powers = np.exp(scores - top)
    total = powers.sum(axis=1, keepdims=True)
    chosen = scores[np.arange(rows), targets]
    losses = (np.log(total) + top)[:, 0] - (1 - smoothing) * chosen - smoothing * scores.mean(axis=1)
    onehot = np.zeros_like(scores)
    onehot[np.arange(rows), targets] = 1
    wanted = (powers / total - (1 - smoothing) * onehot - smoothing / words) * weights[:, None]
    np.testing.assert_allclose(loss.item(), (losses * weights).sum(), rtol=2e-6)
    assert correct.item() == ((scores.argmax(axis=1) == targets) * weights).sum()
    close(gradient, wanted, relative)


def test_the_first_of_equal_logits_is_the_guess_and_nan_stays() -> None:
    logits = mx.array([[1.0, 3.0, 3.0, 0.0], [0.0, float("nan"), 1.0, 2.0], [float("-inf"), 0.0, 0.0, 0.0]])
    ones = mx.ones(3)
    loss, correct, gradient = kernels.cross_entropy(logits, mx.array([1, 3, 1], mx.int32), ones, 0.0)
    assert np.isnan(loss.item())
    assert correct.item() == 3
    assert np.isnan(np.array(gradient)[1]).all()
    np.testing.assert_allclose(np.array(gradient)[2], [0, 1 / 3 - 1, 1 / 3, 1 / 3], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("dtype", "_"), TYPES)
@pytest.mark.parametrize("width", [8, 12, 5])
def test_taking_rows_and_the_gradient_by_the_inverse(dtype: Any, _: float, width: int) -> None:
    x = draw(1, 6, width, dtype=dtype)
    index, inverse = mx.array([4, -1, 0, 2], mx.int32), mx.array([2, -1, 3, -1, 0, -1], mx.int32)
    rows, upstream = exact(x), draw(2, 4, width, dtype=dtype)
    expected = np.stack([rows[4], np.zeros(width), rows[0], rows[2]])
    (got,), (gradient,) = mx.vjp(lambda x: taken(x, index, inverse), [x], [upstream])
    assert np.array_equal(exact(got), expected)
    above = exact(upstream)
    zeros = np.zeros(width)
    assert np.array_equal(exact(gradient), np.stack([above[2], zeros, above[3], zeros, above[0], zeros]))


@pytest.mark.parametrize("width", [8, 6])
def test_heads_go_to_rows_and_back(width: int) -> None:
    heads, length = 3, 4
    flat = draw(1, 5, heads, width, dtype=mx.bfloat16)
    spread = np.array([[0, 1, 2, -1], [3, 4, -1, -1]], np.int32)
    back = np.array([0, 1, 2, 4, 5], np.int32)
    rows = kernels.take(flat, mx.array(spread.reshape(-1)), heads, length_to=length)
    rows = rows.reshape(2, heads, length, width)
    expected = np.zeros((2, length, heads, width))
    for row, places in enumerate(spread):
        for at, place in enumerate(places):
            if place >= 0:
                expected[row, at] = exact(flat)[place]
    assert np.array_equal(exact(rows), expected.swapaxes(1, 2))
    again = kernels.take(rows, mx.array(back), heads, length_from=length).reshape(5, heads, width)
    assert np.array_equal(exact(again), exact(flat))


ROPES = [
    {"base": 10000.0},
    {"base": 1e6, "scale": 0.25},
    {"frequencies": [1.0, 3.0, 17.5, 1e4]},
]


def turned(x: mx.array, how: dict[str, Any]) -> mx.array:
    frequencies = how.get("frequencies")
    return mx.fast.rope(
        x, x.shape[-1] if frequencies is None else 8, traditional=False, base=how.get("base"),
        scale=how.get("scale", 1.0), offset=0, freqs=None if frequencies is None else mx.array(frequencies),
    )  # fmt: skip


def by(how: dict[str, Any]) -> rotary.Rotation:
    if "frequencies" in how:
        return rotary.Rotation(0.0, 1.0, mx.array(how["frequencies"]))
    return rotary.Rotation(float(np.log2(np.float32(how["base"]))), how.get("scale", 1.0))


@pytest.mark.parametrize(("dtype", "relative"), [(mx.float32, 2e-6), (mx.bfloat16, 8e-3)])
@pytest.mark.parametrize(("how", "width"), [(ROPES[0], 64), (ROPES[1], 128), (ROPES[2], 8)])
@pytest.mark.parametrize("heads", [1, 6])
def test_rotary_positions_and_their_gradient(
    dtype: Any, relative: float, how: dict[str, Any], width: int, heads: int
) -> None:
    if width * dtype.size % 32:
        pytest.skip("too narrow for the kernel")
    x, upstream = draw(1, 2, 70, heads, width, dtype=dtype), draw(2, 2, heads, 70, width, dtype=dtype)
    (got,), (gradient,) = mx.vjp(lambda x: rotary.rotated(by(how), x.swapaxes(1, 2)), [x], [upstream])
    (wanted,), (theirs,) = mx.vjp(lambda x: turned(x.swapaxes(1, 2), how), [x], [upstream])
    close(got, exact(wanted), relative)
    close(gradient, exact(theirs), relative)


@pytest.mark.parametrize("heads", [1, 5])
def test_rotated_tokens_go_to_their_rows(heads: int) -> None:
    how, width, length = ROPES[0], 32, 4
    x, upstream = draw(1, 1, 6, heads, width), draw(2, 2, heads, length, width)
    slots = np.array([[0, 1, 2, -1], [3, 4, -1, -1]], np.int32)
    back = np.array([0, 1, 2, 4, 5, -1], np.int32)

    def spread(x: mx.array) -> mx.array:
        ended = mx.concatenate([x[0], mx.zeros((1, heads, width))])
        return ended[mx.array(np.where(slots < 0, 6, slots))].swapaxes(1, 2)

    ours = lambda x: rotary.spread(by(how), x.swapaxes(1, 2), mx.array(slots), mx.array(back))  # noqa: E731
    (got,), (gradient,) = mx.vjp(ours, [x], [upstream])
    (wanted,), (theirs,) = mx.vjp(lambda x: turned(spread(x), how), [x], [upstream])
    close(got, exact(wanted), 2e-6)
    close(gradient, exact(theirs), 2e-6)


@pytest.mark.parametrize(("dtype", "relative"), [(mx.float32, 2e-6), (mx.bfloat16, 8e-3)])
@pytest.mark.parametrize(("how", "width"), [(ROPES[0], 64), (ROPES[2], 8)])
@pytest.mark.parametrize("heads", [1, 5])
def test_tokens_are_turned_where_they_are_by_places_given(
    dtype: Any, relative: float, how: dict[str, Any], width: int, heads: int
) -> None:
    if width * dtype.size % 32:
        pytest.skip("less than the kernel takes at a time")
    x, upstream = draw(1, 1, 7, heads, width, dtype=dtype), draw(2, 1, heads, 7, width, dtype=dtype)
    places = [0, 1, 2, 3, 0, 1, 0]

    def apart(x: mx.array) -> mx.array:
        examples = (x.swapaxes(1, 2)[:, :, start:end] for start, end in ((0, 4), (4, 6), (6, 7)))
        return mx.concatenate([turned(example, how) for example in examples], axis=2)

    ours = lambda x: rotary.placed(by(how), x.swapaxes(1, 2), mx.array(places, mx.int32))  # noqa: E731
    (got,), (gradient,) = mx.vjp(ours, [x], [upstream])
    (wanted,), (theirs,) = mx.vjp(apart, [x], [upstream])
    close(got, exact(wanted), relative)
    close(gradient, exact(theirs), relative)


@pytest.mark.parametrize("width", [8, 6])
@pytest.mark.parametrize("rows", [[3, 2], [2, 3, 1], [1, 2, 3, 4], [3]])
def test_rows_of_up_to_four_sources_are_joined(width: int, rows: list[int]) -> None:
    sources = [draw(number, count, width, dtype=mx.bfloat16) for number, count in enumerate(rows)]
    index = [sum(rows) - 1, -1, *range(sum(rows)), 0]
    ended = np.concatenate([*(exact(source) for source in sources), np.zeros((1, width))])
    assert np.array_equal(exact(kernels.join(sources, mx.array(index, mx.int32))), ended[index])


@pytest.mark.parametrize("shapes", [[(1, 6), (2, 3)], [(1, 8), (1, 6), (1, 5), (3, 2)]])
def test_a_flat_row_goes_to_groups_of_rows_and_back(shapes: list[tuple[int, int]]) -> None:
    heads, width, sizes = 3, 16, [5, 3, 2]
    spread, back, token = [], np.full(sum(sizes) + 2, -1, np.int32), 0
    lines = [length for rows, length in shapes for _ in range(rows)]
    for number, length in enumerate(lines):
        size = sizes[number] if number < len(sizes) else 0
        spread.append([token + at if at < size else -1 for at in range(length)])
        back[token : token + size] = sum(lines[:number]) + np.arange(size)
        token += size
    slots = mx.array([place for row in spread for place in row], mx.int32)
    x = draw(1, 1, back.size, heads, width, dtype=mx.bfloat16).swapaxes(1, 2)
    above = [draw(9 + n, rows, heads, length, width, dtype=mx.bfloat16) for n, (rows, length) in enumerate(shapes)]
    deal = lambda x: moving.dealt(x, slots, mx.array(back), shapes)  # noqa: E731
    parts, (gradient,) = mx.vjp(deal, [x], above)
    ended = np.concatenate([exact(x)[0].swapaxes(0, 1), np.zeros((1, heads, width))])
    start = 0
    for part, (rows, length) in zip(parts, shapes):
        taken = ended[np.array(slots)[start : start + rows * length]].reshape(rows, length, heads, width)
        assert np.array_equal(exact(part), taken.swapaxes(1, 2))
        start += rows * length
    flat = [exact(part).swapaxes(1, 2).reshape(-1, heads, width) for part in above]
    expected = np.concatenate([*flat, np.zeros((1, heads, width))])[back]
    assert np.array_equal(exact(gradient)[0].swapaxes(0, 1), expected)
    join = lambda *parts: moving.joined(parts, slots, mx.array(back))  # noqa: E731
    (row,), gradients = mx.vjp(join, above, [x])
    assert np.array_equal(exact(row)[0].swapaxes(0, 1), expected)
    assert all(np.array_equal(exact(ours), exact(part)) for ours, part in zip(gradients, parts))


@pytest.mark.parametrize("shapes", [[(2, 256), (4, 128)]])
def test_attention_over_views_of_groups_is_that_over_copies_of_them(shapes: list[tuple[int, int]]) -> None:
    heads, width = 4, 64
    slots = mx.arange(sum(rows * length for rows, length in shapes), dtype=mx.int32)
    x = draw(1, 1, slots.size, heads, width, dtype=mx.bfloat16).swapaxes(1, 2)
    upstream = draw(2, 1, heads, slots.size, width, dtype=mx.bfloat16)

    def attention(x: mx.array, copied: bool) -> mx.array:
        parts = moving.dealt(x, slots, slots, shapes)
        if copied:
            parts = [mx.contiguous(part) for part in parts]
        scaled = [
            mx.fast.scaled_dot_product_attention(part, part, part, scale=width**-0.5, mask="causal") for part in parts
        ]
        return moving.joined(scaled, slots, slots)

    (got,), (gradient,) = mx.vjp(lambda x: attention(x, False), [x], [upstream])
    (wanted,), (theirs,) = mx.vjp(lambda x: attention(x, True), [x], [upstream])
    close(got, exact(wanted), 4e-3)
    close(gradient, exact(theirs), 2e-2)


@pytest.mark.parametrize(("dtype", "relative"), TYPES)
@pytest.mark.parametrize("width", [8, 128, 896, 1024, 4096])
@pytest.mark.parametrize("trained", [True, False])
def test_a_norm_and_its_gradients(dtype: Any, relative: float, width: int, trained: bool) -> None:
    own = nn.RMSNorm(width, eps=1e-5)
    own.weight = draw(3, width, dtype=dtype)
    own.__class__ = norms.RMSNorm
    if not trained:
        own.freeze()
    x, upstream = draw(1, 3, 101, width, dtype=dtype), draw(2, 3, 101, width, dtype=dtype)
    assert norms.fits(x, own.weight)

    def ours(x: mx.array, weight: mx.array) -> mx.array:
        own.weight = weight
        return own(x)

    (got,), gradients = mx.vjp(ours if trained else lambda x: own(x), [x, own.weight][: 1 + trained], [upstream])
    value, g, w = exact(x), exact(upstream), exact(own.weight)
    scale = 1 / np.sqrt((value**2).mean(axis=-1, keepdims=True) + 1e-5)
    close(got, value * scale * w, 2 * relative)
    along = (g * w * value).mean(axis=-1, keepdims=True)
    close(gradients[0], scale * g * w - value * scale**3 * along, 2 * relative)
    if trained:
        close(gradients[1], (g * value * scale).sum(axis=(0, 1)), 4 * relative)


def test_arrays_are_changed_in_place() -> None:
    targets, more = {name: mx.zeros(a.shape) for name, a in many().items()}, many(mx.bfloat16)
    mx.eval(targets, more)
    for _ in range(2):
        mx.eval(tensors.add_to(targets, more))
    assert all(np.array_equal(exact(targets[name]), 2 * exact(array)) for name, array in more.items())
    copies = tensors.copied(targets)
    mx.eval(copies)
    mx.eval(tensors.clear(targets))
    assert not any(exact(target).any() for target in targets.values())
    mx.eval(tensors.put(targets, copies))
    assert all(np.array_equal(exact(targets[name]), exact(copy)) for name, copy in copies.items())


def test_an_embedding_looks_up_what_mlx_does_and_has_its_gradient() -> None:
    plain = nn.Embedding(50, 16)
    words = mx.array([[3, 7, 3], [49, 0, 7]])
    own = nn.Embedding(50, 16)
    own.weight = plain.weight
    own.__class__ = install.Embedding
    assert np.array_equal(np.array(own(words)), np.array(plain(words)))

    def total(weight: mx.array, layer: nn.Module) -> mx.array:
        layer.weight = weight
        return mx.sum(mx.square(layer(words)))

    weight = plain.weight
    ours, theirs = (mx.grad(lambda w, layer=layer: total(w, layer))(weight) for layer in (own, plain))
    np.testing.assert_allclose(np.array(ours), np.array(theirs), rtol=1e-6)


def many(dtype: Any = mx.float32, count: int = 131) -> dict[str, mx.array]:
    return {f"w{i}": draw(i, 8, 3 + 37 * (i % 5), dtype=dtype) for i in range(count)} | {"norm": draw(999, 7)}


def test_many_arrays_are_cast_added_and_squared_at_once() -> None:
    arrays = many()
    cast = tensors.cast(arrays, dict.fromkeys(arrays, mx.bfloat16) | {"norm": mx.float32})
    assert list(cast) == list(arrays)
    for name, array in arrays.items():
        expected = array if name == "norm" else array.astype(mx.bfloat16)
        assert cast[name].dtype == expected.dtype
        assert np.array_equal(exact(cast[name]), exact(expected))
    sums = tensors.added(arrays, arrays)
    assert all(np.array_equal(exact(sums[name]), 2 * exact(array)) for name, array in arrays.items())
    squares = sum((exact(array) ** 2).sum() for array in arrays.values())
    np.testing.assert_allclose(tensors.square_sum(arrays).item(), squares, rtol=1e-5)
    assert tensors.square_sum(arrays).item() == tensors.square_sum(arrays).item()


@pytest.mark.parametrize("accept", [True, False])
def test_adamw_over_many_arrays(accept: bool) -> None:
    params, grads = many(), {name: draw(5000 + i, *a.shape) for i, (name, a) in enumerate(many().items())}
    means = {name: draw(7000 + i, *a.shape) for i, (name, a) in enumerate(params.items())}
    squares = {name: mx.square(value) for name, value in means.items()}
    rate, keep, scale, first, second = 0.01, 0.9, 0.5, 1.7, 1.3
    scalars = mx.array([rate, keep, scale, float(accept), first, second])
    new, mean, square = adamw(
        params, grads, means, squares, scalars, betas=(0.9, 0.999), eps=1e-8, decays=lambda p: p.ndim >= 2
    )
    for name in params:
        w, g, m, v = (exact(source[name]) for source in (params, grads, means, squares))
        if accept:
            g = g * scale
            m, v = 0.9 * m + (1 - 0.9) * g, 0.999 * v + (1 - 0.999) * g * g
            w = w * (keep if w.ndim >= 2 else 1) - rate * (m * first) / (np.sqrt(v) * second + 1e-8)
        close(new[name], w, 1e-6)
        close(mean[name], m, 1e-6)
        close(square[name], v, 2e-6)


def test_what_is_compiled_without_fusing_gives_the_same() -> None:
    def function(x: mx.array) -> mx.array:
        return mx.exp(x) * 2 + mx.sin(x) * x

    x = draw(1, 100)
    before = np.array(function(x))
    with tracing.fusing(False):
        got = np.array(mx.compile(function)(x))
    assert np.array_equal(got, before)
