"""The README.md of an export: what was trained, on what, how it went, and how to load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainwire_protocol.rundir import read_log
from trainwire_protocol.version import VERSION

_POINTS = 12
_LEFT_OUT = ("run_dir", "run_name", "resume", "resume_override", "cache_dir", "model", "data", "valid_data")

_LOADING = {
    "mlx": """```sh
mlx_lm.generate --model THIS_FOLDER --prompt "Hello"
```""",
    "hf": """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER")
tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")
```""",
    "peft": """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("BASE_MODEL")
model = PeftModel.from_pretrained(base, "THIS_FOLDER")
```""",
}


def loss_curve(run_dir: Path, up_to_step: int) -> list[tuple[int, float | None, float | None]]:
    """Give a few (step, loss, validation loss) of the current timeline of a run's log, the last ones included.

    Evaluations by order may be of some rows only, and have no place in it.
    """
    losses: dict[int, float] = {}
    valid: dict[int, float] = {}
    for event in read_log(run_dir, ("attempt", "step", "eval_end")):
        if event["type"] == "attempt":
            start = event.get("resumed_from_step") or 0
            losses, valid = ({s: loss for s, loss in known.items() if s <= start} for known in (losses, valid))
        elif event["step"] > up_to_step:
            continue
        elif event["type"] == "step" and event["loss"] is not None:
            losses[event["step"]] = event["loss"]
        elif event["type"] == "eval_end" and event["valid_loss"] is not None and event.get("cause") is None:
            valid[event["step"]] = event["valid_loss"]
    return [(step, losses.get(step), valid.get(step)) for step in sorted({*_some(losses), *_some(valid)})]


def _some(points: dict[int, float]) -> list[int]:
    steps = sorted(points)
    if len(steps) <= _POINTS:
        return steps
    return [steps[round(i * (len(steps) - 1) / (_POINTS - 1))] for i in range(_POINTS)]


def model_card(checkpoint: Path, state: dict[str, Any], adapter: dict[str, Any] | None, form: str) -> str:
    """Write the card of an export of `checkpoint`, whose `trainer_state.json` is `state`."""
    config: dict[str, Any] = state.get("config") or {}
    step = int(state["state"]["step"])
    lines = [
        f"# {config.get('run_name') or checkpoint.parent.name}",
        "",
        f"Fine-tuned with trainwire {VERSION}: {config.get('method', 'full')}, {step} updates.",
        "",
        f"- Base model: `{config.get('model', '')}`"
        + (f" at `{config['revision']}`" if config.get("revision") else ""),
        f"- Data: `{config.get('data', '')}`",
        *([f"- Validation data: `{config['valid_data']}`"] if config.get("valid_data") else []),
        f"- Exported from: `{checkpoint.name}` as `{form}`",
    ]
    if adapter is not None:
        parameters = adapter["lora_parameters"]
        lines.append(f"- Adapters: rank {parameters['rank']}, scale {parameters['scale']:g}")
    curve = loss_curve(checkpoint.parent, step)
    if curve:
        lines += ["", "## Loss", "", "| step | loss | validation loss |", "|---|---|---|"]
        lines += [f"| {at} | {_figure(loss)} | {_figure(valid)} |" for at, loss, valid in curve]
    lines += ["", "## How to load it", "", _LOADING[form].replace("BASE_MODEL", str(config.get("model", "BASE_MODEL")))]
    lines += ["", "## Config", "", "| key | value |", "|---|---|"]
    lines += [f"| `{key}` | `{value}` |" for key, value in config.items() if key not in _LEFT_OUT and value is not None]
    return "\n".join(lines) + "\n"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
