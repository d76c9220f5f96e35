"""Compares the data path with mlx-lm's own on the same rows: tokenizing with masks, and a start with a warm cache.

python benchmarks/data.py [--rows 100000] [--tokenizer FOLDER] [--rounds 2]
python benchmarks/data.py --scale 1000 10000 100000 1000000 [--output scale.json]

Both sides run in turn (A B A B), each run in a process of its own; medians and their ratio are printed. mlx-lm masks
the prompt before the last turn, so trainwire trains the last turn here; a sample of rows is compared token by token.
`--tokenizer` is a model folder with tokenizer.json and chat template; without it one is made. `--scale` measures time
and peak memory of all processes together for each number of rows, without the peer. Linux only.
"""

import argparse
import json
import os
import random
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics
from typing import Any

SAMPLE = 200

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def conversations(count: int) -> Iterator[dict[str, Any]]:
    """Give chats of about 1 KB, of sentences from Python's own documentation with numbers that never repeat."""
    texts = topics.topics.values()
    sentences = [s.strip() for text in texts for s in re.split(r"(?<=[.!?])\s+", text) if 20 < len(s) < 400]
    chance = random.Random(0)
    for _ in range(count):
        messages = [{"role": "system", "content": "You are a helpful assistant."}] if chance.random() < 0.5 else []
        for _ in range(chance.choice([1, 1, 1, 2, 3])):
            question = " ".join(chance.choices(sentences, k=chance.choice([1, 1, 2])))
            answer = " ".join(chance.choices(sentences, k=chance.choice([1, 2, 3, 5])))
            messages.append({"role": "user", "content": f"({chance.randrange(10**6)}) {question}"})
            messages.append({"role": "assistant", "content": f"{answer} {chance.random():.6f}"})
        yield {"messages": messages}


def write_rows(path: Path, count: int) -> None:
    """Write that many chats."""
    with path.open("w", encoding="utf-8") as file:
        for row in conversations(count):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def make_tokenizer(folder: Path, size: int = 8000) -> Path:
    """Train a tokenizer of so many words in the manner of the current models."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    pattern = words + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])
    backend.decoder = decoders.ByteLevel()
    marks = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[AddedToken(mark, special=True) for mark in marks], show_progress=False
    )
    backend.train_from_iterator(topics.topics.values(), trainer)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def run_ours(rows: Path, tokenizer: Path, cache: Path) -> dict[str, Any]:
    """Load the rows as a run does, from the interpreter's start to the first batch's tokens."""
    from trainwire_engine.data import load_dataset
    from trainwire_engine.tokenizer import Tokenizer
    from trainwire_protocol.config import Config

    begun = time.perf_counter()
    config = Config(model="m", data=str(rows), cache_dir=str(cache), train_on="last", max_seq_length=2**20)
    dataset = load_dataset(config, Tokenizer.from_folder(tokenizer), "train", lambda *_: None, 2**31)
    assert dataset is not None
    sample = [[dataset.tokens(i).tolist(), int(dataset.trained[i])] for i in range(min(SAMPLE, len(dataset)))]
    return {"rows": len(dataset), "seconds": time.perf_counter() - begun, "sample": sample}


def run_peer(rows: Path, tokenizer: Path, count: int) -> dict[str, Any]:
    """Process rows with mlx-lm's own classes; a start of its trainer needs those of the first batch only."""
    from mlx_lm.tuner.datasets import CacheDataset, ChatDataset
    from transformers import AutoTokenizer

    begun = time.perf_counter()
    auto = AutoTokenizer.from_pretrained(str(tokenizer))
    with rows.open() as file:
        data = [json.loads(line) for line in file]
    dataset = CacheDataset(ChatDataset(data, auto, mask_prompt=True))
    done = [dataset[i] for i in range(min(count, len(dataset)))]
    sample = [[list(tokens), len(tokens) - offset] for tokens, offset in done[:SAMPLE]]
    return {"rows": len(done), "seconds": time.perf_counter() - begun, "sample": sample}


def one(arguments: list[str]) -> dict[str, Any]:
    """Run one side in a new process; its CPU seconds include those of its own children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    clock = time.perf_counter()
    command = [sys.executable, __file__, *arguments]
    output = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**json.loads(output), "wall": time.perf_counter() - clock, "cpu": cpu}


def same_training(ours: list[Any], theirs: list[Any]) -> str:
    """Compare the samples: equal tokens; as many trained ones, but for a line's end behind the last end mark."""
    tokens = sum(a == b for (a, _), (b, _) in zip(ours, theirs, strict=True))
    masks = sum(0 <= b - a <= 1 for (_, a), (_, b) in zip(ours, theirs, strict=True))
    return f"{tokens} of {len(ours)} rows have equal tokens, {masks} the same trained turn"


