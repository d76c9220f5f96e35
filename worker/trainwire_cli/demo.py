"""`trainwire demo`: make a small model on the spot, train it, and show what it says before and after."""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import FrameType
from typing import Any

from trainwire_protocol.folders import user_cache
from trainwire_protocol.rundir import LOG_NAME

from .engine_process import run_engine_module

HEADER = "# Written by `trainwire demo`, each time anew: copy it before you change it.\n"

DEMO_CONFIG = """\
model = {model}
data = {data}
valid_data = {valid_data}
run_dir = {run_dir}
method = "full"
learning_rate = 4e-3
batch_size = 8
num_epochs = 8
eval_every = 122
eval_at_start = true
prompts = [
  "Which event reports the loss?",
  "What do I type to pause?",
  "What does exit code 0 mean?",
]
generate_every = 244
generate_max_tokens = 32
"""
"""The config of the small model: eight passes over the bundled rows, 15 s on a fast BLAS and a minute without."""

SMOLLM2_CONFIG = """\
model = {model}
data = {data}
valid_data = {valid_data}
run_dir = {run_dir}
method = "lora"
learning_rate = 1e-3
batch_size = 8
max_steps = 20
eval_every = 0
eval_at_start = true
prompts = [
  "What is the capital of France?",
  "Which event reports the loss?",
]
generate_every = 20
generate_max_tokens = 40
"""
"""The config of SmolLM2-135M: a few updates of an adapter, to look at."""


@dataclass(frozen=True)
class Choice:
    """A model that the demo can train: the engine module that makes its folder, and the config of its run."""

    title: str
    module: str
    config: str
    tiny: bool
    """Its matrices are too small to be shared out: several BLAS threads would mostly wait for each other."""


MODELS = {
    "small": Choice("a small Llama with random weights and a tokenizer of its own", "demo_model", DEMO_CONFIG, True),
    "smollm2": Choice("SmolLM2-135M-Instruct, which answers in English already", "smollm2", SMOLLM2_CONFIG, False),
}


def run(words: list[str]) -> int:
    """Run the demo; the exit status is the worker's, or that of what failed before it."""
    parser = argparse.ArgumentParser(prog="trainwire demo", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", choices=tuple(MODELS), default="small", help="what is trained (default: small)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the run folder (default: runs/demo)")
    parser.add_argument("--steps", type=_count, metavar="N", help="how many updates to make")
    arguments = parser.parse_args(words)
    choice = MODELS[arguments.model]
    default = "demo" if arguments.model == "small" else f"demo-{arguments.model}"
    run_dir = Path(os.path.abspath(arguments.out or Path("runs", default)))
    config = run_dir.with_name(f"{run_dir.name}.toml")
    if config.exists() and not _is_ours(config):
        _say(f"trainwire: {config} is not the demo's. Choose another folder: trainwire demo --out DIR")
        return 3
    model = user_cache() / "models" / arguments.model
    _say(f"Model   {choice.title}, in {model}")
    status = run_engine_module(choice.module, [str(model)])
    if status:
        return status
    replaced = _is_ours(config) and (run_dir / LOG_NAME).is_file()
    try:
        rows = _write_config(config, choice.config, model, run_dir, arguments.steps)
    except OSError as error:
        _say(f"trainwire: {config} cannot be written: {error.strerror}.")
        return 7
    _say(f"Data    {rows} questions and answers about trainwire, which come with it")
    _say(f"Config  {_short(config)}")
    _say(f"Run     {_short(run_dir)}{', in place of the demo before' if replaced else ''}")
    if sys.stdin.isatty():
        _say("\nWhile it trains, type PAUSE, RESUME or STOP and press Enter.")
    _say("")
    overwrite = ["--overwrite"] if replaced else []
    environment = {"PYTHONSAFEPATH": "1", **({"OMP_NUM_THREADS": "1"} if choice.tiny else {})}
    status = _run_worker(["run", str(config), "--resume", "never", *overwrite], environment)
    if status in (0, 20, 21):
        _tell(run_dir, config, model)
    return status


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _is_ours(config: Path) -> bool:
    try:
        return config.read_text(encoding="utf-8").startswith(HEADER)
    except (OSError, UnicodeDecodeError):
        return False


def _write_config(config: Path, template: str, model: Path, run_dir: Path, steps: int | None) -> int:
    """Write the run's config file; returns the number of training rows."""
    data = Path(str(files("trainwire_cli"))) / "demo_data"
    text = template.format(
        model=_toml(model),
        data=_toml(data / "train.jsonl"),
        valid_data=_toml(data / "valid.jsonl"),
        run_dir=_toml(run_dir.name),
    )
    if steps is not None:
        kept = [line for line in text.splitlines(keepends=True) if not line.startswith(("num_epochs", "max_steps"))]
        text = "".join(kept) + f"max_steps = {steps}\n"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(HEADER + text, encoding="utf-8")
    return (data / "train.jsonl").read_bytes().count(b"\n")


def _toml(value: Path | str) -> str:
    return json.dumps(str(value), ensure_ascii=False)


def _run_worker(arguments: list[str], environment: dict[str, str]) -> int:
    """Run the worker on this terminal. Where stdout is one, its JSON lines are left out: the log has them."""
    children: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        for child in children:
            child.send_signal(number)

    # A terminal sends Ctrl-C to the worker too, which takes two within a second for one.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    children.append(
        subprocess.Popen(
            [sys.executable, "-m", "trainwire_worker", *arguments],
            stdout=subprocess.DEVNULL if sys.stdout.isatty() else None,
            env={**os.environ, **environment},
        )
    )
    status = children[0].wait()
    return status if status >= 0 else 128 - status


