"""docs/data.md says what is so: its tables and its program are tried."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.kit import CHATML, chat, load, tokenizer_with, trained

from trainwire_engine.batches import Order
from trainwire_engine.data import load as loading
from trainwire_protocol.errors import DatasetInvalid

PAGE = (Path(__file__).parents[3] / "docs" / "data.md").read_text(encoding="utf-8")
ROW = json.dumps(chat("user: a", "assistant: b"))


def table(heading: str) -> list[list[str]]:
    """The rows of the table under a heading, without its head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    assert len(lines) > 2
    rows = (re.split(r"(?<!\\)\|", line)[1:-1] for line in lines[2:])
    return [[cell.strip().replace("\\|", "|") for cell in row] for row in rows]


@pytest.mark.parametrize(("keys", "example", "expected"), table("Shapes of rows"))
def test_an_example_of_each_shape_is_trained_as_the_page_says(
    tmp_path: Path, keys: str, example: str, expected: str
) -> None:
    tokenizer = tokenizer_with(CHATML)
    dataset = load(tmp_path, [json.loads(example.strip("`"))], tokenizer)
    if expected.startswith("`"):
        assert trained(dataset, tokenizer) == [expected.strip("`")]
    elif expected == "one token":
        assert dataset.trained.tolist() == [1]
    else:
        assert dataset.trained.tolist() == [dataset.lengths[0] - 1]
        assert dataset.tokens(0)[-1] == tokenizer.eos_id


def test_the_page_has_every_shape_in_order() -> None:
    from trainwire_engine.data.rows import SHAPES

    pages = [tuple(re.findall(r"`(\w+)`", keys.split(", maybe")[0])) for keys, _, _ in table("Shapes of rows")]
    assert pages == [shape.keys for shape in SHAPES]


@pytest.mark.parametrize(("content", "outcome"), table("Odd files"))
def test_an_odd_file_ends_as_the_page_says(tmp_path: Path, content: str, outcome: str) -> None:
    text = "" if content == "(nothing)" else content.strip("`").replace("ROW", ROW).replace("⏎", "\n")
    text = re.sub(r"(\\\\)|\\u([0-9a-f]{4})|\\r", _character, text)
    (tmp_path / "train.jsonl").write_bytes(text.encode())
    if not outcome.startswith("refused"):
        report = load(tmp_path, tmp_path / "train.jsonl", tokenizer_with(CHATML)).report
        dropped = "".join(f"; dropped: {reason}" for reason in report.rows_dropped)
        assert f"used: {report.rows_used}{dropped}" == outcome
        return
    with pytest.raises(DatasetInvalid) as caught:
        load(tmp_path, tmp_path / "train.jsonl", tokenizer_with(CHATML))
    said = re.fullmatch(r"refused, line (\d+): (.*)", outcome)
    assert said is not None
    assert caught.value.details.get("line", 0) == int(said[1])
    assert said[2] in caught.value.message


def _character(found: re.Match[str]) -> str:
    if found[1]:
        return "\\"
    return chr(int(found[2], 16)) if found[2] else "\r"


def test_the_page_names_every_reason_and_every_notice() -> None:
    source = "".join(file.read_text(encoding="utf-8") for file in Path(loading.__file__).parent.glob("*.py"))
    reasons = set(re.findall(r'(?:RowDropped|result\.drop)\("(\w+)"', source))
    assert {cells[0].strip("`") for cells in table("Rows that are left out")} == reasons
    codes = {*loading._NOTICES, *re.findall(r'Notice\("(\w+)"', source)}
    assert {cells[0].strip("`") for cells in table("Notices")} == codes
    assert set(re.findall(r'notices\.add\("(\w+)"', source)) == set(loading._NOTICES)


def test_the_pages_program_gives_the_order() -> None:
    program: dict[str, Any] = {}
    lines = itertools.dropwhile(lambda line: not line.startswith("    def mix"), PAGE.splitlines())
    code = itertools.takewhile(lambda line: not line or line.startswith("    "), lines)
    exec("\n".join(line[4:] for line in code), program)
    lengths = np.array([(7 * i) % 31 + 1 for i in range(423)], np.int32)
    for seed, epoch, size in [(0, 0, 4), (42, 3, 2), (2**63 + 5, 1, 7)]:
        plain, grouped = Order(423, size, seed), Order(423, size, seed, group_by_length=True, lengths=lengths)
        updates = range(plain.updates_per_epoch)
        assert [row for u in updates for row in plain.rows(epoch, u)] == program["order"](423, seed, epoch)
        expected = program["grouped"](423, seed, epoch, size, lengths.tolist())
        assert [row for u in updates for row in grouped.rows(epoch, u)] == expected
