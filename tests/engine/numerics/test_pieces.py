"""Passes in pieces: the same numbers, computed block after block, with nothing held that a whole pass lets go."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from tiny import RandomRows

from trainwire_engine import lanes as engine_lanes
from trainwire_engine import open_tasks, pieces
from trainwire_engine.batches import plan
from trainwire_engine.model import load_model
from trainwire_engine.optimizer import Optimizer
from trainwire_engine.pieces import compute, install, note, noted
from trainwire_engine.step import UpdateStep
from trainwire_protocol.config import Config


class Stack(nn.Module):
    """Blocks in a row, each of which doubles what it is given and multiplies it by a weight."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = [Doubling() for _ in range(count)]

    def __call__(self, x: mx.array) -> mx.array:
        for layer in self.layers:
            x = layer(x)
        return x


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = mx.array(1.5)

    def __call__(self, x: mx.array) -> mx.array:
        return 2 * x * self.weight


def test_what_blocks_are_given_is_noted_and_their_gradients_in_the_order_of_the_pass() -> None:
    stack = Stack(3)
    install(stack)
    with noted() as notes:
        total, grads = nn.value_and_grad(stack, lambda x: stack(x).sum())(mx.array([1.0]))
    assert [(path, [array.item() for array in arrays]) for path, arrays in notes] == [
        ("", [1.0]), ("", [3.0]), ("", [9.0]), ("layers.2", [3.0]), ("layers.1", [9.0]),
    ]  # fmt: skip
    assert [layer["weight"].item() for layer in grads["layers"]] == [18.0] * 3
    assert total.item() == 27.0


def test_a_block_is_told_from_its_like_when_nothing_is_noted() -> None:
    stack = Stack(2)
    install(stack)
    assert stack(mx.array([1.0])).item() == 9.0
    assert [type(layer).__name__ for layer in stack.layers] == ["Doubling"] * 2


def test_pieces_are_computed_in_turn_each_blocks_gradients_with_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[Any] = []
    monkeypatch.setattr(pieces.mx, "eval", lambda *arrays: computed.append([array.item() for array in arrays]))
    one, two, of_block, of_another = (mx.array(value) for value in (1.0, 2.0, 3.0, 4.0))
    notes = [("", (one,)), ("model.layers.1", (two,))]
    compute(notes, {"model.layers.1.mlp.weight": of_block, "model.layers.11.mlp.weight": of_another})
    assert computed == [[1.0], [2.0, 3.0]]
    assert notes == []


def test_a_pass_that_fails_leaves_no_note_and_no_array() -> None:
    held: list[Any] = []

    def failing() -> None:
        with noted() as notes:
            held.append(notes)
            note(mx.ones(3))
            raise ValueError("halfway")

    with pytest.raises(ValueError, match="halfway"):
        failing()
    assert held == [[]]
    with noted(False) as notes:
        note(mx.ones(3))
    assert notes == []


@pytest.mark.parametrize("keys", [{}, {"method": "full"}, {"gradient_checkpointing": True}], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_pieces_change_no_bit(
    config: Callable[..., Config],
    tiny: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    keys: dict[str, Any],
) -> None:
    rows = RandomRows(6, shortest=100, longest=300)
    outcomes = []
    for noting in (False, True):
        monkeypatch.setattr(pieces, "LARGE", 1)
        monkeypatch.setattr(engine_lanes, "WORTH", 1 if noting else 2**62)
        settings = config(model=tiny(family), **keys)
        model = load_model(settings)
        step = UpdateStep(model, Optimizer(settings), settings)
        step.lanes.count = 1
        results = [step(plan(rows, range(6), 700), step=n, learning_rate=1e-3, max_grad_norm=1.0) for n in (1, 2)]
        outcomes.append((results, {name: np.array(value) for name, value in model.trainable.items()}))
    (whole, weights), (in_pieces, others) = outcomes
    assert in_pieces == whole
    for name, value in weights.items():
        np.testing.assert_array_equal(others[name], value, err_msg=name)


def test_a_pass_lets_its_arrays_go(config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_lanes, "WORTH", 1)
    settings = config()
    model = load_model(settings)
    step = UpdateStep(model, Optimizer(settings), settings)
    batches = plan(RandomRows(4), range(4), 700)
    held = []
    for number in range(12):
        step(batches, step=number, learning_rate=1e-3, max_grad_norm=1.0)
        held.append(mx.get_active_memory())
    assert max(held[6:]) < 1.1 * max(held[:6])
    gone = weakref.ref(step)
    del step
    gc.collect()
    assert gone() is None


HEADER = """
class MLX_API Scheduler {
 public:
  Scheduler();
%s
 private:
  friend Stream mlx::core::new_stream(Device d);

  StreamThread& get_thread(Stream s);

  int n_active_tasks_{0};
  std::unordered_map<int, std::unique_ptr<StreamThread>> threads_;
};
"""


@pytest.mark.parametrize(
    ("header", "fits"),
    [
        (HEADER % "", True),
        (HEADER % "  virtual ~Scheduler();", False),
        (HEADER.replace("int n_active", "std::atomic<int> n_active") % "", False),
        (HEADER.replace("StreamThread& get_thread(Stream s);", "long begun_;") % "", False),
        ("", False),
    ],
)
def test_the_number_of_open_tasks_is_found_by_the_headers_layout_alone(header: str, fits: bool) -> None:
    assert open_tasks._laid_out(header) is fits


class Number:
    """A number in memory that says what it is told to."""

    def __init__(self, *values: int) -> None:
        self._values = iter(values)

    @property
    def value(self) -> int:
        return next(self._values)


@pytest.mark.parametrize(
    ("values", "counts"), [((0, 4, 0), True), ((0, 0, 0), False), ((1, 4, 1), False), ((0, 4096, 0), False)]
)
def test_a_number_that_does_not_count_open_tasks_is_left_alone(values: tuple[int, ...], counts: bool) -> None:
    assert open_tasks._counts(Number(*values)) is counts


def test_room_for_more_lanes_is_added_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Count:
        value = 0

    count = Count()
    monkeypatch.setattr(open_tasks, "_count", lambda: count)
    monkeypatch.setattr(open_tasks, "_allowed", 0)
    assert [open_tasks.allow(lanes) for lanes in (2, 2, 3, 1)] == [True] * 4
    assert count.value == -3 * open_tasks.EACH
    monkeypatch.setattr(open_tasks, "_count", lambda: None)
    assert not open_tasks.allow(8)


def test_two_threads_have_more_operations_open_than_mlx_lets_both_have_together() -> None:
    """With room for each, one that computes slowly does not hold up another."""
    if not open_tasks.allow(2):
        pytest.skip("this MLX is built another way")
    count = open_tasks._count()
    mx.synchronize()
    before = count.value
    x = mx.ones(300_000)
    for _ in range(200):
        x = mx.sin(x)
    mx.async_eval(x)
    assert count.value - before > 11
    mx.eval(x)
