"""Rows shown to people: whole where they are short, bounded where they are long."""

from __future__ import annotations

import json

import numpy as np

from trainwire_engine.samples import TEXT, samples


class Letters:
    """A tokenizer whose token is a letter."""

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


class Rows:
    """Rows of letters, each trained where it is a capital."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts
        self.lengths = np.array([len(text) for text in texts], np.int32)
        self.trained = np.array([sum(map(str.isupper, text)) for text in texts], np.int32)

    def __len__(self) -> int:
        return len(self._texts)

    def tokens(self, row: int) -> np.ndarray:
        return np.array([ord(letter) for letter in self._texts[row]], np.int32)

    def mask(self, row: int) -> np.ndarray:
        return np.array([letter.isupper() for letter in self._texts[row]])

    def location(self, row: int) -> str:
        return f"rows:{row + 1}"


def test_the_pieces_of_a_row_are_what_is_trained_and_what_is_not() -> None:
    (sample,) = samples(Rows("aaBBc"), Letters())
    assert (sample["row"], sample["tokens"], sample["trained_tokens"]) == ("rows:1", 5, 2)
    assert [(s["text"], s["trained"]) for s in sample["segments"]] == [("aa", False), ("BB", True), ("c", False)]


def test_rows_of_different_lengths_are_shown_and_none_twice() -> None:
    shown = samples(Rows(*("a" * n + "B" for n in range(1, 101))), Letters())
    assert [sample["tokens"] for sample in shown] == [2, 52, 92]
    assert len(samples(Rows("aB", "aB"), Letters())) <= 2


def test_long_rows_and_rows_of_many_pieces_fit_a_line_of_the_wire() -> None:
    emoji = "\U0001f600"
    shown = samples(Rows("aaaaBBBB" * 400, "aB" * 9_000, emoji * 50_000 + "B" * 50_000), Letters())
    assert len(shown) >= 2
    assert len(json.dumps(shown)) < 60_000
    for sample in shown:
        assert sum(len(segment["text"]) for segment in sample["segments"]) < 2 * TEXT
        assert any(segment["trained"] for segment in sample["segments"])
