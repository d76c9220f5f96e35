"""Turns chunks of raw rows into tokens and masks, in batches of the Rust tokenizer."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainwire_engine.data.files import RawRow
from trainwire_engine.data.options import Options
from trainwire_engine.data.parse import parse_row
from trainwire_engine.data.render import Rendered, Renderer, RowDropped
from trainwire_engine.data.rows import RowError, Shape, Tokens
from trainwire_engine.template import Span
from trainwire_engine.tokenizer import Tokenizer
from trainwire_protocol.errors import DatasetInvalid

TRAINED = np.int32(-(2**31))
"""Set in a stored token that is a trained target: the sign bit. Token ids stay below 2^31."""


@dataclass
class Encoded:
    """The rows of one chunk that are used, one after the other, and what became of the others."""

    tokens: list[np.ndarray] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    rows_read: int = 0
    truncated: int = 0
    dropped: dict[str, list[int]] = field(default_factory=dict)
    notices: set[str] = field(default_factory=set)

    def drop(self, reason: str, line: int) -> None:
        """Leave a row out."""
        self.dropped.setdefault(reason, []).append(line)


class Encoder:
    """Encodes chunks of rows under one tokenizer and one set of options."""

    def __init__(self, tokenizer: Tokenizer, options: Options) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._render = Renderer(tokenizer, options.train_on)

    def __call__(self, path: str, shape: Shape, rows: Sequence[RawRow]) -> Encoded:
        """Encode rows of one file. Raises DatasetInvalid at the first row that cannot be used."""
        result = Encoded(rows_read=len(rows), notices=self._render.notices)
        rendered: list[tuple[int, Rendered | Tokens]] = []
        for row in rows:
            try:
                rendered.append((row.line, self._rendered(shape, row)))
            except RowDropped as drop:
                result.drop(drop.reason, row.line)
            except RowError as error:
                raise row_invalid(path, row.line, error) from None
        texts = [item.text for _, item in rendered if isinstance(item, Rendered)]
        encodings = iter(self._tokenizer.backend.encode_batch(texts, add_special_tokens=False))
        for line, item in rendered:
            if isinstance(item, Tokens):
                ids = np.array(item.ids, np.int64)
                if len(ids) and ids.max() >= 2**31:
                    raise row_invalid(path, line, RowError("input_ids", f"{ids.max()} is no token id"))
                tokens, trained = ids.astype(np.int32), np.array(item.labels, np.int64) != -100
            else:
                tokens, trained = self._tokens(item, next(encodings))
            self._add(result, path, line, tokens, trained)
        return result

    def _rendered(self, shape: Shape, row: RawRow) -> Rendered | Tokens:
        if row.data is None:
            if self._options.on_overlong == "drop":
                raise RowDropped("too_long")
            raise RowError("row", "it is larger than 64 MB", "Split it, or set on_overlong = drop.")
        return self._render(shape.parse(parse_row(row.data), self._tokenizer.has_template))

    def _tokens(self, item: Rendered, encoding: Any) -> tuple[np.ndarray, np.ndarray]:
        ids = encoding.ids
        trained = mask_of(len(ids), encoding, item.spans)
        if not item.ends:
            return np.array(ids, np.int32), trained
        prefix, eos = self._tokenizer.text_prefix, self._tokenizer.eos_id
        head = prefix if ids[: len(prefix)] != prefix else []
        tail = [eos] if eos is not None and ids[-1:] != [eos] else []
        marks = [np.zeros(len(head), bool), trained, np.ones(len(tail), bool)]
        return np.array([*head, *ids, *tail], np.int32), np.concatenate(marks)

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
            result.truncated += 1
        trained[:1] = False  # nothing comes before the first token that could predict it
        if not trained.any():
            return result.drop("no_trained_tokens", line)
        result.tokens.append(np.where(trained, tokens | TRAINED, tokens))
        result.lengths.append(len(tokens))
        result.lines.append(line)
        return None


def mask_of(length: int, encoding: Any, spans: Sequence[Span]) -> np.ndarray:
    """Mark the tokens whose first character lies in one of the spans (characters, sorted, apart)."""
    mask = np.zeros(length, bool)
    for start, end in spans:
        mask[_first_token(encoding, length, start) : _first_token(encoding, length, end)] = True
    return mask


def _first_token(encoding: Any, length: int, position: int) -> int:
    """The first token that begins at or after a character."""
    if position == 0:
        return 0
    index = encoding.char_to_token(position)
    if index is None:
        # No token covers the character: it is the end, or the tokenizer drops it.
        return bisect.bisect_left(encoding.offsets, (position,), hi=length)
    start, _ = encoding.token_to_chars(index)
    return int(index) if start >= position else int(index) + 1


def row_invalid(path: str, line: int, error: RowError) -> DatasetInvalid:
    """Say where a row stands that cannot be used, and why."""
    return DatasetInvalid(
        f"{path}:{line}: {error.field}: {error.reason}.",
        hint=error.hint,
        path=path,
        line=line,
        field=error.field,
        reason=error.reason,
    )