def _tell(run_dir: Path, config: Path, model: Path) -> None:
    """Say from the log what the run brought, and what to do next."""
    events = _read_log(run_dir / LOG_NAME)
    of_type: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        of_type.setdefault(event["type"], []).append(event)
    if not of_type.get("complete"):
        end = of_type.get("end", [{}])[-1]
        if end.get("resumable"):
            _say(f"\nStopped at step {end['step']}. To go on from there: trainwire run {_short(config)}")
        return
    generations = of_type.get("generation", [])
    last = generations[-1]["step"] if generations else 0
    _say("\nWhat it answers, before and after:")
    for before in (event for event in generations if event["step"] == 0):
        after = next(e for e in generations if e["step"] == last and e["index"] == before["index"])
        _say(f"\n  {before['prompt']}")
        _say(f"    before  {_one_line(before['completion'])}")
        _say(f"    after   {_one_line(after['completion'])}")
    losses = [event["loss"] for event in of_type.get("step", []) if event.get("loss") is not None]
    if losses:
        _say(f"\nLoss {losses[0]:.2f} at the first step, {losses[-1]:.2f} at the last.")
    checks = [event["valid_loss"] for event in of_type.get("eval_end", []) if event.get("valid_loss") is not None]
    if len(checks) > 1:
        _say(f"On questions in words that it was not trained on: {checks[0]:.2f}, then {checks[-1]:.2f}.")
    final = Path(of_type["end"][-1]["checkpoint"])
    adapter = (final / "adapters.safetensors").is_file()
    weights = ["--model", str(model), "--adapter-path", _short(final)] if adapter else ["--model", _short(final)]
    ask = [*_mlx_lm("generate"), *weights, "--prompt", "What does stop do?"]
    own = (
        "trainwire" if shutil.which("trainwire") else shlex.join([_short(Path(sys.executable)), "-m", "trainwire_cli"])
    )
    what = "adapter" if adapter else "model"
    _say(f"\nThe {what} is in {_short(final)}, the log in {_short(run_dir / LOG_NAME)}.")
    _say("Next:")
    _say(f"  {shlex.join(ask)}")
    _say(f"  {own} demo | jq --unbuffered -c 'select(.type==\"step\") | {{step, loss}}'")
    _say(f"  {own} config > mine.toml     # then set model and data: {own} run mine.toml")


def _read_log(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
        return [json.loads(line) for line in lines]
    except (OSError, ValueError):
        return []


def _one_line(text: str) -> str:
    """Show a generation in one line of printable characters, not too long."""
    line = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))
    return line if len(line) <= 100 else f"{line[:97]}..."


def _short(path: Path) -> str:
    """Name a path as a person would from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _mlx_lm(command: str) -> list[str]:
    """Give the words that run one of mlx-lm's commands in this environment."""
    name = f"mlx_lm.{command}"
    return [name] if shutil.which(name) else [_short(Path(sys.executable)), "-m", "mlx_lm", command]
