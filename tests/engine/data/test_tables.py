"""Parquet files and data sets of the Hub."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from data.kit import CHATML, chat, config_for, load, tokenizer_with, trained
from data.test_masks import TOOLS

from trainwire_engine.data import Notice, load_dataset
from trainwire_protocol.errors import DatasetInvalid

ROWS = [chat(f"user: question {i}?", f"assistant: answer {i}.") for i in range(2500)]


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows to a Parquet file."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    writer = pytest.importorskip("pyarrow.parquet")
    writer.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=700)
    return path


def test_a_parquet_file_gives_the_rows_of_its_json(tmp_path: Path) -> None:
    rows = [{"id": i, "image": b"\xff\x00", **row} for i, row in enumerate(ROWS)]
    # A column of structures has every key in every row, most of them null.
    rows[0]["messages"][1]["reasoning_content"] = None
    file = parquet(tmp_path / "train.parquet", rows)
    tokenizer = tokenizer_with(CHATML)
    seen: list[tuple[Any, ...]] = []
    dataset = load_dataset(config_for(file, tmp_path), tokenizer, "train", lambda *a: seen.append(a), 10**9)
    assert dataset is not None
    assert dataset.digest == load(tmp_path, ROWS, tokenizer).digest
    assert dataset.location(2499) == f"{file}:2500"
    assert seen[0][1:] == (0, 2500, "rows")
    assert seen[-1][1:] == (2500, 2500, "rows")


def test_a_folder_of_parquet_shards_is_read_in_order(tmp_path: Path) -> None:
    parquet(tmp_path / "train-00000-of-00002.parquet", ROWS[:2])
    parquet(tmp_path / "train-00001-of-00002.parquet", ROWS[2:4])
    dataset = load(tmp_path, tmp_path, tokenizer_with(CHATML))
    assert [dataset.location(i).rpartition("/")[2] for i in (1, 2)] == [
        "train-00000-of-00002.parquet:2",
        "train-00001-of-00002.parquet:1",
    ]


def test_tool_calls_of_a_parquet_file_are_read_from_text(tmp_path: Path) -> None:
    row = {"tools": '[{"name": "f"}]', "messages": [*ROWS[0]["messages"]]}
    assert len(load(tmp_path, parquet(tmp_path / "train.parquet", [row, row]), tokenizer_with(CHATML))) == 2


def test_null_entries_that_a_column_adds_to_objects_are_left_out(tmp_path: Path) -> None:
    def row(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        question = {"role": "user", "content": "q", "tool_calls": None}
        return {"messages": [question, {"role": "assistant", "content": None, "tool_calls": [call]}]}

    file = parquet(tmp_path / "train.parquet", [row("f", {"a": 1}), row("g", {"b": "x"})])
    tokenizer = tokenizer_with(TOOLS)
    dataset = load(tmp_path, file, tokenizer)
    assert [trained(dataset, tokenizer, i)[0] for i in (0, 1)] == [
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><|im_end|>',
        '<tool_call>{"name": "g", "arguments": {"b": "x"}}</tool_call><|im_end|>',
    ]


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    file = parquet(tmp_path / "train.parquet", ROWS)
    data = bytearray(file.read_bytes())
    data[4:400] = b"\xff" * 396
    file.write_bytes(data)
    with pytest.raises(DatasetInvalid, match=r"train\.parquet is damaged"):
        load(tmp_path, file, tokenizer_with(CHATML))


def test_a_parquet_file_that_does_not_fit_is_named_by_row_and_field(tmp_path: Path) -> None:
    file = parquet(tmp_path / "train.parquet", [{"question": "a", "answer": b"\xff"}])
    with pytest.raises(DatasetInvalid, match=r"train\.parquet:1: row: "):
        load(tmp_path, file, tokenizer_with(CHATML))
    file = parquet(tmp_path / "more.parquet", [{"text": "a"}, {"text": None}])
    with pytest.raises(DatasetInvalid, match=r"more\.parquet:2: text: it is null, not text"):
        load(tmp_path, file, tokenizer_with(CHATML))


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    (tmp_path / "train.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DatasetInvalid, match="is no Parquet file"):
        load(tmp_path, tmp_path / "train.parquet", tokenizer_with(CHATML))


def test_a_missing_library_is_named_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    for module in ("pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DatasetInvalid, match="needs pyarrow") as caught:
        load(tmp_path, tmp_path / "train.parquet", tokenizer_with(CHATML))
    assert "trainwire[parquet]" in str(caught.value.hint)
    config = config_for("somebody/some-data", tmp_path)
    with pytest.raises(DatasetInvalid, match="the library datasets is needed") as caught:
        load_dataset(config, tokenizer_with(CHATML), "train", lambda *_: None, 10**9)
    assert "trainwire[datasets]" in str(caught.value.hint)


class _Batch:
    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def to_pylist(self) -> list[dict[str, Any]]:
        return self._rows


class _Rows:
    """What this project uses of a split of the library `datasets`."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows
        self._fingerprint = str(hash(str(rows)))
        self.column_names = list(rows[0]) if rows else []

    def __len__(self) -> int:
        return len(self._rows)

    def select_columns(self, names: list[str]) -> _Rows:
        return _Rows([{name: row[name] for name in names} for row in self._rows])

    def with_format(self, form: str) -> _Rows:
        assert form == "arrow"
        return self

    def iter(self, batch_size: int) -> Iterator[_Batch]:
        for start in range(0, len(self._rows), batch_size):
            yield _Batch(self._rows[start : start + batch_size])


def fake_hub(monkeypatch: pytest.MonkeyPatch, **splits: list[dict[str, Any]]) -> list[str]:
    """Put a stand-in in the place of the library; returns the names that are asked for."""
    asked: list[str] = []

    def load_dataset(name: str) -> dict[str, _Rows]:
        asked.append(name)
        if not splits:
            raise FileNotFoundError("no such data set")
        return {split: _Rows(rows) for split, rows in splits.items()}

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


def test_a_data_set_of_the_hub_gives_training_and_validation_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"other": i, **row} for i, row in enumerate(ROWS)]
    asked = fake_hub(monkeypatch, train=rows, validation=rows[:3], test=rows)
    config = config_for("somebody/some-data", tmp_path)
    tokenizer = tokenizer_with(CHATML)
    train = load_dataset(config, tokenizer, "train", lambda *_: None, 10**9)
    valid = load_dataset(config, tokenizer, "valid", lambda *_: None, 10**9)
    assert asked == ["somebody/some-data"] * 2
    assert train is not None
    assert valid is not None
    assert (len(train), len(valid)) == (2500, 3)
    assert train.location(2499) == "somebody/some-data[train]:2500"
    assert train.digest == load(tmp_path, ROWS, tokenizer).digest


def test_a_data_set_of_the_hub_without_validation_data_turns_evaluation_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_hub(monkeypatch, train=ROWS[:2])
    notices: list[Notice] = []
    config = config_for("somebody/some-data", tmp_path)
    assert load_dataset(config, tokenizer_with(CHATML), "valid", lambda *_: None, 10**9, notices) is None
    assert [notice.code for notice in notices] == ["no_validation"]


def test_a_data_set_that_the_hub_does_not_have_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch)
    config = config_for("somebody/some-data", tmp_path)
    with pytest.raises(DatasetInvalid, match="somebody/some-data cannot be read from the Hub: FileNotFoundError"):
        load_dataset(config, tokenizer_with(CHATML), "train", lambda *_: None, 10**9)