def peak_of_all(process: subprocess.Popen[bytes]) -> float:
    """The largest memory of a process and its children together while it lives, in MiB; each page counts once."""
    peak = 0.0
    while process.poll() is None:
        peak = max(peak, sum(map(_memory, [process.pid, *_children(process.pid)])))
        time.sleep(0.1)
    return peak


def _memory(pid: int) -> float:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return int(rollup.split("\nPss:")[1].split()[0]) / 1024


def _children(pid: int) -> list[int]:
    try:
        return [int(p) for task in Path(f"/proc/{pid}/task").glob("*/children") for p in task.read_text().split()]
    except OSError:
        return []


def compare(folder: Path, tokenizer: Path, rows: int, rounds: int) -> dict[str, Any]:
    """Run both sides in turn, cold and warm."""
    data = folder / "rows.jsonl"
    write_rows(data, rows)
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "peer": [], "warm": [], "peer_start": []}
    for turn in range(rounds):
        cache = str(folder / f"cache{turn}")
        common = ["--data", str(data), "--tokenizer", str(tokenizer)]
        runs["ours"].append(one(["--side", "ours", "--cache", cache, *common]))
        runs["peer"].append(one(["--side", "peer", "--count", str(rows), *common]))
        runs["warm"].append(one(["--side", "ours", "--cache", cache, *common]))
        runs["peer_start"].append(one(["--side", "peer", "--count", "8", *common]))

    def median(name: str, key: str) -> float:
        return statistics.median(run[key] for run in runs[name])

    return {
        "rows": rows,
        "same": same_training(runs["ours"][0]["sample"], runs["peer"][0]["sample"]),
        "rows_per_core_second": {name: round(rows / median(name, "cpu")) for name in ("ours", "peer")},
        "ratio_rows_per_core_second": round(median("peer", "cpu") / median("ours", "cpu"), 1),
        "ratio_rows_per_second": round(median("peer", "wall") / median("ours", "wall"), 1),
        "seconds_to_first_rows": {
            "ours_warm": round(median("warm", "wall"), 2),
            "peer": round(median("peer_start", "wall"), 2),
        },
        "ratio_warm_start": round(median("peer_start", "wall") / median("warm", "wall"), 1),
    }


def scale(folder: Path, tokenizer: Path, rows: int) -> dict[str, Any]:
    """Tokenize many rows and start again: seconds, cores used, and the peak memory of all processes together."""
    data, load = folder / f"{rows}.jsonl", os.getloadavg()[0]
    write_rows(data, rows)
    cache = folder / f"cache-{rows}"
    arguments = ["--side", "ours", "--cache", str(cache), "--data", str(data), "--tokenizer", str(tokenizer)]
    before, clock = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with (folder / "said").open("w+b") as said:
        with subprocess.Popen([sys.executable, __file__, *arguments], stdout=said) as process:
            peak = peak_of_all(process)
        said.seek(0)
        used = json.load(said)["rows"]
    seconds = time.perf_counter() - clock
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    warm = one(arguments)
    found = {
        "rows": rows,
        "rows_used": used,
        "mib_of_rows": round(data.stat().st_size / 2**20, 1),
        "seconds_to_first_rows": round(seconds, 2),
        "rows_per_second": round(rows / seconds),
        "cores_used": round((after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / seconds, 2),
        "peak_mib_of_all_processes": round(peak),
        "seconds_of_a_warm_start": round(warm["wall"], 2),
        "cpu_seconds_of_a_warm_start": round(warm["cpu"], 2),
        "load": round(load, 1),
    }
    data.unlink()
    shutil.rmtree(cache)
    return found


def main() -> None:
    """Print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--scale", type=int, nargs="+", metavar="ROWS", help="numbers of rows, without the peer")
    parser.add_argument("--output", type=Path, help="a file for what is printed")
    parser.add_argument("--tokenizer", type=Path)
    for hidden in ("--side", "--data", "--cache", "--count"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side == "ours":
        print(json.dumps(run_ours(Path(given.data), given.tokenizer, Path(given.cache))))
        return
    if given.side == "peer":
        print(json.dumps(run_peer(Path(given.data), given.tokenizer, int(given.count))))
        return
    with tempfile.TemporaryDirectory(prefix="trainwire-bench-") as name:
        folder = Path(name)
        tokenizer = given.tokenizer or make_tokenizer(folder / "tokenizer")
        found = (
            [scale(folder, tokenizer, rows) for rows in given.scale]
            if given.scale
            else compare(folder, tokenizer, given.rows, given.rounds)
        )
    text = json.dumps(found, indent=2)
    print(text)
    if given.output:
        given.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
