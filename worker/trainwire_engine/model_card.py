"""The README.md of an export: what was trained, on what, how it went, and how to load it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from trainwire_protocol.rundir import read_log
from trainwire_protocol.version import VERSION

_POINTS = 12
_LONGEST_VALUE = 300
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
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained("BASE_MODEL")
model = PeftModel.from_pretrained(base, "THIS_FOLDER")
tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")
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


def model_card(
    checkpoint: Path, state: dict[str, Any], adapter: dict[str, Any] | None, form: str, note: str | None = None
) -> str:
    """Write the card of an export of `checkpoint`, whose `trainer_state.json` is `state`.

    `note` is a sentence about what this form of it cannot do.
    """
    config: dict[str, Any] = state.get("config") or {}
    reached, step = state["state"], int(state["state"]["step"])
    validated = []
    if config.get("valid_data"):
        validated = [f"- Validation data: {_places(config['valid_data'])}{_rows(state.get('valid'))}"]
    lines = [
        f"# {config.get('run_name') or checkpoint.parent.name}",
        "",
        f"Fine-tuned with trainwire {VERSION}: {config.get('method', 'full')}, {step} updates of"
        f" {config.get('batch_size')} examples, {int(reached['trained_tokens']):,} trained tokens.",
        "",
        f"- Base model: `{config.get('model', '')}`"
        + (f" at `{config['revision']}`" if config.get("revision") else ""),
        f"- Data: {_places(config.get('data'))}{_rows(state.get('train'))}",
        *validated,
        f"- Exported from: `{checkpoint.name}` as `{form}`",
    ]
    if adapter is not None:
        parameters = adapter["lora_parameters"]
        lines.append(f"- Adapters: rank {parameters['rank']}, scale {parameters['scale']:g}")
    if note:
        lines += ["", note]
    curve = loss_curve(checkpoint.parent, step)
    if curve:
        lines += ["", "## Loss", "", "| step | loss | validation loss |", "|---|---|---|"]
        lines += [f"| {at} | {_figure(loss)} | {_figure(valid)} |" for at, loss, valid in curve]
    base = "THE_MODEL_IT_WAS_PACKED_FROM" if note and form == "peft" else str(config.get("model", "BASE_MODEL"))
    lines += ["", "## How to load it", "", _LOADING[form].replace("BASE_MODEL", base)]
    lines += ["", "## Config", "", "| key | value |", "|---|---|"]
    shown = {key: value for key, value in config.items() if key not in _LEFT_OUT and value is not None}
    lines += [f"| `{key}` | {_cell(value)} |" for key, value in shown.items()]
    return "\n".join(lines) + "\n"


def _places(data: Any) -> str:
    return ", ".join(f"`{place}`" for place in (data if isinstance(data, list) else [data]))


def _rows(mark: dict[str, Any] | None) -> str:
    return f" ({mark['examples']:,} rows)" if mark else ""


def _cell(value: Any) -> str:
    """Show a value in a table, which a bar, a line's end or a backtick of its own would break."""
    text = " ".join(str(value).split())
    text = text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}".replace("|", "\\|")


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
