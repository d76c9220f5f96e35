"""Order and micro-batches: arithmetic that is the same on every machine and loses no trained token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import RandomRows

from trainwire_engine.batches import MicroBatch, Order, blank, mix, permutation, plan, single, split
from trainwire_engine.forms import Shape
from trainwire_engine.passes import host_arrays


def test_the_permutation_is_the_documented_one() -> None:
    assert permutation(10, 42, 0).tolist() == [4, 3, 5, 8, 0, 9, 7, 6, 1, 2]
    assert permutation(5, 0, 1).tolist() == [3, 0, 1, 2, 4]
    assert mix(42, 7, 3) == 17680642119211242809


def test_a_position_hash_in_plain_python_gives_the_same_order() -> None:
    mask = 2**64 - 1

    def splitmix(state: int) -> int:
        state = (state + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        return state ^ (state >> 31)

    def hashed(*values: int) -> int:
        state = 0
        for value in values:
            state = splitmix(state ^ value)
        return state

    for seed in (0, 42, 2**53 - 1):
        assert permutation(100, seed, 3).tolist() == sorted(range(100), key=lambda i: hashed(seed, 3, i))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 1000])
def test_every_row_comes_once_in_an_epoch(count: int, grouped: bool) -> None:
    lengths = np.random.default_rng(count).integers(1, 500, count)
    order = Order(count, 8, seed=0, group_by_length=grouped, lengths=lengths)
    for epoch in range(2):
        updates = [order.rows(epoch, update) for update in range(order.updates_per_epoch)]
        assert sorted(row for rows in updates for row in rows) == list(range(count))
        assert all(len(rows) == 8 for rows in updates[:-1])
        assert len(updates[-1]) == (count - 1) % 8 + 1


def test_rows_depend_on_seed_and_epoch_and_on_nothing_before() -> None:
    order = Order(100, 8, seed=1)
    first = [order.rows(0, update) for update in range(3)]
    assert order.rows(5, 2) != order.rows(0, 2)
    assert [Order(100, 8, seed=1).rows(0, update) for update in (2, 0, 1)] == [first[2], first[0], first[1]]
    assert Order(100, 8, seed=0).rows(0, 0) != first[0]


def test_without_shuffle_rows_come_as_they_are() -> None:
    assert Order(10, 4, seed=3, shuffle=False).rows(2, 1) == [4, 5, 6, 7]


def test_grouping_puts_rows_of_similar_length_into_one_update() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 800)

    def spread(grouped: bool) -> float:
        order = Order(800, 8, seed=0, group_by_length=grouped, lengths=lengths)
        return float(np.mean([np.ptp(lengths[order.rows(0, u)]) for u in range(order.updates_per_epoch)]))

    assert spread(True) < 0.05 * spread(False)


def test_an_update_outside_the_epoch_is_an_error() -> None:
    with pytest.raises(IndexError, match="3"):
        Order(10, 4, seed=0).rows(0, 3)


def test_inputs_after_the_last_trained_token_are_left_out() -> None:
    rows = RandomRows(1, shortest=80, longest=80)
    rows.mask(0)[:] = False
    rows.mask(0)[[5, 20]] = True
    (batch,) = plan(rows, [0], 2048)
    assert batch.tokens.shape == (1, 24)
    assert batch.real_tokens == 20


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(2, 9), at=st.integers(1, 8))
def test_a_micro_batch_can_be_cut_by_its_rows(seed: int, count: int, at: int) -> None:
    rows = RandomRows(count, shortest=2, longest=90, seed=seed)
    whole = single(rows, list(range(count)))
    pieces = split(whole, min(at, count - 1))
    assert [len(piece.rows) for piece in pieces] == [min(at, count - 1), max(1, count - at)]
    assert [row for piece in pieces for row in piece.rows] == list(whole.rows)
    assert sum(piece.real_tokens for piece in pieces) == whole.real_tokens

    def trained(batch: MicroBatch) -> list[tuple[int, int, int]]:
        places = [divmod(int(at), batch.tokens.shape[1]) for at in batch.positions[batch.weights > 0]]
        targets = batch.targets[batch.weights > 0]
        return [(batch.rows[row], column, int(target)) for (row, column), target in zip(places, targets)]

    assert sorted(place for piece in pieces for place in trained(piece)) == sorted(trained(whole))
    for piece in pieces:
        for row, line in zip(piece.rows, piece.tokens):
            end = int(np.flatnonzero(rows.mask(row))[-1])
            assert line[:end].tolist() == rows.tokens(row)[:end].tolist()


@pytest.mark.parametrize("packing", [False, True])
def test_a_micro_batch_without_rows_has_arrays_like_one_with_rows(packing: bool) -> None:
    for batch in plan(RandomRows(6), range(6), 4096, packing=packing):
        empty = blank(Shape(*batch.tokens.shape, batch.positions.size, tuple(part.shape for part in batch.spread)))
        assert empty.shape == batch.shape
        assert [(a.shape, a.dtype) for a in host_arrays(empty)] == [(a.shape, a.dtype) for a in host_arrays(batch)]
        assert (empty.rows, empty.real_tokens, float(empty.weights.sum())) == ((), 0, 0.0)
