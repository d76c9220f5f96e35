"""The shapes that are chosen for a run: few, close to its rows, and the same whenever they are asked for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import ChatRows, RandomRows

from trainwire_engine.batches import MicroBatch, Order, plan, share, sizes
from trainwire_engine.describe import expected_padding
from trainwire_engine.feed import Feed, shapes_of_run
from trainwire_engine.forms import Costs, Form, Rows
from trainwire_engine.palette import Palette, choose, cut
from trainwire_engine.ranks import Alone
from trainwire_engine.shapes import CPU, CUDA

BUDGET = 16384
assert CUDA.costs is not None
COSTS: Costs = CUDA.costs


def run_of(batch_size: int, *, packing: bool, budget: int = BUDGET) -> SimpleNamespace:
    return SimpleNamespace(batch_size=batch_size, micro_batch_tokens=budget, packing=packing)


def chosen(dataset: ChatRows | RandomRows, order: Order, config: SimpleNamespace, updates: int) -> Palette:
    palette = shapes_of_run(dataset, order, config, updates, device=CUDA)
    assert isinstance(palette, Palette)
    return palette


def cost(batches: list[MicroBatch]) -> float:
    """The time of micro-batches, in tokens."""
    total = 0.0
    for batch in batches:
        groups = [rows.shape for rows in batch.spread] or [batch.tokens.shape]
        tokens = batch.tokens.size * (1 - COSTS.position) + batch.positions.size * COSTS.position
        attention = sum(COSTS.attention(*group) for group in groups) + COSTS.group * (len(groups) - 1)
        total += COSTS.once + tokens + attention
    return total


@pytest.mark.parametrize(
    ("packing", "rows", "batch_size", "most", "padding", "a_token", "before"),
    [
        (False, 2000, 8, 7, 0.56, 4.4, 5.6),
        (False, 2000, 64, 7, 0.43, 3.05, 3.9),
        (False, 20000, 8, 18, 0.45, 3.35, 5.0),
        (False, 20000, 64, 18, 0.36, 2.35, 2.6),
        (True, 2000, 8, 6, 0.3, 2.95, 4.3),
        (True, 2000, 64, 6, 0.26, 2.3, 3.5),
        (True, 20000, 8, 16, 0.18, 2.45, 3.3),
        (True, 20000, 64, 15, 0.12, 1.8, 2.1),
    ],
)
def test_chat_rows_cost_less_in_few_shapes_of_their_own_than_on_the_grid(
    packing: bool, rows: int, batch_size: int, most: int, padding: float, a_token: float, before: float
) -> None:
    dataset, config = ChatRows(rows), run_of(batch_size, packing=packing)
    order = Order(rows, batch_size, seed=0)
    palette = chosen(dataset, order, config, order.updates_per_epoch)
    looked_at = range(0, order.updates_per_epoch, max(1, rows // 2000))

    def figures(shapes: Palette | None) -> tuple[int, float, float]:
        batches = [
            batch
            for update in looked_at
            for batch in plan(dataset, order.rows(0, update), BUDGET, shapes or CUDA, packing=packing)
        ]
        real, computed = (sum(values) for values in zip(*((b.real_tokens, b.tokens.size) for b in batches)))
        met = len({batch.shape for batch in batches})
        new = COSTS.new * met * len(looked_at) / order.updates_per_epoch
        return met, 1 - real / computed, (cost(batches) + new) / real

    met, share_of_padding, each = figures(palette)
    assert met <= most
    assert share_of_padding < padding
    assert each < a_token
    assert figures(None)[2] > before


def test_a_short_run_gets_fewer_shapes_than_a_long_one() -> None:
    dataset, order, config = ChatRows(2000), Order(2000, 8, seed=0), run_of(8, packing=False)
    counts = [len(chosen(dataset, order, config, updates).vectors) for updates in (3, 300, 10**6)]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert 2 < counts[1] < counts[2] <= COSTS.most


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_micro_batch_of_a_run_has_one_of_its_shapes(packing: bool, ranks: int) -> None:
    dataset, config, updates = ChatRows(3000), run_of(8, packing=packing), 1000
    order = Order(3000, 8, seed=4)
    palette = shapes_of_run(dataset, order, config, updates, ranks, device=CUDA)
    assert isinstance(palette, Palette)
    known = {palette.form.shape(vector) for vector in palette.vectors}
    assert len(known) <= COSTS.most
    for number in range(0, updates, 41):
        rows = order.rows(*divmod(number, order.updates_per_epoch))
        for part in share(dataset, rows, ranks, BUDGET, CUDA, packing=packing):
            assert {shape for _, _, shape in palette.cuts(sizes(dataset, part), BUDGET, packing=packing)} <= known


def test_shapes_follow_from_the_whole_run_alone() -> None:
    dataset, config = ChatRows(2000), run_of(8, packing=True)
    first = chosen(dataset, Order(2000, 8, seed=1), config, 700)
    order = Order(2000, 8, seed=1)
    order.rows(5, 3)
    again = chosen(dataset, order, config, 700)
    assert np.array_equal(first.vectors, again.vectors)
    assert not np.array_equal(first.vectors, chosen(dataset, Order(2000, 8, seed=1), config, 70).vectors)


def test_a_device_that_records_nothing_keeps_its_policy() -> None:
    assert shapes_of_run(RandomRows(8), Order(8, 8, seed=0), run_of(8, packing=False), 10) is CPU


def test_a_feed_makes_micro_batches_of_the_shapes_it_is_given_and_the_padding_is_told_by_them() -> None:
    dataset, order, config = RandomRows(40), Order(40, 8, seed=0), run_of(8, packing=False, budget=512)
    palette = chosen(dataset, order, config, 5)
    known = {palette.form.shape(vector)[:3] for vector in palette.vectors}
    portions = [Feed(dataset, order, config, Alone(), palette).take(0, update) for update in range(5)]
    batches = [batch for portion in portions for batch in portion.micro_batches]
    assert {(*batch.tokens.shape, batch.positions.size) for batch in batches} <= known
    real, computed = sum(b.real_tokens for b in batches), sum(b.tokens.size for b in batches)
    assert expected_padding(dataset, config, order, palette) == pytest.approx(1 - real / computed)  # type: ignore[arg-type]


def test_rows_that_no_shape_holds_go_to_the_grid() -> None:
    short, long = RandomRows(8, longest=20), RandomRows(8, shortest=300, longest=400)
    palette = chosen(short, Order(8, 8, seed=0), run_of(8, packing=False), 10)
    expected = plan(long, range(8), BUDGET, CUDA)
    assert [b.shape for b in plan(long, range(8), BUDGET, palette)] == [b.shape for b in expected]


UPDATES = st.lists(
    st.lists(st.tuples(st.integers(1, 120), st.integers(1, 120)), min_size=1, max_size=6), min_size=1, max_size=6
)


def as_rows(pairs: list[tuple[int, int]]) -> Rows:
    pairs = sorted(((max(pair), min(pair)) for pair in pairs), reverse=True)
    return Rows(*np.array(pairs, np.int64).T)


def costs_of(form: Form, shapes: np.ndarray, rows: Rows) -> int:
    found = cut(form, shapes, rows)
    return 2**40 if found is None else sum(int(form.cost(shapes[which])) for *_, which in found)


@settings(max_examples=30, deadline=None)
@given(updates=UPDATES, packing=st.booleans(), budget=st.sampled_from([100, 300, 1000]), times=st.integers(1, 2000))
def test_chosen_shapes_hold_all_rows_under_the_budget_and_none_is_needless(
    updates: list[list[tuple[int, int]]], packing: bool, budget: int, times: int
) -> None:
    form = CUDA.form(budget, np.arange(1, 121), packing=packing)
    rows = [as_rows(pairs) for pairs in updates]
    longest = as_rows([(max(r.sizes.max() for r in rows), max(r.trained.max() for r in rows))])
    shapes = choose(form, rows, longest, times, CUDA).vectors
    assert form.fits(shapes).all()
    assert len(shapes) <= COSTS.most
    for update in rows:
        found = cut(form, shapes, update)
        assert found is not None
        assert [start for start, _, _ in found] == [0, *(end for _, end, _ in found[:-1])]
        assert found[-1][1] == len(update)
        for start, end, which in found:
            assert (form.needs(update, np.array([start]), end)[0] <= shapes[which]).all()
    new = COSTS.new / times
    total = sum(costs_of(form, shapes, update) for update in rows) + new * len(shapes)
    for left in range(len(shapes)):
        without = np.delete(shapes, left, axis=0)
        held = len(without) > 0 and cut(form, without, longest) is not None
        if held:
            others = sum(costs_of(form, without, update) for update in rows) + new * len(without)
            assert others > total - 0.02 * total - len(shapes)


@settings(max_examples=30, deadline=None)
@given(pairs=UPDATES, packing=st.booleans(), tile=st.sampled_from([4, 128]), drawn=st.randoms(use_true_random=False))
def test_rows_are_cut_into_shapes_at_the_least_cost(
    pairs: list[list[tuple[int, int]]], packing: bool, tile: int, drawn: np.random.Generator
) -> None:
    tiled = replace(CUDA, costs=replace(COSTS, tile=tile, slot=1.0))
    form = tiled.form(300, np.arange(1, 121), packing=packing)
    rows = as_rows(pairs[0])
    spans = [form.needs(as_rows(p), np.array([drawn.randrange(len(p))]), len(p)) for p in pairs]  # type: ignore[attr-defined]
    shapes = form.rounded(np.concatenate(spans))

    def least(start: int) -> float:
        if start == len(rows):
            return 0
        found = [float("inf")]
        for end in range(start + 1, len(rows) + 1):
            held = (form.needs(rows, np.array([start]), end)[0] <= shapes).all(axis=1)
            found += [int(c) + least(end) for c in form.cost(shapes[held])]
        return min(found)

    cheapest = least(0)
    found = cut(form, shapes, rows)
    assert (found is None) == (cheapest == float("inf"))
    assert found is None or costs_of(form, shapes, rows) == cheapest


@pytest.mark.parametrize(("batch_size", "count", "faster"), [(64, 2, 1.6), (256, 2, 1.85), (256, 8, 5.8)])
def test_the_dearest_share_costs_little_more_than_its_part_of_the_whole(
    batch_size: int, count: int, faster: float
) -> None:
    dataset, order, config = ChatRows(2000), Order(2000, batch_size, seed=0), run_of(batch_size, packing=False)
    shapes = shapes_of_run(dataset, order, config, 100_000, count, device=CUDA)
    updates = [order.rows(0, update) for update in range(512 // batch_size)]
    whole = sum(cost(plan(dataset, rows, BUDGET, shapes)) for rows in updates)
    shares = [share(dataset, rows, count, BUDGET, CUDA) for rows in updates]
    dearest = sum(max(cost(plan(dataset, part, BUDGET, shapes)) for part in parts) for parts in shares)
    assert whole / dearest > faster


def test_an_update_of_thousands_of_rows_is_a_sample_as_well() -> None:
    dataset, config = ChatRows(5000), run_of(5000, packing=False)
    palette = chosen(dataset, Order(5000, 5000, seed=0), config, 3)
    assert 1 < len(palette.vectors) <= COSTS.most


def test_fewer_groups_are_made_if_no_more_are_wanted() -> None:
    dataset, order, config = ChatRows(400), Order(400, 32, seed=0), run_of(32, packing=True)
    for wanted in (1, 2, 4):
        palette = shapes_of_run(dataset, order, config, 1000, groups=wanted, device=CUDA)
        assert isinstance(palette, Palette)
        assert max(len(palette.form.shape(vector).groups) for vector in palette.vectors) == wanted


def test_costs_of_another_card_choose_other_shapes() -> None:
    dataset, order, config = ChatRows(400), Order(400, 8, seed=0), run_of(8, packing=False)
    dear = replace(CUDA, costs=replace(COSTS, new=10**7))
    palette = shapes_of_run(dataset, order, config, 50, device=dear)
    assert isinstance(palette, Palette)
    assert len(palette.vectors) == 1
    assert len(chosen(dataset, order, config, 5000).vectors) > 5


@pytest.mark.parametrize("packing", [False, True])
def test_the_largest_shape_is_the_one_whose_passes_cost_most(packing: bool) -> None:
    dataset, order, config = ChatRows(400), Order(400, 8, seed=0), run_of(8, packing=packing)
    palette = chosen(dataset, order, config, 1000)
    costs = [int(palette.form.cost(vector)) for vector in palette.vectors]
    assert len(costs) > 1
    assert palette.largest == palette.form.shape(palette.vectors[costs.index(max(costs))])
