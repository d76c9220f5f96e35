"""Odd and hostile files: each has a documented behaviour, and a refusal says where, why and what to do."""

from __future__ import annotations

import gzip
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from data.kit import CHATML, WORDS, chat, config_for, load, shown, tokenizer_with, trained, write_rows

from trainwire_engine.data import Notice, load_dataset
from trainwire_engine.data.words import WordEncoder
from trainwire_protocol.errors import DatasetInvalid

ROW = chat("user: a", "assistant: b")
LINE = json.dumps(ROW).encode()


def read(folder: Path, data: bytes, name: str = "train.jsonl", **keys: Any) -> Any:
    (folder / name).write_bytes(data)
    return load(folder, folder / name, tokenizer_with(CHATML), **keys)


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbf" + LINE + b"\n" + LINE + b"\n",
        LINE + b"\r\n" + LINE + b"\r\n",
        b"\n\n" + LINE + b"\n  \t\n" + LINE + b"\n\n",
        LINE + b"\n" + LINE,
        b"\n" + LINE + b"\n" + json.dumps(ROW, indent=None, separators=(" , ", " : ")).encode(),
    ],
    ids=["bom", "crlf", "blank lines", "no last newline", "spaces"],
)
def test_lines_are_read(tmp_path: Path, data: bytes) -> None:
    dataset = read(tmp_path, data)
    assert (len(dataset), dataset.report.rows_read) == (2, 2)
    line = data.count(b"\n", 0, data.rindex(b'{"messages"')) + 1
    assert dataset.location(1) == f"{tmp_path / 'train.jsonl'}:{line}"


@pytest.mark.parametrize(
    ("data", "line", "reason"),
    [
        (LINE + b",\n" + LINE, 1, "a comma follows the row"),
        (LINE + b"\n" + json.dumps(ROW, indent=2).encode(), 2, "does not end on its line"),
        (json.dumps([ROW], indent=2).encode(), 1, "does not end on its line"),
        (LINE + b"\n" + LINE[:-9] + b"\n" + LINE, 2, "does not end on its line"),
        (LINE + b"\n" + LINE.replace(b":", b"=") + b"\n" + LINE, 2, "not JSON"),
        (LINE + LINE, 1, "more than one value"),
        (b"[" + LINE + b"]", 1, "a list, not an object"),
        (b"3\n", 1, "a number, not an object"),
        (LINE + b"\n" + b"\0" * 4096 + b"\n", 2, "NUL bytes"),
        (LINE + b"\n" + LINE.replace(b'"a"', b'"\xff"'), 2, "not UTF-8"),
        (LINE.replace(b'"a"', b'"\\ud83d"'), 1, "surrogate"),
        (LINE.replace(b'"a"', b'"a\\u0000" NaN'), 1, "not JSON"),
        (b'{"messages": [], "x": NaN}', 1, "NaN and Infinity are not JSON"),
        ('{"text": "é", "x": -Infinity}'.encode(), 1, "NaN and Infinity are not JSON"),
        ("\ufeff".encode("utf-16"), 1, "UTF-16"),
        (LINE.replace(b'"content": "b"', b'"content": "b", "content": "c"'), 1, "twice"),
        (LINE.replace(b"{", b'{"messages":[],', 1), 1, "twice"),
        (LINE.replace(b"{", b'{"messages" :[],', 1), 1, "twice"),
        (LINE.replace(b"{", b'{"x": ' + b"[" * 900 + b"]" * 900 + b", ", 1), 1, "nested too deeply"),
        (LINE.replace(b"{", b'{"tools": [18446744073709551616], ', 1), 1, "does not fit into 64 bits"),
        (b"messages\n", 1, "not JSON"),
    ],
)
def test_lines_that_are_no_rows_are_refused(tmp_path: Path, data: bytes, line: int, reason: str) -> None:
    with pytest.raises(DatasetInvalid) as caught:
        read(tmp_path, data)
    assert caught.value.message.startswith(f"{tmp_path / 'train.jsonl'}:{line}: ")
    assert reason in caught.value.message
    assert caught.value.details["line"] == line


def test_keys_inside_contents_are_not_taken_for_repeated_ones(tmp_path: Path) -> None:
    row = chat('user: {"a":1,"a":2}', 'assistant: "a": "b":')
    assert len(load(tmp_path, [row], tokenizer_with(CHATML))) == 1


