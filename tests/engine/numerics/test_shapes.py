"""The policies of shapes: few of them where each is traced, little padding where none is."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import ChatRows, RandomRows, tiny_model

from trainwire_engine import memory, shapes
from trainwire_engine.batches import Order, plan, share, single
from trainwire_engine.feed import shapes_of_run
from trainwire_engine.forms import Rows
from trainwire_engine.model import load_model
from trainwire_engine.optimizer import Optimizer
from trainwire_engine.shapes import CPU, CUDA, METAL, Shapes
from trainwire_engine.step import UpdateStep
from trainwire_protocol.config import Config

POLICIES = {"cpu": CPU, "cuda": CUDA, "metal": METAL}


def over_an_epoch(policy: Shapes, batch_size: int, budget: int, *, packing: bool = False) -> tuple[int, float, float]:
    """Number of shapes, share of padding and micro-batches per update over 2,000 chat rows."""
    rows = ChatRows(2000)
    order = Order(2000, batch_size, seed=0)
    batches = [
        b for u in range(order.updates_per_epoch) for b in plan(rows, order.rows(0, u), budget, policy, packing=packing)
    ]
    met = {batch.shape for batch in batches}
    padding = 1 - sum(batch.real_tokens for batch in batches) / sum(batch.tokens.size for batch in batches)
    return len(met), padding, len(batches) / order.updates_per_epoch


def test_two_thousand_chat_rows_make_at_most_ten_shapes_on_a_cuda_card() -> None:
    met, padding, passes = over_an_epoch(CUDA, 8, 16384)
    assert met <= 4
    assert padding < 0.75
    assert passes < 1.5
    met, padding, _ = over_an_epoch(CUDA, 16, 16384)
    assert met <= 6
    assert padding < 0.7


def test_packed_rows_make_as_few_shapes_with_little_padding() -> None:
    met, padding, passes = over_an_epoch(CUDA, 8, 16384, packing=True)
    assert met <= 10
    assert padding < 0.3
    assert passes < 1.1
    assert over_an_epoch(CPU, 8, 2048, packing=True)[1] < 0.05


def test_padding_stays_low_where_shapes_cost_nothing() -> None:
    assert over_an_epoch(CPU, 8, 2048)[1] < 0.06
    assert over_an_epoch(METAL, 8, 8192)[1] < 0.25


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(POLICIES)),
    seed=st.integers(0, 2**32),
    budget=st.sampled_from([300, 512, 4096, 16384]),
    count=st.integers(1, 12),
)
def test_a_plan_holds_every_trained_token_once_under_the_budget(kind: str, seed: int, budget: int, count: int) -> None:
    rows = RandomRows(count, shortest=2, longest=90, seed=seed)
    batches = plan(rows, list(range(count)), budget, POLICIES[kind])
    seen = []
    for batch in batches:
        assert len(batch.rows) == 1 or batch.tokens.size <= budget
        for position, target, weight in zip(batch.positions, batch.targets, batch.weights):
            if weight:
                line, column = divmod(int(position), batch.tokens.shape[1])
                seen.append((batch.rows[line], column + 1, int(target)))
                assert rows.tokens(batch.rows[line])[: column + 1].tolist() == batch.tokens[line, : column + 1].tolist()
    expected = [
        (row, int(at), int(rows.tokens(row)[at])) for row in range(count) for at in np.flatnonzero(rows.mask(row))
    ]
    assert sorted(seen) == sorted(expected)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(POLICIES)),
    count=st.integers(1, 5),
    rows=st.integers(0, 12),
    seed=st.integers(0, 2**32),
    packing=st.booleans(),
)
def test_every_row_of_an_update_is_in_one_share(kind: str, count: int, rows: int, seed: int, *, packing: bool) -> None:
    dataset = RandomRows(12, shortest=2, longest=90, seed=seed)
    shares = share(dataset, list(range(rows)), count, 512, POLICIES[kind], packing=packing)
    assert len(shares) == count
    assert sorted(row for taken in shares for row in taken) == list(range(rows))


@pytest.mark.parametrize(
    ("kind", "batch_size", "count", "faster"),
    [("cpu", 16, 2, 1.85), ("cpu", 64, 4, 3.7)],
)
def test_the_dearest_share_costs_little_more_than_its_part_of_the_whole(
    kind: str, batch_size: int, count: int, faster: float
) -> None:
    policy, budget = POLICIES[kind], 2048
    dataset, order = ChatRows(2000), Order(2000, batch_size, seed=0)

    def cost(rows: list[int]) -> int:
        batches = plan(dataset, rows, budget, policy)
        return sum(max(batch.tokens.size, policy.least_pass) + policy.pass_cost for batch in batches)

    updates = [order.rows(0, update) for update in range(2000 // batch_size)]
    whole = sum(cost(rows) for rows in updates)
    dearest = sum(max(map(cost, share(dataset, rows, count, budget, policy))) for rows in updates)
    assert whole / dearest > faster


@given(length=st.integers(1, 40000), rows=st.integers(1, 500))
def test_padding_has_a_bound(length: int, rows: int) -> None:
    assert length <= CPU.length(length) <= max(length + 7, length * 1.032)
    assert length <= CUDA.length(length) < max(257, 2 * length)
    assert length <= METAL.length(length) <= max(length + 63, length * 1.25)
    assert CPU.rows(rows, 32, 2048) == rows
    assert rows <= METAL.rows(rows, 32, 2048) <= rows * 1.5
    assert rows <= CUDA.rows(rows, 256, 0) < 2 * rows
    for policy in POLICIES.values():
        area, trained = policy.length(length), min(rows, length)
        assert trained <= policy.positions(trained, area) < area + 64
    assert CPU.positions(rows, length) < rows + 8


def test_lengths_fall_on_a_grid_of_few_values() -> None:
    assert len({CPU.length(n) for n in range(1, 32769)}) <= 256
    assert {CUDA.length(n) for n in range(1, 4097)} == {256, 512, 1024, 2048, 4096}
    assert all(policy.length(2048) == 2048 for policy in POLICIES.values())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=7),
    st.integers(64, 1200),
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from([0, 500]),
)
def test_micro_batches_are_cut_where_it_costs_least(lengths: list[int], budget: int, kind: str, least: int) -> None:
    policy = replace(POLICIES[kind], pass_cost=64, least_pass=least)
    sizes = np.array(sorted(lengths, reverse=True))
    lengths = [policy.length(int(size)) for size in sizes]

    def padded(start: int, end: int) -> int:
        return lengths[start] * policy.rows(end - start, lengths[start], budget)

    def cost(cuts: list[tuple[int, int]]) -> int:
        return sum(max(padded(start, end), least) + 64 for start, end in cuts)

    def ways(start: int) -> list[list[tuple[int, int]]]:
        if start == len(lengths):
            return [[]]
        ends = [e for e in range(start + 1, len(lengths) + 1) if e == start + 1 or padded(start, e) <= budget]
        return [[(start, end), *rest] for end in ends for rest in ways(end)]

    cuts = [(cut.start, cut.end) for cut in policy.cuts(Rows(sizes, sizes // 2), budget)]
    assert cuts in ways(0)
    assert cost(cuts) == min(map(cost, ways(0)))


def test_a_chunk_of_the_head_has_32_megabytes_of_logits_on_a_cpu_and_4096_positions_on_a_large_card() -> None:
    assert CPU.chunk(512, 100) == 100
    assert CPU.chunk(32768, 4096) == 256
    assert CPU.chunk(151936, 4096) == CPU.chunk(262144, 4096) == 64

    def chunk(gigabytes: int) -> int:
        return replace(CUDA, chunk_bytes=gigabytes * 2**30 // 48).chunk(151936, 16384)

    assert [chunk(size) for size in (8, 24, 80, 140)] == [256, 512, 2048, 4096]
    assert replace(CUDA, chunk_bytes=2**40).chunk(512, 16384) == 4096


def test_the_policy_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes.policy.cache_clear()
    assert shapes.policy() is CPU
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(memory, "total_memory", lambda: 48 * 2**31)
    for metal, expected in ((False, CUDA), (True, METAL)):
        shapes.policy.cache_clear()
        monkeypatch.setattr(mx.metal, "is_available", lambda metal=metal: metal)
        assert shapes.policy() == replace(expected, chunk_bytes=2**31)
    shapes.policy.cache_clear()


def test_a_policy_changes_neither_loss_nor_gradient(tmp_path) -> None:  # type: ignore[no-untyped-def]
    config = Config(model=str(tiny_model(tmp_path / "m")), data="x", run_dir="r", seed=1)
    rows = RandomRows(8)
    found = []
    run = Config(model="m", data="x", run_dir="r", batch_size=8, micro_batch_tokens=4096)
    palette = shapes_of_run(rows, Order(8, 8, seed=0), run, 10**4, device=CUDA)
    for policy in (*POLICIES.values(), palette):
        model = load_model(config)
        step = UpdateStep(model, Optimizer(config), config)
        for number in range(2):
            result = step(plan(rows, range(8), 4096, policy), step=number, learning_rate=0.05, max_grad_norm=1.0)
        found.append([result.loss, result.grad_norm, result.tokens, result.correct])
    np.testing.assert_allclose(found[1:], [found[0]] * 3, rtol=1e-5)


def test_an_update_tells_when_it_traces(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    config = Config(model=str(tiny_model(tmp_path / "m")), data="x", run_dir="r")
    short, long = single(RandomRows(2, longest=20), [0, 1]), single(RandomRows(2, shortest=70, longest=80), [0, 1])
    model = load_model(config)
    step = UpdateStep(model, Optimizer(config), config)
    assert [step.compiles(batches) for batches in ([short], [short], [long])] == [True, False, False]
    step = UpdateStep(model, Optimizer(config), config)
    monkeypatch.setattr("trainwire_engine.step.on_cpu", lambda: False)
    assert [step.compiles(b) for b in ([short], [short], [short, long], [long])] == [True, False, True, False]
