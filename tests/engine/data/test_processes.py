"""Several processes give what one gives, and none of them stays behind."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from data.kit import CHATML, byte_level, chat, write_rows

from trainwire_engine.data import process
from trainwire_engine.data.build import build
from trainwire_engine.data.files import RowFile
from trainwire_engine.data.options import Options
from trainwire_engine.data.store import Store, StoreWriter
from trainwire_engine.tokenizer import Tokenizer
from trainwire_protocol.errors import DatasetInvalid, Internal

OPTIONS = Options(None, 64, "drop", 0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML}))
    return Tokenizer.from_folder(folder)


def rows() -> Iterator[dict[str, Any]]:
    for i in range(5000):
        yield chat(f"user: question {i}?") if i % 100 == 7 else chat(f"user: question {i}?", f"assistant: {i * i} é.")


def built(folder: Path, data: Path, tokenizer: Tokenizer, processes: int, options: Options = OPTIONS) -> Store:
    folder.mkdir()
    writer = StoreWriter(folder, [str(data)])
    try:
        build(writer, [RowFile(data)], tokenizer, options, "t", lambda *_: None, processes)
    except BaseException:
        writer.abandon()
        raise
    writer.close()
    return Store(folder, [str(data)])


def children() -> set[int]:
    pids = set()
    for task in Path("/proc/self/task").glob("*/children"):
        pids |= {int(pid) for pid in task.read_text().split()}
    return pids


def test_the_result_is_that_of_one_process(tmp_path: Path, tokenizer: Tokenizer) -> None:
    data = write_rows(tmp_path / "train.jsonl", rows())
    alone = built(tmp_path / "one", data, tokenizer, 1)
    together = built(tmp_path / "two", data, tokenizer, 2)
    assert alone.digest == together.digest
    assert alone.report == together.report
    assert alone.report.rows_dropped["no_assistant_turn"].count == 50
    assert (alone.rows == together.rows).all()
    assert alone.train_on == together.train_on == ["assistant"]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="children are counted in /proc")
def test_the_first_bad_row_is_named_and_no_process_stays(tmp_path: Path, tokenizer: Tokenizer) -> None:
    given = list(rows())
    given[3210] = given[4444] = {"messages": [{"role": "user", "content": 5}]}
    data = write_rows(tmp_path / "train.jsonl", given)
    before = children()
    with pytest.raises(DatasetInvalid) as caught:
        built(tmp_path / "two", data, tokenizer, 2)
    assert caught.value.message.startswith(f"{data}:3211: messages[0].content: ")
    assert caught.value.details["line"] == 3211
    assert children() == before


def test_a_limit_ends_the_work_early(tmp_path: Path, tokenizer: Tokenizer) -> None:
    data = write_rows(tmp_path / "train.jsonl", rows())
    options = Options(None, 64, "drop", 1500)
    alone = built(tmp_path / "one", data, tokenizer, 1, options)
    together = built(tmp_path / "two", data, tokenizer, 2, options)
    assert alone.report == together.report
    assert alone.report.rows_used == 1500


def test_a_process_that_dies_is_a_failure_and_no_shorter_data(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_rows(tmp_path / "train.jsonl", rows())
    real = process._write

    def deadly(pipe: Any, value: Any) -> None:
        if isinstance(value, list) and value[2][0][0] > 2000:
            for pid in children():
                os.kill(pid, signal.SIGKILL)
        real(pipe, value)

    monkeypatch.setattr(process, "_write", deadly)
    with pytest.raises(Internal, match="ended with status -9"):
        built(tmp_path / "two", data, tokenizer, 2)


NOISY = """
import os, sys
if "trainwire_engine.data" in sys.orig_argv:
    from trainwire_engine.data.encode import Encoder
    encode = Encoder.__call__
    def noisy(self, *how):
        print("from python", flush=True)
        os.write(1, b"from a library in C\\n")
        assert os.read(0, 1) == b""
        return encode(self, *how)
    Encoder.__call__ = noisy
"""


def test_what_a_library_prints_or_reads_does_not_get_between_the_frames(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "patch").mkdir()
    (tmp_path / "patch/sitecustomize.py").write_text(NOISY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "patch"), os.environ.get("PYTHONPATH", "")]))
    data = write_rows(tmp_path / "train.jsonl", rows())
    assert built(tmp_path / "two", data, tokenizer, 2).report.rows_used == 4950
    printed = capfd.readouterr()
    assert (printed.out, printed.err.count("from python\nfrom a library in C\n")) == ("", 5)


def test_small_data_starts_no_process(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_rows(tmp_path / "train.jsonl", rows())
    monkeypatch.setattr(process, "_Helper", None)
    assert built(tmp_path / "none", data, tokenizer, None).report.rows_used == 4950


def test_large_data_starts_processes(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_rows(tmp_path / "train.jsonl", rows())
    monkeypatch.setattr("trainwire_engine.data.build._WORTH_PROCESSES", 10_000)
    monkeypatch.setattr("trainwire_engine.data.build._cores", lambda: 2)
    used = []
    real = process._Helper.encode
    monkeypatch.setattr(process._Helper, "encode", lambda self, chunk: used.append(1) or real(self, chunk))
    assert built(tmp_path / "several", data, tokenizer, None).report.rows_used == 4950
    assert len(used) == 5
