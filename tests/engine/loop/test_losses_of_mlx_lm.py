"""The losses that a whole run reports, against mlx-lm: its loading, its tokenizer, its loss function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from scripted import play, write_rows

from trainwire_protocol import events as ev
from trainwire_protocol.rundir import checkpoint_name

UPDATES, ROWS = 10, 4


def encoded(tokenizer: Any, row: dict[str, Any], train_on: str) -> tuple[list[int], int, int]:
    """Token ids of a conversation of one turn each, and the first and last place that is trained."""
    tokens = tokenizer.apply_chat_template(row["messages"], return_dict=False)
    if train_on == "all":
        return tokens, 1, len(tokens) - 1
    prompt = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(tokens[-1:]) == "\n", "the template's line end behind the end mark, which is not trained"
    return tokens, len(prompt), len(tokens) - 2


@pytest.mark.parametrize(("method", "train_on"), [("lora", "assistant"), ("dora", "last"), ("full", "all")])
def test_the_losses_of_the_first_ten_steps_are_mlx_lms(
    config: dict[str, Any], base: Path, tmp_path: Path, method: str, train_on: str
) -> None:
    from mlx_lm import load
    from mlx_lm.tuner.trainer import default_loss

    data = write_rows(tmp_path / "rows.jsonl", UPDATES * ROWS)
    keys = {"data": str(data), "batch_size": ROWS, "shuffle": False, "method": method, "train_on": train_on}
    if method == "full":
        del config["lora_rank"]
    result = play({**config, **keys, "micro_batch_tokens": 128, "save_every": 1, "max_checkpoints": 0}, base)
    assert result.status == 0
    steps = result.of(ev.Step)
    assert [step.step for step in steps] == list(range(1, UPDATES + 1))
    assert max(step.micro_batches for step in steps) > 1

    rows = [json.loads(line) for line in data.read_text().splitlines()]
    for step in steps:
        before = Path(config["run_dir"], checkpoint_name(step.step - 1))
        whole = before if step.step > 1 and method == "full" else base / "model"
        adapter = str(before) if step.step > 1 and method != "full" else None
        model, tokenizer = load(str(whole), adapter_path=adapter)[:2]
        model.train()
        examples = [encoded(tokenizer, row, train_on) for row in rows[(step.step - 1) * ROWS : step.step * ROWS]]
        longest = max(len(tokens) for tokens, _, _ in examples)
        batch = mx.array(np.stack([np.pad(tokens, (0, longest - len(tokens))) for tokens, _, _ in examples]))
        loss, trained = default_loss(model, batch, mx.array([[first, last] for _, first, last in examples]))
        assert step.total_tokens == trained.item()
        assert step.loss == pytest.approx(loss.item(), abs=1e-4)
    assert steps[-1].loss is not None
    assert steps[-1].loss < 0.99 * steps[0].loss
