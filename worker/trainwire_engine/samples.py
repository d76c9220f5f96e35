"""A few rows as the model reads them, with the trained parts told apart: for people to look at before a run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

ROWS, TEXT, PIECES = 3, 1500, 24
"""Rows shown, characters of a row, pieces of a row: together they fit a line of the wire."""
_GAP = " … "


def samples(dataset: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """Give the first row, one of median length and one of the longer ones, in the shape of `Sample`."""
    by_length = np.argsort(dataset.lengths, kind="stable")
    picked = dict.fromkeys([0, int(by_length[len(dataset) // 2]), int(by_length[len(dataset) * 9 // 10])])
    return [_sample(dataset, row, tokenizer) for row in list(picked)[:ROWS]]


def _sample(dataset: Any, row: int, tokenizer: Any) -> dict[str, Any]:
    segments = list(_segments(dataset.tokens(row), dataset.mask(row), tokenizer))
    if len(segments) > PIECES:
        half = PIECES // 2
        segments = [*segments[:half], {"text": _GAP, "trained": False}, *segments[-half:]]
    most = max(40, TEXT // len(segments))
    return {
        "row": dataset.location(row),
        "tokens": int(dataset.lengths[row]),
        "trained_tokens": int(dataset.trained[row]),
        "segments": [{**segment, "text": _shortened(segment["text"], most)} for segment in segments],
    }


def _segments(tokens: np.ndarray, mask: np.ndarray, tokenizer: Any) -> Iterator[dict[str, Any]]:
    borders = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(tokens)]
    for start, end in pairwise(borders):
        yield {"text": tokenizer.decode(tokens[start:end].tolist()), "trained": bool(mask[start])}


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most // 2] + _GAP + text[-(most // 2) :]