def test_nul_and_rare_characters_are_text(tmp_path: Path) -> None:
    row = chat("user: \0\u2028\u2029", "assistant: \x00é\U0001f642\ufdd0\ufffe")
    tokenizer = tokenizer_with(CHATML)
    assert trained(load(tmp_path, [row], tokenizer), tokenizer) == ["\x00é\U0001f642\ufdd0\ufffe<|im_end|>"]


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_is_read_with_the_lines_of_its_rows(tmp_path: Path, indent: int | None) -> None:
    rows = [chat(f"user: é{i}", "assistant: " + "b" * (i + 1)) for i in range(300)]
    text = json.dumps(rows, indent=indent, ensure_ascii=False)
    dataset = read(tmp_path, b"\xef\xbb\xbf" + text.encode(), "train.json")
    lines = [int(dataset.location(i).rpartition(":")[2]) for i in range(300)]
    assert lines == ([1] * 300 if indent is None else [i + 1 for i, s in enumerate(text.split("\n")) if s == "  {"])
    same = load(tmp_path, rows, tokenizer_with(CHATML))
    assert same.digest == dataset.digest


def test_an_array_is_read_in_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwire_engine.data.arrays._BLOCK", 7)
    rows = [chat(f"user: 日{i}", 'assistant: "]}, {[') for i in range(20)]
    dataset = read(tmp_path, json.dumps(rows, ensure_ascii=False, indent=1).encode(), "train.json")
    assert dataset.digest == load(tmp_path, rows, tokenizer_with(CHATML)).digest


@pytest.mark.parametrize(
    ("data", "line", "reason"),
    [
        (LINE, 1, "one array of rows"),
        (b"[" + LINE + b",\n]", 2, "a comma follows the last row"),
        (b"[" + LINE + b"\n" + LINE + b"]", 2, "a comma is missing"),
        (b"[" + LINE + b",\n" + LINE, 2, "ends early"),
        (b"[\n" + LINE + b",\n" + LINE[:-3], 3, "not JSON"),
        (b"[" + LINE + b"]\n[]", 2, "more behind the end"),
        (b"[" + LINE + b",\n3]", 2, "a number, not an object"),
        (b"[" + LINE + b",\n" + LINE.replace(b'"a"', b'"\xff"') + b"]", 2, "not UTF-8"),
        (b"[" + LINE.replace(b'"a"', b'"\\udc00"') + b"]", 1, "surrogate"),
        (b"[" * 100_000, 1, ""),
    ],
)
def test_arrays_that_are_broken_are_refused(tmp_path: Path, data: bytes, line: int, reason: str) -> None:
    with pytest.raises(DatasetInvalid) as caught:
        read(tmp_path, data, "train.json")
    assert reason in caught.value.message
    assert caught.value.details["line"] == line


@pytest.mark.parametrize("name", ["train.jsonl.gz", "train.json.gz"])
def test_compressed_files_are_read(tmp_path: Path, name: str) -> None:
    plain = LINE + b"\n" + LINE if "jsonl" in name else b"[" + LINE + b"," + LINE + b"]"
    assert len(read(tmp_path, gzip.compress(plain), name)) == 2


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b"x" + data, lambda data: data[:20] + b"??"])
def test_damaged_compressed_files_are_refused(tmp_path: Path, damage: Any) -> None:
    with pytest.raises(DatasetInvalid, match="gzip"):
        read(tmp_path, damage(gzip.compress(LINE * 50)), "train.jsonl.gz")


def test_a_row_of_more_than_64_mb_is_never_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwire_engine.data.files.MAX_ROW_BYTES", 200)
    monkeypatch.setattr("trainwire_engine.data.files._BLOCK", 16)
    huge = json.dumps(chat("user: a", "assistant: " + "b" * 1000)).encode()
    dataset = read(tmp_path, huge + b"\n" + LINE + b"\n" + huge)
    assert dataset.report.rows_dropped["too_long"].lines == [f"{tmp_path / 'train.jsonl'}:{n}" for n in (1, 3)]
    assert dataset.location(0).endswith(":2")
    with pytest.raises(DatasetInvalid, match="larger than 64 MB"):
        read(tmp_path, huge, on_overlong="truncate")


