"""Weights that are joined to long arrays: the same numbers, by every name, and the same updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny import RandomRows

from trainwire_engine import joined, step
from trainwire_engine.batches import plan
from trainwire_engine.joined import Apart, Joined
from trainwire_engine.model import load_model
from trainwire_engine.optimizer import Optimizer
from trainwire_protocol.config import Config

ROWS = RandomRows(16)


def arrays(seed: int = 0) -> dict[str, mx.array]:
    draw = np.random.default_rng(seed)
    shapes = {"a": (2, 3), "norm": (5,), "b": (4, 1, 2), "scale": (), "c": (3, 3)}
    return {name: mx.array(draw.normal(size=shape).astype(np.float32)) for name, shape in shapes.items()}


def equal(got: dict[str, mx.array], expected: dict[str, mx.array]) -> None:
    assert list(got) == list(expected)
    assert all(np.array_equal(np.array(got[name]), np.array(array)) for name, array in expected.items())


def test_what_is_joined_comes_apart_again_in_its_order() -> None:
    layout = Joined(arrays())
    parts = layout.join(arrays(1))
    assert [(part.ndim, part.size) for part in parts.values()] == [(2, 28), (1, 12)]
    equal(layout.split(parts), arrays(1))


def test_each_weight_begins_where_sixteen_bytes_do() -> None:
    layout = Joined(arrays())
    numbered = {part: mx.arange(array.size).reshape(array.shape) for part, array in layout.join(arrays(1)).items()}
    firsts = [view.reshape(-1).tolist()[0] for view in layout.split(numbered).values()]
    assert firsts == [0, 0, 8, 8, 16]


def test_no_joined_array_is_longer_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "_MOST", 10)
    layout = Joined(arrays())
    parts = layout.join(arrays(1))
    assert sorted(part.size for part in parts.values()) == [4, 8, 8, 8, 12]
    equal(layout.split(parts), arrays(1))


def test_an_optimizers_state_is_joined_slot_by_slot() -> None:
    layout = Joined(arrays())
    named = {"count": mx.array(7, mx.int32)}
    named |= {
        f"{slot}.{name}": array
        for name in arrays()
        for slot, array in (("mean", arrays(2)[name]), ("square", arrays(3)[name]))
    }
    parts = layout.join_state(named)
    assert len(parts) == 5
    equal(layout.split_state(parts), named)


@pytest.mark.parametrize(
    "keys", [{}, {"method": "full", "weight_decay": 0.1}, {"optimizer": "sgd"}, {"optimizer": "lion"}], ids=repr
)
def test_updates_of_joined_weights_are_those_of_weights_apart(
    keys: dict[str, Any], config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(**keys)
    found = []
    for layout in (Apart, Joined):
        monkeypatch.setattr(
            step, "layout", lambda weights, _, layout=layout: layout(weights) if layout is Joined else layout()
        )
        trainer = step.UpdateStep(load_model(settings), Optimizer(settings), settings)
        figures = []
        for number in range(6):
            if number == 3:
                # As a resume does it.
                trainer.model.set_trainable(dict(trainer.model.trainable))
                trainer.state = dict(trainer.state)
            result = trainer(plan(ROWS, range(8), 256), step=number, learning_rate=0.01, max_grad_norm=1.0)
            figures += [result.loss, result.grad_norm]
        found.append((figures, dict(trainer.model.trainable), dict(trainer.state)))
    (figures, weights, state), others = found
    np.testing.assert_allclose(others[0], figures, rtol=1e-5)
    for ours, theirs in ((others[1], weights), (others[2], state)):
        assert list(ours) == list(theirs)
        for name, array in theirs.items():
            np.testing.assert_allclose(np.array(ours[name]), np.array(array), rtol=1e-4, atol=1e-6, err_msg=name)


def test_weights_whose_rule_looks_at_whole_matrices_stay_apart(config: Callable[..., Config]) -> None:
    assert not isinstance(joined.layout(arrays(), Optimizer(config(optimizer="muon"))), Joined)
