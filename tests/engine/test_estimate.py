"""The memory that is predicted before a run is the memory that its updates take."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from tiny import VOCABULARY, RandomRows

from trainwire_engine import estimate as module
from trainwire_engine import memory, native, trials
from trainwire_engine.batches import Order, plan, single
from trainwire_engine.estimate import Estimate, Sizes, estimate, sizes
from trainwire_engine.lanes import Lanes
from trainwire_engine.model import load_model
from trainwire_engine.optimizer import Optimizer
from trainwire_engine.step import UpdateStep
from trainwire_engine.trials import Fullest, at_once
from trainwire_protocol.config import Config


def fresh(config: Config) -> UpdateStep:
    """The parts of a run, of which what the process did before is no part."""
    gc.collect()
    memory.clear_cache()
    memory.figures(reset_peak=True)
    return UpdateStep(load_model(config), Optimizer(config), config)


def real_peak(config: Config, rows: RandomRows, *, reaching: float = 0.0) -> int:
    """Train two epochs, or several until the peak is so high: the peak of a run, in which lanes meet many times."""
    order = Order(len(rows), config.batch_size, config.seed)
    step = fresh(config)
    memory.figures(reset_peak=True)
    # The first update begins with a smaller state of the optimizer.
    for epoch in range(_MOST_EPOCHS if reaching else 2):
        for update in range(order.updates_per_epoch):
            batches = plan(rows, order.rows(0, update), config.micro_batch_tokens or 0, packing=config.packing)
            step(batches, step=update + 1, learning_rate=1e-3, max_grad_norm=1.0)
        if epoch + 1 >= _FEWEST_EPOCHS and memory.figures().peak >= reaching:
            break
    return memory.figures().peak


_FEWEST_EPOCHS, _MOST_EPOCHS = 6, 60
"""Of a run on several lanes. Where other processes use the cores, too, lanes may miss each other for a while."""


def predicted(config: Config, rows: RandomRows) -> Estimate:
    """Predict an epoch."""
    order = Order(len(rows), config.batch_size, config.seed)
    step = fresh(config)
    updates = order.updates_per_epoch

    def planned(budget: int) -> Sizes:
        return sizes(rows, order, budget, updates, step.lanes, packing=config.packing)

    return estimate(step.model, step, planned, config, steps=updates, evaluated_tokens=0)


def predicted_and_real(config: Config, rows: RandomRows, budget: int) -> tuple[int, int]:
    """Predict the peak of a run, then train it with another copy of the model and read the peak."""
    config = msgspec.structs.replace(config, micro_batch_tokens=budget)
    told = predicted(config, rows).peak_bytes
    return told, real_peak(config, rows, reaching=told / 1.15 if native.lanes() > 1 else 0.0)


SHAPE = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 8}
"""Of the models: deep enough that most of their blocks are not tried."""


def long_rows() -> RandomRows:
    return RandomRows(2, shortest=295, longest=300)


def mixed_rows() -> RandomRows:
    return RandomRows(8, longest=150)


def equal_rows() -> RandomRows:
    return RandomRows(8, shortest=122, longest=127)


def short_rows_and_a_long_one() -> RandomRows:
    rows, longest = RandomRows(7, longest=30), RandomRows(1, shortest=295, longest=300, seed=1)
    return rows.followed_by(longest)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[], RandomRows]]] = {
    "single long rows": ({}, {}, long_rows),
    "mixed rows": ({}, {}, mixed_rows),
    "equal rows": ({}, {}, equal_rows),
    "short rows and a long one": ({}, {}, short_rows_and_a_long_one),
    "full": ({}, {"method": "full"}, mixed_rows),
    "full, long rows": ({}, {"method": "full"}, long_rows),
    "dora": ({}, {"method": "dora"}, mixed_rows),
    "adapters on the last blocks": ({}, {"lora_layers": 2}, mixed_rows),
    "checkpointing": ({}, {"gradient_checkpointing": True}, long_rows),
    "packing": ({}, {"packing": True}, mixed_rows),
    "label smoothing": ({}, {"label_smoothing": 0.1}, mixed_rows),
    "quantized": ({"bits": 4}, {}, mixed_rows),
    "untied head": ({"family": "llama"}, {}, mixed_rows),
    "untied head, full": ({"family": "llama"}, {"method": "full"}, mixed_rows),
    "many words and an untied head, full": (
        {"family": "llama", "hidden_size": 128, "vocab_size": 8192},
        {"method": "full"},
        long_rows,
    ),
    "many words": ({"vocab_size": 8192}, {}, mixed_rows),
    "another optimizer, full": ({"vocab_size": 4096}, {"method": "full", "optimizer": "lion"}, mixed_rows),
    "blocks of two kinds": ({"family": "gemma3_text"}, {}, mixed_rows),
    "blocks of two kinds out of turn": (
        {"family": "lfm2", "block_dim": 64, "block_ff_dim": 192, "full_attn_idxs": [1, 4, 5]},
        {},
        mixed_rows,
    ),
}


ON_TWO_LANES = (
    "single long rows",
    "mixed rows",
    "equal rows",
    "short rows and a long one",
    "full",
    "checkpointing",
    "packing",
    "untied head, full",
    "many words and an untied head, full",
    "many words",
)
"""Cases in which lanes meet differently."""


@pytest.mark.parametrize(("case", "lanes"), [*((case, 1) for case in CASES), *((case, 2) for case in ON_TWO_LANES)])
def test_memory_predicted_from_few_blocks_is_within_15_percent(
    config: Callable[..., Config], tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, case: str, lanes: int
) -> None:
    monkeypatch.setattr(trials, "PATIENCE_S", 0.0)
    monkeypatch.setattr(native, "lanes", lambda: lanes)
    shape, keys, rows = CASES[case]
    told, real = predicted_and_real(config(model=tiny(**{**SHAPE, **shape}), batch_size=8, **keys), rows(), 256)
    assert told == pytest.approx(real, rel=0.15)


def test_what_lanes_keep_adds_up_and_half_of_their_moments_meet() -> None:
    assert at_once([Fullest(100, 70)]) == 100
    assert at_once([Fullest(100, 70), Fullest(60, 50)]) == 70 + 50 + 30 + 5
    assert at_once([Fullest(100, 70)] * 3) == 210 + 30 + 30


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("rows", [long_rows, mixed_rows])
def test_memory_measured_with_the_largest_update_is_within_15_percent(
    config: Callable[..., Config],
    tiny: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    rows: Callable[[], RandomRows],
    lanes: int,
) -> None:
    monkeypatch.setattr(native, "lanes", lambda: lanes)
    told, real = predicted_and_real(config(model=tiny(**SHAPE), batch_size=8), rows(), 256)
    assert told == pytest.approx(real, rel=0.15)


def test_a_model_whose_blocks_cannot_be_left_out_is_tried_whole(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "PATIENCE_S", 0.0)
    loaded = load_model(config())
    # The architecture's own class, below the one that notes what its blocks are given.
    block = type(loaded.module.layers[0]).__bases__[0]
    whole = block.__call__
    monkeypatch.setattr(block, "__call__", lambda self, *words: (whole(self, *words), "state"))
    body = type(loaded.module.model)

    def in_turn(self: Any, tokens: Any, *_: Any) -> Any:
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden, _state = layer(hidden, "causal", None)
        return self.norm(hidden)

    monkeypatch.setattr(body, "__call__", in_turn)
    told, real = predicted_and_real(config(batch_size=8), mixed_rows(), 256)
    assert told == pytest.approx(real, rel=0.15)


def test_trials_leave_the_model_as_it_was(config: Callable[..., Config], tiny: Callable[..., Path]) -> None:
    step = UpdateStep(load_model(config(model=tiny(**SHAPE))), Optimizer(config()), config())
    batch = single(mixed_rows(), [0, 1])
    (before, _), _ = step.sums([batch], 1)
    mx.eval(before)
    trials.try_passes(step, [[batch], [batch]])
    trials.try_seconds(step, [batch, batch])
    (after, _), _ = step.sums([batch], 1)
    assert after.item() == before.item()


@pytest.mark.parametrize(
    ("method", "lanes", "budget"), [("lora", 1, 512), ("full", 1, 128), ("lora", 2, 128), ("full", 2, 512)]
)
def test_the_proposed_micro_batch_fits_and_twice_as_much_does_not(
    config: Callable[..., Config],
    tiny: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    lanes: int,
    budget: int,
) -> None:
    made = config(model=tiny(**SHAPE), batch_size=16, method=method)
    many = RandomRows(16, shortest=57, longest=62)
    monkeypatch.setattr(native, "lanes", lambda: lanes)

    def peak(tokens: int, reaching: float) -> int:
        keys = {"reaching": reaching} if lanes > 1 else {}
        return real_peak(msgspec.structs.replace(made, micro_batch_tokens=tokens), many, **keys)

    # A machine that 256 tokens fit; the trials are none the less taken for harmless, and never for too long.
    monkeypatch.setattr(trials, "PATIENCE_S", 1e9)
    room = round(1.4 * peak(256, 1))
    monkeypatch.setattr(memory, "available", lambda: round(room / module._USABLE_SHARE))
    monkeypatch.setattr(module, "_SAFE_SHARE", 100.0)
    proposed = predicted(msgspec.structs.replace(made, micro_batch_tokens=budget), many).largest_micro_batch_tokens
    assert proposed == 256
    assert peak(512, room) > room


@pytest.mark.parametrize(
    ("lanes", "megabytes", "budget", "some"),
    [(1, 104, 2048, True), (2, 130, 2048, False), (2, 215, 512, True)],
)
def test_a_micro_batch_is_proposed_for_what_its_own_plan_takes(
    config: Callable[..., Config],
    tiny: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    lanes: int,
    megabytes: int,
    budget: int,
    some: bool,
) -> None:
    # Of long rows apart attention keeps its probabilities, so smaller budgets take more: with up to 1,024 tokens 112
    # MB on one lane and 150 to 196 on two, with 2,048 98 and 157.
    made = config(model=tiny(**SHAPE), batch_size=16)
    rows, room = RandomRows(16, longest=900), megabytes * 10**6
    monkeypatch.setattr(native, "lanes", lambda: lanes)
    monkeypatch.setattr(trials, "PATIENCE_S", 1e9)
    with monkeypatch.context() as limited:
        limited.setattr(memory, "available", lambda: round(room / module._USABLE_SHARE))
        limited.setattr(module, "_SAFE_SHARE", 100.0)
        # Whole updates say nothing about other budgets.
        limited.setattr(module, "try_update", lambda *_: (0, 0.0))
        proposed = predicted(msgspec.structs.replace(made, micro_batch_tokens=budget), rows).largest_micro_batch_tokens
    assert (proposed is not None) == some
    if proposed is not None:
        run = msgspec.structs.replace(made, micro_batch_tokens=proposed)
        assert real_peak(run, rows) <= room


def test_the_largest_update_and_the_mean_one_are_found() -> None:
    rows = RandomRows(200, longest=300)
    order = Order(200, 8, 1)
    found = sizes(rows, order, 512, 10_000, Lanes(1000))
    planned = [plan(rows, order.rows(0, update), 512) for update in range(order.updates_per_epoch)]
    assert max(batch.tokens.size for batch in found.largest) == max(b.tokens.size for p in planned for b in p)
    padded = [sum(batch.tokens.size for batch in batches) for batches in planned]
    assert found.mean_tokens == pytest.approx(sum(padded) / len(padded))


def trial_sizes(monkeypatch: pytest.MonkeyPatch, config: Config, free: int) -> tuple[list[int], Any]:
    """Estimate with so many free bytes; gives the padded tokens of every trial."""
    monkeypatch.setattr(memory, "available", lambda: free)
    made: list[int] = []
    step = UpdateStep(load_model(config), Optimizer(config), config)
    real = step.sums

    def measured(batches: Any, number: int) -> Any:
        made.append(sum(batch.tokens.size for batch in batches))
        return real(batches, number)

    monkeypatch.setattr(step, "sums", measured)
    rows = RandomRows(32, shortest=500, longest=510)

    def planned(budget: int) -> Sizes:
        return sizes(rows, Order(32, 8, 1), budget, 4, step.lanes)

    config = msgspec.structs.replace(config, micro_batch_tokens=4096)
    return made, estimate(step.model, step, planned, config, steps=4, evaluated_tokens=0)


def test_no_trial_comes_near_the_memory_that_is_left(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 8 << 20
    made, result = trial_sizes(monkeypatch, config(), free)
    assert max(made) <= 512
    assert result.peak_bytes > result.available_bytes
    assert result.largest_micro_batch_tokens in (None, 512, 256, 128)


@pytest.mark.parametrize(("lanes", "useful"), [(1, 4096), (2, 2048)])
def test_the_proposed_micro_batch_is_no_larger_than_any_update_can_use(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, lanes: int, useful: int
) -> None:
    monkeypatch.setattr(native, "lanes", lambda: lanes)
    _, result = trial_sizes(monkeypatch, config(), 1 << 34)
    assert result.largest_micro_batch_tokens == useful
    assert VOCABULARY < 4096
