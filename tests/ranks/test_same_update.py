"""The same run, whatever the number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from ranks_driver import Start

UPDATES = 15
"""The last row of an epoch is an update of its own: 13 updates of three rows, one of one, then the next epoch."""


def weights(folder: Path) -> dict[str, Any]:
    name = "adapters.safetensors" if (folder / "adapters.safetensors").exists() else "model.safetensors"
    loaded: Any = mx.load(str(folder / name))
    return dict(loaded)


def assert_close(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        difference = float(mx.abs(found[name] - value).max())
        assert difference < 1e-5, f"{name} differs by {difference}"


WAYS: dict[str, dict[str, Any]] = {
    "lora": {"learning_rate": 0.5, "lora_dropout": 0.2, "label_smoothing": 0.1, "group_by_length": True},
    "full": {"learning_rate": 0.05, "packing": True},
}


@pytest.mark.parametrize("method", list(WAYS))
def test_loss_gradient_norm_evaluation_and_weights_are_those_of_one_process(
    start: Start, base: Path, tmp_path: Path, method: str
) -> None:
    keys = {
        **WAYS[method],
        "method": method,
        # AdamW divides by the gradient's own size: what rounds differently in an entry that is almost zero moves its
        # weight by a tenth of the learning rate, with ranks as with another split into micro-batches.
        "optimizer": "sgd",
        "max_steps": UPDATES,
        "valid_data": str(base / "valid.jsonl"),
        "eval_every": 5,
        "save_every": 6,
    }
    alone = start("alone", 1, **keys)
    assert alone.finish()["outcome"] == "completed", alone.printed()
    for ranks in (2, 4):
        run = start(f"ranks{ranks}", ranks, **keys)
        assert run.finish()["outcome"] == "completed", run.printed()
        assert len(run.steps()) == UPDATES
        for step, (loss, norm) in alone.steps().items():
            assert run.steps()[step] == pytest.approx((loss, norm), rel=1e-5), f"step {step} on {ranks} ranks"
        exact = ("step", "total_tokens", "trained_tokens", "epoch", "learning_rate")
        for one, several in zip(alone.of("step"), run.of("step"), strict=True):
            assert {key: one[key] for key in exact} == {key: several[key] for key in exact}
        evaluated = [(line["step"], line["tokens"], line["best"]) for line in alone.of("eval_end")]
        assert evaluated == [(line["step"], line["tokens"], line["best"]) for line in run.of("eval_end")]
        losses = [line["valid_loss"] for line in alone.of("eval_end")]
        assert [line["valid_loss"] for line in run.of("eval_end")] == pytest.approx(losses, rel=1e-5)
        assert [line["kind"] for line in run.of("checkpoint")] == [line["kind"] for line in alone.of("checkpoint")]
        assert_close(weights(tmp_path / f"ranks{ranks}" / "final"), weights(tmp_path / "alone" / "final"))


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_with_the_same_micro_batches_two_ranks_give_the_weights_of_one_process_to_the_last_bit(
    start: Start, tmp_path: Path, optimizer: str
) -> None:
    # Each row is a micro-batch of its own, and a sum of two does not depend on its order.
    keys = {"batch_size": 2, "micro_batch_tokens": 16, "lora_dropout": 0.2, "optimizer": optimizer, "max_steps": 15}
    runs = [start(f"ranks{ranks}", ranks, **keys) for ranks in (1, 2)]
    for run in runs:
        assert run.finish()["outcome"] == "completed", run.printed()
    assert runs[1].steps() == runs[0].steps()
    one, two = (weights(tmp_path / f"ranks{ranks}" / "final") for ranks in (1, 2))
    assert all(mx.array_equal(two[name], value) for name, value in one.items())


def test_a_run_goes_on_with_another_number_of_ranks(start: Start) -> None:
    whole = start("whole", 1, max_steps=12, learning_rate=1e-3, schedule="constant")
    assert whole.finish()["outcome"] == "completed", whole.printed()
    changes = []
    for ranks, steps in ((1, range(1, 4)), (2, range(4, 7)), (4, range(7, 10)), (1, range(10, 13))):
        run = start("parts", ranks, max_steps=steps[-1], learning_rate=1e-3, schedule="constant")
        assert run.finish()["outcome"] == "completed", run.printed()
        assert list(run.steps()) == list(steps)
        for step, figures in run.steps().items():
            assert figures == pytest.approx(whole.steps()[step], rel=1e-5), f"step {step} on {ranks} ranks"
        changes += [line["details"] for line in run.of("log") if line.get("code") == "environment_changed"]
    assert [change["ranks"] for change in changes] == [{"from": 1, "to": 2}, {"from": 2, "to": 4}, {"from": 4, "to": 1}]