def test_a_long_row_is_dropped_without_tokenizing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = chat("user: a", "assistant: " + "hello " * 2_000_000)
    tokenizer = tokenizer_with(CHATML)
    encode = WordEncoder.__call__

    def guarded(self: WordEncoder, texts: list[str], places: list[list[int]]) -> Any:
        assert max(map(len, texts), default=0) < 1000
        return encode(self, texts, places)

    monkeypatch.setattr(WordEncoder, "__call__", guarded)
    dataset = load(tmp_path, [row, ROW], tokenizer)
    assert dataset.report.rows_dropped["too_long"].count == 1


def far_too_long(kind: str, seed: int) -> dict[str, Any]:
    """A row of some thousand words."""
    chance = random.Random(seed)
    words = [*WORDS.split(), "\n", "  ", "é日本", "12345", "<|im_end|>", "<think>", "\n\n", "/x"]
    long = " ".join(chance.choices(words, k=3000))
    if kind == "one word":
        return chat("user: hi", f"assistant: {'a' * 9000}")
    if kind == "text":
        return {"text": long}
    return chat(f"user: {long}", "assistant: yes") if kind == "question" else chat("user: hi", f"assistant: {long}")


@pytest.mark.parametrize("mode", ["truncate", "truncate_left"])
@pytest.mark.parametrize("kind", ["question", "answer", "text", "one word"])
def test_what_is_cut_off_anyway_is_not_tokenized_and_the_rest_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, mode: str
) -> None:
    rows = [far_too_long(kind, seed) for seed in range(4)] + [far_too_long("text" if kind == "text" else "answer", 9)]
    tokenizer = tokenizer_with(CHATML)
    tokenized: list[int] = []
    encode = WordEncoder.__call__

    def counting(self: WordEncoder, texts: Any, places: Any) -> Any:
        tokenized.extend(map(len, texts))
        return encode(self, texts, places)

    monkeypatch.setattr(WordEncoder, "__call__", counting)
    found = []
    for name, longest in (("whole", 1 << 20), ("cut", 1000)):
        (tmp_path / name).mkdir()
        monkeypatch.setattr("trainwire_engine.data.encode._LONG_TEXT", longest)
        monkeypatch.setattr("trainwire_engine.data.encode._REACH", 300)
        tokenized.clear()
        dataset = load(tmp_path / name, rows, tokenizer, max_seq_length=20, on_overlong=mode)
        kept = [(dataset.tokens(i).tolist(), dataset.mask(i).tolist()) for i in range(len(dataset))]
        found.append((kept, dataset.report.rows_truncated, dataset.report.rows_dropped.keys()))
        assert (max(tokenized) > 8000) is (name == "whole" or kind == "one word")
    assert found[0] == found[1]


@pytest.mark.parametrize(("mode", "kept"), [("truncate", slice(None, 12)), ("truncate_left", slice(-12, None))])
def test_truncation_keeps_exactly_max_seq_length_tokens(tmp_path: Path, mode: str, kept: slice) -> None:
    tokenizer = tokenizer_with(CHATML)
    row = chat("user: a", "assistant: " + "\U0001f642" * 9)
    whole = load(tmp_path, [row], tokenizer)
    (tmp_path / "cut").mkdir()
    dataset = load(tmp_path / "cut", [row], tokenizer, max_seq_length=12, on_overlong=mode)
    assert dataset.tokens(0).tolist() == whole.tokens(0)[kept].tolist()
    assert dataset.mask(0).tolist()[1:] == whole.mask(0)[kept].tolist()[1:]
    assert dataset.report.rows_truncated == 1


def test_a_row_whose_trained_tokens_are_all_cut_off_is_dropped(tmp_path: Path) -> None:
    rows = [chat("user: " + "a " * 60, "assistant: b"), ROW]
    dataset = load(tmp_path, rows, tokenizer_with(CHATML), max_seq_length=20, on_overlong="truncate")
    assert len(dataset) == 1
    assert dataset.report.rows_dropped["no_trained_tokens"].lines == [f"{tmp_path / 'train.jsonl'}:1"]


def test_overlong_rows_are_refused_where_that_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(DatasetInvalid, match=r":2: row: it has \d+ tokens, more than max_seq_length = 14"):
        load(
            tmp_path,
            [ROW, chat("user: a", "assistant: " + "b" * 50)],
            tokenizer_with(CHATML),
            max_seq_length=14,
            on_overlong="error",
        )


