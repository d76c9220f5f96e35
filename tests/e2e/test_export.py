"""What was trained computes the same in the tools that an export is for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from tiny import tiny_model
from whole import ENVIRONMENT, trainwire, write_config

from trainwire_engine.loading import load_module
from trainwire_engine.model import Model
from trainwire_engine.model_card import loss_curve, model_card

IDS = [[5, 9, 33, 7, 201, 44, 12, 90]]
FAMILIES = ("qwen3", "llama", "gemma3_text")


def trained(base: Path, folder: Path, model: Path, **values: object) -> Path:
    """Train far enough that the adapters matter; the final checkpoint."""
    config = {"learning_rate": 5e-2, "max_steps": 4, "lora_rank": 4, "lora_alpha": 12.0, **values}
    if values.get("method") == "full":
        del config["lora_rank"], config["lora_alpha"]
    path = write_config(folder / "c.toml", model=str(model), data=str(base / "chat.jsonl"), **config)
    session = trainwire("run", path)
    assert session.exit_code == 0, session.stderr
    return Path(session.one("end")["checkpoint"])


def export(checkpoint: Path, form: str, out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `trainwire export`."""
    command = [sys.executable, "-m", "trainwire_cli", "export", str(checkpoint), "--to", form, "-o", str(out), *words]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=240)


def our_logits(checkpoint: Path, model: Path) -> np.ndarray:
    """Logits of a checkpoint by mlx-lm's own loading."""
    from mlx_lm.tuner.utils import load_adapters

    module, _ = load_module(checkpoint if (checkpoint / "config.json").exists() else model)
    if (checkpoint / "adapters.safetensors").exists():
        load_adapters(module, str(checkpoint))
    module.eval()
    return np.array(module(mx.array(IDS)).astype(mx.float32))


def assert_same_logits(theirs: np.ndarray, ours: np.ndarray) -> None:
    """Equal within float32 rounding through a few layers."""
    np.testing.assert_allclose(theirs, ours, atol=3e-4 * np.abs(ours).max(), rtol=1e-3)


