"""The token cache: made once, by one process at a time, whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.kit import CHATML, MARKS, byte_level, chat, config_for, load, shown, tokenizer_with, write_rows

from trainwire_engine.data import Dataset, Notice, build, load_dataset
from trainwire_engine.data.cache import file_digest, open_or_build
from trainwire_engine.tokenizer import Tokenizer
from trainwire_protocol.errors import DatasetInvalid, DiskFull

ROWS = [chat(f"user: question {i}?", f"assistant: answer {i}.") for i in range(50)]


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The titles of the builds that really happen."""
    seen: list[str] = []
    real = build.build

    def counted(*args: Any, **keys: Any) -> None:
        seen.append(args[4])
        real(*args, **keys)

    monkeypatch.setattr("trainwire_engine.data.load.build", counted)
    return seen


def stores(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "cache" / "tokens").iterdir() if p.is_dir() and p.name != "files")


def test_a_second_start_does_not_tokenize(tmp_path: Path, builds: list[str]) -> None:
    first = load(tmp_path, ROWS, tokenizer_with(CHATML))
    second = load(tmp_path, tmp_path / "train.jsonl", tokenizer_with(CHATML))
    assert builds == ["Tokenizing the training data"]
    assert first.digest == second.digest
    assert first.report == second.report
    assert isinstance(second._store.tokens, np.memmap)
    assert shown(first, tokenizer_with(CHATML), 7) == shown(second, tokenizer_with(CHATML), 7)


@pytest.mark.parametrize(
    "change",
    [
        {"train_on": "last"},
        {"max_seq_length": 100},
        {"on_overlong": "truncate"},
        {"max_train_samples": 7},
    ],
)
def test_other_options_tokenize_again(tmp_path: Path, builds: list[str], change: dict[str, Any]) -> None:
    load(tmp_path, ROWS, tokenizer_with(CHATML))
    load(tmp_path, ROWS, tokenizer_with(CHATML), **change)
    assert len(builds) == 2


@pytest.mark.parametrize(
    "other",
    [
        lambda: tokenizer_with(CHATML + " "),
        lambda: tokenizer_with(CHATML, some_argument=1),
        lambda: tokenizer_with(CHATML, eos="<|end|>"),
        lambda: Tokenizer(byte_level(MARKS[:-1]), {"eos_token": "<|im_end|>"}, {"default": CHATML}),
    ],
)
def test_another_tokenizer_or_template_tokenizes_again(
    tmp_path: Path, builds: list[str], other: Callable[[], Tokenizer]
) -> None:
    load(tmp_path, ROWS, tokenizer_with(CHATML))
    load(tmp_path, ROWS, other())
    assert len(builds) == 2


def test_the_same_content_under_another_name_is_found_and_places_have_the_new_name(
    tmp_path: Path, builds: list[str]
) -> None:
    rows = [chat("user: a"), *ROWS]
    load(tmp_path, rows, tokenizer_with(CHATML))
    other = write_rows(tmp_path / "other.jsonl", rows)
    dataset = load(tmp_path, other, tokenizer_with(CHATML))
    assert len(builds) == 1
    assert dataset.location(0) == f"{other}:2"
    assert dataset.report.rows_dropped["no_assistant_turn"].lines == [f"{other}:1"]


