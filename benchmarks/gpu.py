"""Compares trainwire with `mlx_lm.lora` and TRL on one GPU, from a bare checkout and without network.

    python benchmarks/gpu.py --tokenizer FOLDER [--cases lora full] [--peers mlx_lm trl-packed] [--batch 8] [--out FILE]

A model of the shape of Qwen3 0.6B with random weights is made here; FOLDER holds a Qwen3 tokenizer.json and its
tokenizer_config.json. All train the same chat rows of log-normal lengths, every token of them, LoRA of rank 8 on all
layers or full, in bfloat16, each row once. Every trainer starts without compiled kernels, as on a machine where MLX
has never run. Figures are trained tokens per second: `whole` from the spawn of the process to its last update, `steady`
over the second half of its updates.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
    "bos_token_id": 151643,
}
_MAKE_MODEL = """
import json, sys
import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path
from trainwire_engine.loading import build_module
folder = sys.argv[1]
module = build_module(json.load(open(folder + "/config.json")))
mx.random.seed(0)
def draw(path, value):
    new = mx.ones(value.shape) if "norm" in path else 0.02 * mx.random.normal(value.shape)
    return new.astype(mx.bfloat16)
weights = {k: draw(k, v) for k, v in tree_flatten(module.parameters())}
mx.save_safetensors(folder + "/model.safetensors", weights, metadata={"format": "pt"})
"""


def environment(kernels: Path | None = None) -> dict[str, str]:
    """The sources of the checkout on the path, the CUDA libraries that PyTorch brought, an empty folder for kernels."""
    if kernels is not None:
        shutil.rmtree(kernels, ignore_errors=True)
        kernels.mkdir(parents=True)
    paths = [str(ROOT / part) for part in ("protocol", "worker", "clients/python")]
    paths += [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    libraries = [str(lib) for base in sys.path for lib in Path(base).glob("nvidia/*/lib")]
    libraries += [str(lib) for base in sys.path for lib in Path(base).glob("nvidia/*/lib64")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "LD_LIBRARY_PATH": os.pathsep.join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        **({"MLX_PTX_CACHE_DIR": str(kernels)} if kernels is not None else {}),
    }


def make_inputs(folder: Path, tokenizer: Path, rows: int) -> None:
    """Write the model, and a data folder whose rows all peers read."""
    model = folder / "model"
    if not (model / "model.safetensors").is_file():
        model.mkdir(parents=True, exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(tokenizer / name, model / name)
        (model / "config.json").write_text(json.dumps(QWEN3_0_6B))
        subprocess.run([sys.executable, "-c", _MAKE_MODEL, str(model)], check=True, env=environment())
    data = folder / "data"
    data.mkdir(exist_ok=True)
    draw = random.Random(7)
    words = ("the", "a", "model", "learns", "from", "rows", "of", "text", "and", "numbers", "while", "small", "steps")

    def text(tokens: int) -> str:
        return " ".join(draw.choice(words) for _ in range(tokens))

    for name, count in (("train", rows), ("valid", 8)):
        with (data / f"{name}.jsonl").open("w") as file:
            for _ in range(count):
                length = max(16, min(1900, int(draw.lognormvariate(5.4, 0.9))))
                messages = [
                    {"role": "user", "content": text(length // 4)},
                    {"role": "assistant", "content": text(length - length // 4)},
                ]
                file.write(json.dumps({"messages": messages}) + "\n")


def rates(points: list[tuple[float, int]], start: float) -> dict[str, float]:
    """Turn (time, trained tokens since the start) points into the two rates."""
    whole = points[-1][1] / (points[-1][0] - start)
    middle = points[len(points) // 2]
    steady = (points[-1][1] - middle[1]) / max(1e-9, points[-1][0] - middle[0])
    return {"whole": whole, "steady": steady, "tokens": points[-1][1], "seconds": points[-1][0] - start}


def run_trainwire(folder: Path, method: str, seconds: float, batch: int, extra: list[str]) -> dict[str, Any]:
    """Train with trainwire until the rows are used or the time is over."""
    config = folder / f"{method}.toml"
    values = {
        "model": str(folder / "model"), "data": str(folder / "data/train.jsonl"),
        "run_dir": str(folder / f"run-{method}"),
        "method": method, "train_on": "all", "batch_size": batch, "save_every": 0, "eval_every": 0, "num_epochs": 1,
        "learning_rate": 1e-5, "schedule": "constant", "warmup_steps": 0, "cache_dir": str(folder / "cache"),
        "max_seq_length": 2048,
    }  # fmt: skip
    config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    shutil.rmtree(folder / f"run-{method}", ignore_errors=True)
    start = time.time()
    command = [sys.executable, "-m", "trainwire_worker", "run", str(config), *extra]
    points: list[tuple[float, int]] = []
    losses: list[float] = []
    facts: dict[str, Any] = {}
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=sys.stderr,
        env=environment(folder / "kernels-trainwire"),
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    stopped = False
    for line in process.stdout:
        event = json.loads(line)
        if event["type"] == "step":
            points.append((event["ts"] / 1000, event["trained_tokens"]))
            losses.append(event["loss"])
            facts["peak_gb"] = event["peak_bytes"] / 1e9
            facts["padding"] = event["padding_fraction"]
        elif event["type"] == "init":
            facts["micro_batch_tokens"] = event["config"]["micro_batch_tokens"]
            facts["to_init"] = event["ts"] / 1000 - start
        elif event["type"] == "error":
            raise RuntimeError(event["message"])
        if not stopped and time.time() - start > seconds:
            stopped = True
            process.stdin.write('{"cmd":"stop","save":false}\n')
            process.stdin.flush()
    process.wait()
    facts["first_update"] = points[0][0] - start
    return {**rates(points, start), "updates": len(points), "first_loss": losses[0], "last_loss": losses[-1], **facts}


def run_mlx_lm(folder: Path, method: str, seconds: float, batch: int) -> dict[str, Any]:
    """Train with `mlx_lm.lora` until the rows are used or the time is over."""
    updates = sum(1 for _ in (folder / "data/train.jsonl").open()) // batch
    config = folder / "mlx_lm.yaml"
    config.write_text("lora_parameters: {rank: 8, scale: 2.0, dropout: 0.0}\n")
    command = [
        sys.executable, "-m", "mlx_lm", "lora", "--model", str(folder / "model"), "--data", str(folder / "data"),
        "--train", "--fine-tune-type", method, "--batch-size", str(batch),
        "--num-layers", "-1" if method == "full" else "28",
        "--iters", str(updates), "--steps-per-report", "5", "--steps-per-eval", "1000000", "--val-batches", "1",
        "--save-every", "1000000", "--learning-rate", "1e-5", "--adapter-path", str(folder / "mlx_lm"),
        "--max-seq-length", "2048", "-c", str(config),
    ]  # fmt: skip
    start = time.time()
    points: list[tuple[float, int]] = []
    losses: list[float] = []
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(folder / "kernels-mlx_lm"), text=True
    )
    assert process.stdout is not None
    tail: list[str] = []
    for line in process.stdout:
        plain = re.sub(r"\x1b\[[0-9;]*m", "", line)
        tail = [*tail[-20:], plain]
        # A row of its table: iteration, loss, tokens per second, trained tokens so far as in 10.7k.
        found = re.match(r"\s*\d+\s+([\d.]+)\s*[▼▲]?\s+[\d,]+\s+([\d.]+)([kM]?)\s*$", plain)
        if found:
            losses.append(float(found[1]))
            points.append((time.time(), round(float(found[2]) * {"": 1, "k": 1e3, "M": 1e6}[found[3]])))
        if time.time() - start > seconds:
            process.kill()
            break
    process.wait()
    if not points:
        raise RuntimeError("".join(tail))
    facts = {"updates": 5 * len(points), "first_loss": losses[0], "last_loss": losses[-1]}
    return {**rates(points, start), **facts, "first_report": points[0][0] - start}


_TRL = """
import json, sys, time
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer
folder, packing, seconds = sys.argv[1], sys.argv[2] == "packed", float(sys.argv[3])
start = time.time()
rows = [json.loads(line) for line in open(folder + "/data/train.jsonl")]
tokenizer = AutoTokenizer.from_pretrained(folder + "/model")
model = AutoModelForCausalLM.from_pretrained(folder + "/model", dtype=torch.bfloat16, attn_implementation="sdpa")
class Clock(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kw):
        if logs and "loss" in logs:
            print("POINT", time.time(), int(logs.get("num_tokens", 0)), logs["loss"], flush=True)
            control.should_training_stop = time.time() - start > seconds