@pytest.mark.parametrize("method", ["lora", "dora", "full"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_transformers_computes_the_same_logits(base: Path, tmp_path: Path, family: str, method: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make reference")
    transformers = pytest.importorskip("transformers")
    model = tiny_model(tmp_path / "model", family)
    checkpoint = trained(base, tmp_path, model, method=method)
    done = export(checkpoint, "hf", tmp_path / "hf")
    assert done.returncode == 0, done.stderr
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    with torch.no_grad():
        logits = theirs(torch.tensor(IDS)).logits.numpy()
    ours = our_logits(checkpoint, model)
    assert np.abs(ours - our_logits(model, model)).max() > 1e-2
    assert_same_logits(logits, ours)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf").decode(IDS[0])


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_peft_computes_the_same_logits(base: Path, tmp_path: Path, family: str, method: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make reference")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    model = tiny_model(tmp_path / "model", family)
    checkpoint = trained(base, tmp_path, model, method=method)
    done = export(checkpoint, "peft", tmp_path / "peft")
    assert done.returncode == 0, done.stderr
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "peft").eval()
    with torch.no_grad():
        logits = theirs(torch.tensor(IDS)).logits.numpy()
    assert_same_logits(logits, our_logits(checkpoint, model))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_moe", "lfm2"])
def test_a_fused_mlx_model_computes_the_same_logits(base: Path, tmp_path: Path, family: str) -> None:
    model = tiny_model(tmp_path / "model", family)
    checkpoint = trained(base, tmp_path, model)
    done = export(checkpoint, "mlx", tmp_path / "mlx")
    assert done.returncode == 0, done.stderr
    assert_same_logits(our_logits(tmp_path / "mlx", model), our_logits(checkpoint, model))


def test_fusing_into_a_packed_base_says_what_was_lost_and_dequantizing_loses_nothing(
    base: Path, tmp_path: Path
) -> None:
    model = tiny_model(tmp_path / "model", "qwen3", bits=4, hidden_size=64, intermediate_size=128)
    checkpoint = trained(base, tmp_path, model, learning_rate=1e-2)
    packed = export(checkpoint, "mlx", tmp_path / "packed")
    assert packed.returncode == 0, packed.stderr
    mean, worst = (float(x) / 100 for x in re.findall(r"([\d.]+)%", packed.stderr)[:2])
    assert 0 < mean <= worst
    assert packed.stderr.strip() in (tmp_path / "packed/README.md").read_text()
    plain = export(checkpoint, "mlx", tmp_path / "plain", "--dequantize")
    assert plain.returncode == 0, plain.stderr
    assert "%" not in plain.stderr
    assert "quantization" not in json.loads((tmp_path / "plain/config.json").read_text())
    target = our_logits(checkpoint, model)
    loss = np.abs(our_logits(tmp_path / "plain", model) - target).max()
    assert loss < 1e-3
    assert np.abs(our_logits(tmp_path / "packed", model) - target).max() > loss


def test_an_adapter_of_a_packed_base_says_what_transformers_needs(base: Path, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", "qwen3", bits=4, hidden_size=64, intermediate_size=128)
    checkpoint = trained(base, tmp_path, model)
    done = export(checkpoint, "peft", tmp_path / "peft")
    assert done.returncode == 0, done.stderr
    assert "transformers does not load" in done.stderr
    card = (tmp_path / "peft/README.md").read_text()
    assert done.stderr.strip() in card
    assert 'from_pretrained("THE_MODEL_IT_WAS_PACKED_FROM")' in card


@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_tokens_that_end_an_answer_go_along(base: Path, tmp_path: Path, method: str) -> None:
    model = tiny_model(tmp_path / "model", "qwen3")
    (model / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    checkpoint = trained(base, tmp_path, model, method=method)
    for form in ("mlx", "hf"):
        assert export(checkpoint, form, tmp_path / form).returncode == 0
        assert json.loads((tmp_path / form / "generation_config.json").read_text()) == {"eos_token_id": [7, 9]}


def test_no_value_breaks_a_cards_table(tmp_path: Path) -> None:
    config = {"method": "lora", "batch_size": 3, "data": ["a.jsonl", "b.jsonl"], "chat_template": "{{ a | b }}\n`c`"}
    config["prompts"] = ["x" * 1000]  # type: ignore[assignment]
    state = {"state": {"step": 5, "trained_tokens": 1234}, "config": config, "train": {"examples": 2000}}
    card = model_card(tmp_path / "final", state, None, "hf")
    assert "5 updates of 3 examples, 1,234 trained tokens" in card
    assert "- Data: `a.jsonl`, `b.jsonl` (2,000 rows)" in card
    rows = card[card.index("## Config") :].splitlines()[4:]
    assert [len(re.findall(r"(?<!\\)\|", row)) for row in rows] == [3] * 4
    assert "| `chat_template` | `` {{ a \\| b }} `c` `` |" in rows
    assert all(len(row) < 400 for row in rows)


def test_an_architecture_without_a_proof_is_refused_with_the_reason(base: Path, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", "lfm2")
    checkpoint = trained(base, tmp_path, model)
    for form in ("hf", "peft"):
        done = export(checkpoint, form, tmp_path / form)
        assert done.returncode == 3
        assert "lfm2" in done.stderr
        assert "--to mlx" in done.stderr
        assert not (tmp_path / form).exists()


def test_a_card_says_what_it_is_and_nothing_is_overwritten(base: Path, tmp_path: Path) -> None:
    checkpoint = trained(base, tmp_path, base / "model")
    assert export(checkpoint, "mlx", tmp_path / "out").returncode == 0
    card = (tmp_path / "out/README.md").read_text()
    for part in (
        str(base / "model"),
        "chat.jsonl",
        "4 updates",
        "| 4 |",
        "mlx_lm.generate",
        "`learning_rate` | `0.05`",
    ):
        assert part in card, part
    again = export(checkpoint, "mlx", tmp_path / "out")
    assert again.returncode == 3
    assert "exists already" in again.stderr
    missing = export(tmp_path / "nowhere", "mlx", tmp_path / "none")
    assert missing.returncode == 3
    assert "manifest.json" in missing.stderr
    (checkpoint / "adapters.safetensors").write_bytes(b"")
    broken = export(checkpoint, "mlx", tmp_path / "none")
    assert "adapters.safetensors has 0 bytes" in broken.stderr


def test_a_cards_curve_is_that_of_the_weights_with_the_evaluations_of_the_run(tmp_path: Path) -> None:
    events: list[dict[str, object]] = [
        {"type": "attempt", "attempt": 1},
        {"type": "step", "step": 1, "loss": 3.0},
        {"type": "step", "step": 2, "loss": 9.0},
        {"type": "eval_end", "step": 2, "valid_loss": 9.5},
        {"type": "attempt", "attempt": 2, "resumed_from_step": 1},
        {"type": "step", "step": 2, "loss": 2.0},
        {"type": "eval_end", "step": 2, "valid_loss": 2.5},
        {"type": "eval_end", "step": 2, "valid_loss": 1.0, "cause": 7},
        {"type": "step", "step": 3, "loss": None},
        {"type": "eval_end", "step": 3, "valid_loss": 2.25},
        {"type": "step", "step": 4, "loss": 1.0},
    ]
    lines = [
        json.dumps({**event, "seq": number, "ts": 0}, separators=(",", ":")) for number, event in enumerate(events, 1)
    ]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert loss_curve(tmp_path, 3) == [(1, 3.0, None), (2, 2.0, 2.5), (3, None, 2.25)]


def test_the_engine_of_trainwire_computes_what_mlx_lm_loads(base: Path, tmp_path: Path) -> None:
    checkpoint = trained(base, tmp_path, base / "model", method="dora")
    from trainwire_protocol.config import Config

    config = Config(
        model=str(base / "model"), data="", method="dora", lora_rank=4, lora_alpha=12.0, start_from=str(checkpoint)
    )
    module, model_config = load_module(base / "model")
    ours = Model(module, model_config, base / "model", config)
    ours.set_trainable(mx.load(str(checkpoint / "adapters.safetensors")))
    logits = np.array(ours.module(mx.array(IDS)))
    assert_same_logits(logits, our_logits(checkpoint, base / "model"))