def test_a_changed_file_tokenizes_again_also_with_the_same_size_and_time(tmp_path: Path, builds: list[str]) -> None:
    path = write_rows(tmp_path / "train.jsonl", ROWS)
    load(tmp_path, path, tokenizer_with(CHATML))
    stat = path.stat()
    path.write_text(path.read_text().replace("answer", "reply!"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size
    load(tmp_path, path, tokenizer_with(CHATML))
    assert len(builds) == 2


def test_a_file_that_did_not_change_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "train.jsonl", ROWS)
    monkeypatch.setattr("trainwire_engine.data.cache._SETTLED_NS", -(10**12))
    first = file_digest(path, tmp_path)
    monkeypatch.setattr("trainwire_engine.data.cache.hashlib.file_digest", None)
    assert file_digest(path, tmp_path) == first


@pytest.mark.parametrize("name", ["tokens.bin", "rows.bin", "meta.json"])
def test_a_damaged_store_is_made_again(tmp_path: Path, builds: list[str], name: str) -> None:
    first = load(tmp_path, ROWS, tokenizer_with(CHATML)).digest
    file = tmp_path / "cache" / "tokens" / stores(tmp_path)[0] / name
    file.write_bytes(file.read_bytes()[:-3])
    assert load(tmp_path, ROWS, tokenizer_with(CHATML)).digest == first
    assert len(builds) == 2


def test_a_refused_row_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(DatasetInvalid):
        load(tmp_path, [*ROWS, {"messages": 1}], tokenizer_with(CHATML))
    assert stores(tmp_path) == []


def test_of_two_builders_one_builds_and_the_other_waits(tmp_path: Path, builds: list[str]) -> None:
    path = write_rows(tmp_path / "train.jsonl", ROWS)
    config = config_for(path, tmp_path)
    waited = threading.Event()
    begun = threading.Event()
    results: list[Dataset | None] = []

    def hold(title: str, *_: Any) -> None:
        begun.set()
        assert waited.wait(60)

    def wait(title: str, *_: Any) -> None:
        if "another process" in title:
            waited.set()

    def start(report: Any) -> threading.Thread:
        def run() -> None:
            results.append(load_dataset(config, tokenizer_with(CHATML), "train", report, 1000))

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    first = start(hold)
    assert begun.wait(60)
    second = start(wait)
    first.join(60)
    second.join(60)
    assert len(builds) == 1
    assert [len(dataset or ()) for dataset in results] == [50, 50]
    assert len(stores(tmp_path)) == 1


BUILDER = """
import sys
from data.kit import CHATML, config_for, tokenizer_with
from pathlib import Path
from trainwire_engine.data import load_dataset
folder = Path(sys.argv[1])
def report(title, done, total, unit):
    print(done, flush=True)
    if sys.argv[2] == "hang" and done:
        sys.stdin.read()
dataset = load_dataset(config_for(folder / "train.jsonl", folder), tokenizer_with(CHATML), "train", report, 1000)
print(dataset.digest)
"""


def builder(folder: Path, mode: str, before: str = "", **pipes: Any) -> subprocess.Popen[bytes]:
    """A process that loads the rows of a folder; `before` is what it does first."""
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", before + BUILDER, str(folder), mode]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, **pipes)


def test_a_builder_that_is_killed_leaves_no_trace_that_matters(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", ROWS * 50)
    with builder(tmp_path, "hang") as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == b"0\n"
        assert killed.stdout.readline() != b""
        killed.send_signal(signal.SIGKILL)
    assert [".building-" in name for name in stores(tmp_path)] == [True]
    dataset = load(tmp_path, tmp_path / "train.jsonl", tokenizer_with(CHATML))
    assert len(dataset) == 2500
    assert [".building-" in name for name in stores(tmp_path)] == [False]


def test_processes_that_start_together_agree(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", ROWS * 20)
    running = [builder(tmp_path, "run") for _ in range(3)]
    outputs = [process.communicate(b"", timeout=240)[0].split()[-1] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(set(outputs)) == 1
    assert len(stores(tmp_path)) == 1


def test_a_cache_that_cannot_be_written_costs_a_notice_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the way")
    notices: list[Notice] = []
    dataset = load(tmp_path, ROWS, tokenizer_with(CHATML), notices)
    assert shown(dataset, tokenizer_with(CHATML), 49).endswith("⟦answer 49.<|im_end|>⟧\n")
    assert [notice.code for notice in notices] == ["no_cache"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("trainwire_engine.data.load.build", full)
    with pytest.raises(DiskFull, match=f"cache/tokens: {os.strerror(number)}") as caught:
        load(tmp_path, ROWS, tokenizer_with(CHATML))
    assert "cache_dir" in str(caught.value.hint)
    assert stores(tmp_path) == []


def test_a_disk_that_takes_no_more_leaves_nothing_behind(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", ROWS * 50)
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    with builder(tmp_path, "run", limit, stderr=subprocess.PIPE) as process:
        said = process.communicate(b"", timeout=120)[1].decode()
    assert "DiskFull: Tokenized data does not fit into" in said
    assert os.strerror(errno.EFBIG) in said
    assert stores(tmp_path) == []


def test_data_that_nobody_used_for_long_makes_room(tmp_path: Path) -> None:
    load(tmp_path, ROWS, tokenizer_with(CHATML))
    load(tmp_path, ROWS, tokenizer_with(CHATML), train_on="last")
    old = tmp_path / "cache" / "tokens" / stores(tmp_path)[0]
    os.utime(old, (0, 0))
    load(tmp_path, ROWS, tokenizer_with(CHATML), train_on="all")
    assert old.name not in stores(tmp_path)
    assert len(stores(tmp_path)) == 2


def test_a_builder_that_fails_gives_the_lock_back(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise RuntimeError("no")

    for _ in range(2):
        with pytest.raises(RuntimeError):
            open_or_build(tmp_path, "key", [], fail, lambda: pytest.fail("it is locked"))


def test_a_cache_that_cannot_be_written_serves_what_it_has(tmp_path: Path, builds: list[str], monkeypatch: Any) -> None:
    load(tmp_path, ROWS, tokenizer_with(CHATML))

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for place in ("os.utime", "pathlib.Path.mkdir", "pathlib.Path.write_text"):
        monkeypatch.setattr(place, refused)
    notices: list[Notice] = []
    assert len(load(tmp_path, tmp_path / "train.jsonl", tokenizer_with(CHATML), notices)) == 50
    assert (len(builds), notices) == (1, [])


def test_what_killed_builders_of_other_data_left_is_removed_but_no_work_of_the_living(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "tokens"
    for name in ("dead.building-1", "alone.building-1", "alive.building-1"):
        (folder / name).mkdir(parents=True)
    (folder / "dead.lock").touch()
    with (folder / "alive.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        load(tmp_path, ROWS, tokenizer_with(CHATML))
    assert [name for name in stores(tmp_path) if ".building-" in name] == ["alive.building-1"]


def test_the_digest_does_not_depend_on_how_the_rows_were_stored(tmp_path: Path, monkeypatch: Any) -> None:
    lines = load(tmp_path, ROWS, tokenizer_with(CHATML))
    monkeypatch.setattr("trainwire_engine.data.build._CHUNK_ROWS", 7)
    (tmp_path / "array.json").write_text(json.dumps(ROWS, indent=1))
    assert load(tmp_path, tmp_path / "array.json", tokenizer_with(CHATML)).digest == lines.digest