def test_all_rows_dropped_is_refused_with_the_reasons(tmp_path: Path) -> None:
    with pytest.raises(DatasetInvalid) as caught:
        load(tmp_path, [ROW, ROW, chat("user: a")], tokenizer_with(CHATML), max_seq_length=5)
    assert "Of the 3 rows" in caught.value.message
    assert "2 too_long, 1 no_assistant_turn" in caught.value.message
    assert "max_seq_length" in str(caught.value.hint)
    assert caught.value.details["rows_dropped"]["too_long"]["count"] == 2


def test_empty_texts_are_dropped(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(CHATML)
    dataset = load(tmp_path, [{"text": ""}, {"text": " \n"}, {"text": "a"}], tokenizer)
    assert dataset.report.rows_dropped["empty"].count == 2
    (tmp_path / "chat").mkdir()
    dataset = load(tmp_path / "chat", [{"messages": []}, chat("user: a", "assistant: "), ROW], tokenizer)
    assert {reason: entry.count for reason, entry in dataset.report.rows_dropped.items()} == {
        "empty": 1,
        "no_trained_tokens": 1,
    }


def test_a_token_outside_the_models_vocabulary_is_refused(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [1, 999], "labels": [1, 999]}]
    with pytest.raises(DatasetInvalid, match=r":2: token 999 is outside the model's vocabulary of 500"):
        load(tmp_path, rows, tokenizer_with(CHATML), vocab_size=500)


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_an_empty_training_file_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(DatasetInvalid, match="has no rows"):
        read(tmp_path, data)


def test_a_missing_file_an_unknown_ending_and_a_folder_without_train_are_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(CHATML)
    with pytest.raises(DatasetInvalid, match="There is no data file"):
        load(tmp_path, tmp_path / "no.jsonl", tokenizer)
    with pytest.raises(DatasetInvalid, match="an ending that is not known") as caught:
        read(tmp_path, LINE, "train.txt")
    assert ".jsonl" in str(caught.value.hint)
    with pytest.raises(DatasetInvalid, match="no file train"):
        load(tmp_path, tmp_path, tokenizer)
    (tmp_path / "train.jsonl").write_bytes(LINE)
    (tmp_path / "train.json").write_bytes(b"[" + LINE + b"]")
    with pytest.raises(DatasetInvalid, match="several files for train"):
        load(tmp_path, tmp_path, tokenizer)


def valid(folder: Path, notices: list[Notice], valid_data: str | None = None) -> Any:
    config = config_for(folder, folder, valid_data=valid_data)
    return load_dataset(config, tokenizer_with(CHATML), "valid", lambda *_: None, 1000, notices)