trainer = SFTTrainer(
    model=model, processing_class=tokenizer, train_dataset=Dataset.from_list(rows),
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    args=SFTConfig(output_dir=folder + "/trl", per_device_train_batch_size=int(sys.argv[4]), learning_rate=1e-5,
                   bf16=True, max_length=2048, packing=packing, logging_steps=5, save_strategy="no", report_to=[],
                   num_train_epochs=1, lr_scheduler_type="constant", gradient_checkpointing=False),
    callbacks=[Clock()],
)
trainer.train()
print("PEAK", torch.cuda.max_memory_allocated() / 1e9, flush=True)
"""


def run_trl(folder: Path, seconds: float, packed: str, batch: int) -> dict[str, Any]:
    """Train with TRL's SFTTrainer, LoRA, padded or packed."""
    start = time.time()
    command = [sys.executable, "-c", _TRL, str(folder), packed, str(seconds), str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=seconds + 180)
    points, losses, peak = [], [], 0.0
    for line in done.stdout.splitlines():
        if line.startswith("POINT"):
            _, at, tokens, loss = line.split()
            points.append((float(at), int(tokens)))
            losses.append(float(loss))
        elif line.startswith("PEAK"):
            peak = float(line.split()[1])
    if not points:
        raise RuntimeError(done.stderr[-2000:])
    return {**rates(points, start), "first_loss": losses[0], "last_loss": losses[-1], "peak_gb": peak}


