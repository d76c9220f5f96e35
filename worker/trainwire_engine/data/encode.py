"""Turns chunks of raw rows into tokens and masks, in batches of the Rust tokenizer."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from trainwire_engine.data.files import RawRow
from trainwire_engine.data.options import Options
from trainwire_engine.data.parse import parse_row
from trainwire_engine.data.problems import RowError, row_invalid
from trainwire_engine.data.render import Rendered, Renderer, RowDropped
from trainwire_engine.data.rows import Shape, Tokens
from trainwire_engine.data.words import WordEncoder
from trainwire_engine.tokenizer import Tokenizer

_LONG_TEXT = 1 << 20
_REACH = 1 << 16
"""Characters among which a place to cut is looked for."""

TRAINED = np.int32(-(2**31))
"""Set in a stored token that is a trained target: the sign bit. Token ids stay below 2^31."""


@dataclass
class Encoded:
    """The rows of one chunk that are used, one after the other, and what became of the others."""

    tokens: list[np.ndarray] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    rows_read: int = 0
    truncated: list[int] = field(default_factory=list)
    dropped: dict[str, list[int]] = field(default_factory=dict)
    notices: set[str] = field(default_factory=set)
    train_on: set[str] = field(default_factory=set)

    def drop(self, reason: str, line: int) -> None:
        """Leave a row out."""
        self.dropped.setdefault(reason, []).append(line)


class Encoder:
    """Encodes chunks of rows under one tokenizer and one set of options."""

    def __init__(self, tokenizer: Tokenizer, options: Options) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._render = Renderer(tokenizer, options.train_on)
        self._words = WordEncoder.of(tokenizer.backend)

    def __call__(self, path: str, shape: Shape, rows: Sequence[RawRow]) -> Encoded:
        """Encode rows of one file. Raises DatasetInvalid at the first row that cannot be used."""
        result = Encoded(rows_read=len(rows), notices=self._render.notices, train_on=self._render.used)
        rendered: list[tuple[int, Rendered | Tokens]] = []
        for row in rows:
            try:
                item = self._rendered(shape, row)
                if isinstance(item, Rendered) and len(item.text) > _LONG_TEXT:
                    item = self._without_excess(item)
                rendered.append((row.line, item))
            except RowDropped as drop:
                result.drop(drop.reason, row.line)
            except RowError as error:
                raise row_invalid(path, row.line, error) from None
        encoded = iter(self._encode([item for _, item in rendered if isinstance(item, Rendered)]))
        for line, item in rendered:
            if isinstance(item, Tokens):
                tokens, trained = np.array(item.ids, np.int32), np.array(item.labels, np.int32) != -100
            else:
                tokens, trained = self._with_ends(item, *next(encoded))
            self._add(result, path, line, tokens, trained)
        return result

    @cached_property
    def _enough(self) -> int:
        """Characters that surely are more than `max_seq_length` tokens."""
        longest = max(map(len, self._tokenizer.backend.get_vocab()))
        # What normalization takes away is less than three characters of four.
        return 4 * longest * self._options.max_seq_length + 1

    def _without_excess(self, item: Rendered) -> Rendered:
        """Cut a text that is far too long, if the tokens that its row keeps stay what they are.

        Raises RowDropped if it keeps none.
        """
        overlong, size = self._options.on_overlong, len(item.text)
        if self._words is None or overlong == "error" or size < self._enough:
            return item
        if overlong == "drop":
            raise RowDropped("too_long")
        if overlong == "truncate":
            start, end = 0, next(iter(self._words.cuts_within(item.text, self._enough, self._enough + _REACH)), size)
        else:
            last = size - self._enough
            start, end = max(self._words.cuts_within(item.text, max(0, last - _REACH), last), default=0), size
        spans = [(max(first, start) - start, min(behind, end) - start) for first, behind in item.spans]
        return Rendered(item.text[start:end], [span for span in spans if span[0] < span[1]], item.ends)

    def _rendered(self, shape: Shape, row: RawRow) -> Rendered | Tokens:
        if row.data is None:
            if self._options.on_overlong == "drop":
                raise RowDropped("too_long")
            raise RowError("row", "it is larger than 64 MB", "Split it, or set on_overlong = drop.")
        return self._render(shape.parse(parse_row(row.data), self._tokenizer.has_template))

    def _encode(self, items: Sequence[Rendered]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids and masks of texts. A token is trained if its first character lies in a trained span."""
        texts = [item.text for item in items]
        places = [[place for span in item.spans for place in span] for item in items]
        if self._words is not None:
            found = self._words(texts, places)
        else:
            encodings = self._tokenizer.backend.encode_batch(texts, add_special_tokens=False)
            found = [
                (np.array(encoding.ids, np.int32), [first_token(encoding, place) for place in cuts])
                for encoding, cuts in zip(encodings, places)
            ]
        return [(ids, _mask(len(ids), firsts)) for ids, firsts in found]

    def _with_ends(self, item: Rendered, ids: np.ndarray, trained: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Add the marks around a plain text, where the text has not got them already."""
        if not item.ends:
            return ids, trained
        prefix, eos = self._tokenizer.text_prefix, self._tokenizer.eos_id
        head = prefix if ids[: len(prefix)].tolist() != prefix else []
        tail = [eos] if eos is not None and ids[-1:].tolist() != [eos] else []
        marks = [np.zeros(len(head), bool), trained, np.ones(len(tail), bool)]
        return np.concatenate([np.array(head, np.int32), ids, np.array(tail, np.int32)]), np.concatenate(marks)

    def _add(self, result: Encoded, path: str, line: int, tokens: np.ndarray, trained: np.ndarray) -> None:
        limit, overlong = self._options.max_seq_length, self._options.on_overlong
        if len(tokens) > limit:
            if overlong == "drop":
                return result.drop("too_long", line)
            if overlong == "error":
                reason = f"it has {len(tokens)} tokens, more than max_seq_length = {limit}"
                hint = "Raise max_seq_length, or set on_overlong to drop, truncate or truncate_left."
                raise row_invalid(path, line, RowError("row", reason, hint))
            kept = slice(limit) if overlong == "truncate" else slice(-limit, None)
            tokens, trained = tokens[kept], trained[kept].copy()
            result.truncated.append(line)
        trained[:1] = False  # nothing comes before the first token that could predict it
        if not trained.any():
            return result.drop("no_trained_tokens", line)
        result.tokens.append(np.where(trained, tokens | TRAINED, tokens))
        result.lengths.append(len(tokens))
        result.lines.append(line)
        return None


def _mask(length: int, firsts: Sequence[int]) -> np.ndarray:
    """Mark the tokens from each even entry up to the next odd one."""
    mask = np.zeros(length, bool)
    for start, end in zip(firsts[::2], firsts[1::2]):
        mask[start:end] = True
    return mask


def first_token(encoding: Any, position: int) -> int:
    """The first token of an encoding that begins at or behind a character."""
    if position == 0:
        return 0
    index = encoding.char_to_token(position)
    if index is None:
        # No token covers the character: it is the end, or the tokenizer drops it.
        return bisect.bisect_left(encoding.offsets, (position,))
    start, _ = encoding.token_to_chars(index)
    return int(index) if start >= position else int(index) + 1