def test_a_folder_gives_training_and_validation_data_also_in_shards(tmp_path: Path) -> None:
    for name in ("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "validation.jsonl"):
        write_rows(tmp_path / name, [ROW])
    notices: list[Notice] = []
    assert len(load(tmp_path, tmp_path, tokenizer_with(CHATML))) == 2
    found = valid(tmp_path, notices)
    assert shown(found, tokenizer_with(CHATML)).endswith("⟦b<|im_end|>⟧\n")
    assert found.location(0) == f"{tmp_path / 'validation.jsonl'}:1"
    assert not notices


def test_shards_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        write_rows(tmp_path / f"train-{number}.jsonl", [ROW])
    dataset = load(tmp_path, tmp_path, tokenizer_with(CHATML))
    assert [Path(dataset.location(i)).name for i in range(3)] == [f"train-{n}.jsonl:1" for n in (1, 2, 10)]


@pytest.mark.parametrize(
    "names",
    [
        ["train-0-of-3", "train-2-of-3"],
        ["train-0-of-2", "train-00001-of-00002", "train-1-of-2"],
        ["train-0-of-1", "train-0-of-2", "train-1-of-2"],
        ["train", "train-0-of-1"],
    ],
)
def test_a_set_of_shards_that_is_not_whole_is_refused(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        write_rows(tmp_path / f"{name}.jsonl", [ROW])
    with pytest.raises(DatasetInvalid, match="not one whole set: " + ", ".join(f"{name}.jsonl" for name in names)):
        load(tmp_path, tmp_path, tokenizer_with(CHATML))
    load(tmp_path, tmp_path / f"{names[0]}.jsonl", tokenizer_with(CHATML))


def test_missing_or_empty_validation_data_turns_evaluation_off_with_one_notice(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", [ROW])
    (tmp_path / "valid.jsonl").write_text("")
    for given in (None, str(tmp_path / "no.jsonl")):
        notices: list[Notice] = []
        assert valid(tmp_path, notices, given) is None
        assert [notice.code for notice in notices] == ["no_validation"]
        assert "valuation is off" in notices[0].message
    (tmp_path / "valid.jsonl").unlink()
    notices = []
    assert valid(tmp_path, notices) is None
    assert len(notices) == 1


def test_a_broken_row_of_the_validation_data_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", [ROW])
    write_rows(tmp_path / "valid.jsonl", [ROW, {"messages": 1}])
    with pytest.raises(DatasetInvalid, match=r"valid\.jsonl:2: messages"):
        valid(tmp_path, [])


def test_the_first_rows_that_can_be_used_are_used(tmp_path: Path) -> None:
    rows = [chat("user: a"), ROW, chat("user: b", "assistant: c"), ROW, chat("user: d")]
    dataset = load(tmp_path, rows, tokenizer_with(CHATML), max_train_samples=2)
    report = dataset.report
    assert (len(dataset), report.rows_read, report.rows_used, report.dropped()) == (2, 3, 2, 1)
    assert [dataset.location(i)[-1] for i in range(2)] == ["2", "3"]
    assert report.tokens == dataset.lengths.sum()


def test_the_report_counts_tokens_and_lengths(tmp_path: Path) -> None:
    rows = [{"input_ids": list(range(n)), "labels": list(range(n))} for n in (2, 3, 4, 5, 8, 9)]
    report = load(tmp_path, rows, tokenizer_with(None)).report
    assert report.length_histogram == {"2": 1, "4": 2, "8": 2, "16": 1}
    assert (report.tokens, report.trained_tokens) == (31, 25)


def test_progress_ends_with_all_done(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", [ROW] * 3000)
    seen: list[tuple[Any, ...]] = []
    load_dataset(config_for(tmp_path, tmp_path), tokenizer_with(CHATML), "train", lambda *a: seen.append(a), 1000)
    size = (tmp_path / "train.jsonl").stat().st_size
    assert seen[0] == ("Tokenizing the training data", 0, size, "bytes")
    assert seen[-1] == ("Tokenizing the training data", size, size, "bytes")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkfifo, "is no file"),
        (Path.mkdir, "is no file"),
        (lambda path: path.symlink_to("/dev/zero"), "is no file"),
        (lambda path: path.symlink_to("nowhere"), "leads nowhere"),
        (lambda path: path.symlink_to(path), "leads nowhere"),
    ],
    ids=["pipe", "folder", "device", "dangling link", "link to itself"],
)
def test_what_is_no_file_is_refused_in_a_folder_and_by_name(tmp_path: Path, make: Any, reason: str) -> None:
    make(tmp_path / "train.jsonl")
    for given in [tmp_path] if make is Path.mkdir else [tmp_path, tmp_path / "train.jsonl"]:
        with pytest.raises(DatasetInvalid, match=f"train.jsonl .*{reason}"):
            load(tmp_path, given, tokenizer_with(CHATML))


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").symlink_to(write_rows(tmp_path / "other.txt", [ROW]))
    assert len(load(tmp_path, tmp_path, tokenizer_with(CHATML))) == 1


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[Notice] = []
    write_rows(tmp_path / "train.jsonl", [ROW])

    def refused(*_: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("trainwire_engine.data.load.file_digest", refused)
    with pytest.raises(DatasetInvalid, match=r"train\.jsonl cannot be read: Permission denied"):
        load(tmp_path, tmp_path, tokenizer_with(CHATML), notices)
    assert not notices


@pytest.mark.parametrize("cached", [True, False])
def test_a_file_that_grows_while_it_is_read_is_refused_and_not_kept(tmp_path: Path, cached: bool) -> None:
    file = write_rows(tmp_path / "train.jsonl", [ROW] * 3)
    cache = tmp_path / "cache" if cached else file
    config = config_for(file, tmp_path, cache_dir=str(cache))

    def grow(*_: Any) -> None:
        with file.open("ab") as more:
            more.write(LINE + b"\n")

    with pytest.raises(DatasetInvalid, match="was changed while it was read"):
        load_dataset(config, tokenizer_with(CHATML), "train", grow, 1000)
    dataset = load_dataset(config, tokenizer_with(CHATML), "train", lambda *_: None, 1000)
    assert dataset is not None
    assert len(dataset) == file.read_bytes().count(b"\n") > 3