def main() -> None:
    """Run the cases and print a line for each, then ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/trainwire-gpu"))
    parser.add_argument("--cases", nargs="*", default=["lora", "full"], choices=["lora", "full"])
    peers = ["mlx_lm", "trl-padded", "trl-packed"]
    parser.add_argument("--peers", nargs="*", default=peers, choices=peers)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--batch", type=int, default=8, help="examples per update, for all peers")
    parser.add_argument("--set", nargs="*", default=[], help="more key=value words for trainwire")
    chosen = parser.parse_args()
    make_inputs(chosen.folder, chosen.tokenizer, chosen.rows)
    results: dict[str, Any] = {}

    def record(name: str, call: Any) -> None:
        try:
            results[name] = call()
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"[-1500:]}
        print(name, json.dumps(results[name]), flush=True)

    for method in chosen.cases:
        record(
            f"trainwire {method}",
            lambda m=method: run_trainwire(chosen.folder, m, chosen.seconds, chosen.batch, chosen.set),
        )
        if "mlx_lm" in chosen.peers:
            record(f"mlx_lm {method}", lambda m=method: run_mlx_lm(chosen.folder, m, chosen.seconds, chosen.batch))
    for packed in ("padded", "packed"):
        if f"trl-{packed}" in chosen.peers:
            record(f"trl {packed}", lambda p=packed: run_trl(chosen.folder, chosen.seconds, p, chosen.batch))
    for name, result in results.items():
        base = results.get("trainwire lora" if "full" not in name else "trainwire full")
        if base and "whole" in base and "whole" in result and not name.startswith("trainwire"):
            whole = f"{base['whole'] / result['whole']:.1f} times as fast over the whole run"
            enough = base["steady"] and result["steady"]
            steady = (
                f"{base['steady'] / result['steady']:.1f} times steadily" if enough else "too short for a steady rate"
            )
            print(f"{name}: trainwire is {whole}, {steady}")
    if chosen.out:
        chosen.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
