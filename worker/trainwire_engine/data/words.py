"""Encodes text word by word with a memory of words already seen, for tokenizers where that changes nothing.

A text is cut only where no token reaches over the cut, as `cuts` finds out about the tokenizer. Every word that is
seen for the first time is left to the tokenizer itself, and so is all text where no cut is certain.
"""

from __future__ import annotations

import array
import bisect
import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from trainwire_engine.data.cuts import CutRules, cut_rules
from trainwire_engine.data.patterns import any_of

_KEPT_WORDS = 250_000
_LONGEST_KEPT = 64

# Units begin before a run of spaces, or behind newlines; where these meet, only if several newlines are no trouble.
_UNITS_WITH_RUNS = r" *[^ \n]+\n*| *\n+| +"
_UNITS = r" *[^ \n]+(?:\n(?=\S))?|[ \n]+"

_SPACES_BEFORE_DIGIT = re.compile(r"[^\S ][0-9]|\s [0-9]")

_Items = bytes | list[bytes | str]
"""Encoded words; a list as long as there are words to be encoded among them."""

_Plan = list[tuple[int, _Items]]
"""Parts of a text, each with the position of its first character."""


class WordEncoder:
    """Encodes batches of texts exactly as `backend` does, several times faster where words repeat."""

    def __init__(self, backend: Any, rules: CutRules) -> None:
        self._backend = backend
        self._rules = rules
        tokens = backend.get_added_tokens_decoder()
        self._marks = {token.content: _bytes([index]) for index, token in tokens.items()}
        raw = [token.content for token in tokens.values() if not token.normalized]
        normalized = [token.content for token in tokens.values() if token.normalized]
        # The tokenizer looks for added tokens twice, and so does this.
        self._splitters = [re.compile(f"({any_of(texts)})") for texts in (raw, normalized) if texts]
        self._units = re.compile(_UNITS_WITH_RUNS if rules.newline_runs else _UNITS).findall
        self._around_digits = re.compile(f"[0-9]{{1,{rules.digits}}}|[^0-9]+").findall if rules.digits else None
        self._known: dict[str, bytes] = {}
        self._whole: dict[str, bytes] = {}
        self._missing: dict[str, None] = {}

    @classmethod
    def of(cls, backend: Any) -> WordEncoder | None:
        """Make one for a tokenizer; None where it is not known that its text may be cut."""
        added = backend.get_added_tokens_decoder().values()
        if any(token.lstrip or token.rstrip or token.single_word or not token.content for token in added):
            return None
        rules = cut_rules(backend)
        return None if rules is None else cls(backend, rules)

    def __call__(self, texts: Sequence[str], places: Sequence[Sequence[int]]) -> list[tuple[np.ndarray, list[int]]]:
        """Encode texts: for each its ids, int32, and for each of its places the first token that begins there or later.

        Places are positions of characters, in order.
        """
        self._missing.clear()
        plans = [self._plan(text, cuts) for text, cuts in zip(texts, places)]
        words = list(self._missing)
        encodings = self._backend.encode_batch_fast(words, add_special_tokens=False)
        fresh = {word: _bytes(encoding.ids) for word, encoding in zip(words, encodings)}
        results = [self._joined(text, plan, cuts, fresh) for text, plan, cuts in zip(texts, plans, places)]
        self._keep(fresh)
        return results

    def cuts_within(self, text: str, start: int, stop: int) -> list[int]:
        """Find places of a text, within a part of it, on whose two sides it has the tokens that it has as a whole.

        There may be more than these: words that an added token touches are left out.
        """
        if self._indivisible(text):
            return []
        longest = max(map(len, self._marks), default=0)
        first = max(0, start - longest)
        near = text[first : stop + longest]
        marked = sorted((first + at, first + at + len(mark)) for mark in self._marks for at in _places_of(mark, near))
        begins = [begin for begin, _ in marked]
        ends = [0, *itertools.accumulate((end for _, end in marked), max)]
        found: list[int] = []
        # The first unit may begin before, and the last one end behind.
        units = self._units(text[start:stop])
        begin = start
        for index in range(1, len(units) - 2):
            begin += len(units[index - 1])
            cut = begin + len(units[index])
            end = cut + len(units[index + 1])
            if ends[bisect.bisect_left(begins, end)] <= begin and self._may_cut(units[index], units[index + 1]):
                found.append(cut)
        return found

    def _indivisible(self, text: str) -> bool:
        """Whether only the tokenizer itself can encode a text, as a whole."""
        return "\0" in text or (self._rules.nfc and not text.isascii() and not unicodedata.is_normalized("NFC", text))

    def _plan(self, text: str, cuts: Sequence[int]) -> _Plan:
        """Cut a text into parts, so that a place lies between two parts, or inside of one that is a single word."""
        if self._indivisible(text):
            self._missing[text] = None
            return [(0, [text])]
        plan: _Plan = []
        at, cut, last = 0, 0, len(cuts)
        for index, part in enumerate(self._split(text)):
            if not part:
                continue
            start, at = at, at + len(part)
            while cut < last and cuts[cut] <= start:
                cut += 1
            if index & 1:
                plan.append((start, self._marks[part]))
            elif cut < last and cuts[cut] < at:
                plan += self._cut_part(part, start, cuts[cut:])
            else:
                plan.append((start, self._whole.get(part) or self._items(self._units(part))))
        return plan

    def _cut_part(self, part: str, start: int, places: Sequence[int]) -> _Plan:
        """Cut plain text at the places inside it; word by word if one of them is within a word."""
        units = self._units(part)
        plan: _Plan = []
        done, at = 0, start
        for place in places:
            if place >= start + len(part):
                break
            index, position = done, at
            while position < place:
                position += len(units[index])
                index += 1
            if position > place or (index > done and not self._may_cut(units[index - 1], units[index])):
                return self._word_by_word(units, start)
            plan.append((at, self._items(units[done:index])))
            done, at = index, position
        return [*plan, (at, self._items(units[done:]))]

    def _word_by_word(self, units: Sequence[str], at: int) -> _Plan:
        plan: _Plan = []
        index = 0
        while index < len(units):
            end = self._word_end(units, index)
            word = "".join(units[index:end])
            plan.append((at, self._pieces(word)))
            index, at = end, at + len(word)
        return plan

    def _split(self, text: str) -> list[str]:
        """Plain text and added tokens in turn."""
        pieces = [text]
        for splitter in self._splitters:
            if len(pieces) == 1:
                pieces = splitter.split(pieces[0])
            else:
                # Every other piece is an added token already.
                pieces = [p for i, piece in enumerate(pieces) for p in ([piece] if i & 1 else splitter.split(piece))]
        return pieces

    def _items(self, units: list[str]) -> _Items:
        """Look units up; those not known are joined with their neighbours where no cut is allowed."""
        ids: list[Any] = list(map(self._known.get, units))
        if None not in ids:
            return b"".join(ids)
        items: list[bytes | str] = []
        done = 0
        for index in [index for index, found in enumerate(ids) if found is None]:
            if index < done:
                continue
            start, end = index, self._word_end(units, index)
            while start > done and not self._may_cut(units[start - 1], units[start]):
                start -= 1
            items += ids[done:start]
            items += self._pieces("".join(units[start:end]))
            done = end
        return items + ids[done:]

    def _pieces(self, word: str) -> list[bytes | str]:
        """Look a word up; one that is not known is cut around its digits, since few numbers come twice."""
        ids = self._known.get(word) or self._whole.get(word)
        if ids is not None:
            return [ids]
        # Spaces are divided by what follows them, and other scripts have digits too.
        if self._around_digits is None or not word.isascii() or _SPACES_BEFORE_DIGIT.search(word):
            self._missing[word] = None
            return [word]
        pieces: list[bytes | str] = []
        for piece in self._around_digits(word):
            ids = self._known.get(piece) or self._whole.get(piece)
            if ids is None:
                self._missing[piece] = None
            pieces.append(piece if ids is None else ids)
        return pieces

    def _word_end(self, units: Sequence[str], index: int) -> int:
        """Where the word that holds a unit ends."""
        index += 1
        while index < len(units) and not self._may_cut(units[index - 1], units[index]):
            index += 1
        return index

    def _may_cut(self, before: str, after: str) -> bool:
        """Whether two units, which meet before a space or behind a newline, are independent of each other."""
        return self._ends_well(before) and _begins_well(after)

    def _ends_well(self, unit: str) -> bool:
        last = unit[-1]
        if last != "\n":
            return not last.isspace() and last not in self._rules.not_after
        return self._rules.newline_runs or (len(unit) > 1 and not unit[-2].isspace())

    def _joined(
        self, text: str, plan: _Plan, places: Sequence[int], fresh: dict[str, bytes]
    ) -> tuple[np.ndarray, list[int]]:
        parts = [
            items if type(items) is bytes else b"".join([fresh[i] if type(i) is str else i for i in items])  # type: ignore[misc]
            for _, items in plan
        ]
        found: list[int] = []
        tokens, count = 0, len(places)
        ends = [start for start, _ in plan[1:]]
        for (start, _), end, part in zip(plan, [*ends, len(text)], parts):
            while len(found) < count and places[len(found)] < end:
                inside = places[len(found)] - start
                found.append(tokens + (self._before(text[start:end], inside) if inside > 0 else 0))
            tokens += len(part) // 4
        found += [tokens] * (count - len(found))
        return np.frombuffer(b"".join(parts), np.int32), found

    def _before(self, word: str, position: int) -> int:
        """How many tokens of a word begin before a character of it."""
        offsets = self._backend.encode(word, add_special_tokens=False).offsets
        return bisect.bisect_left(offsets, (position,))

    def _keep(self, fresh: dict[str, bytes]) -> None:
        for kept in (self._known, self._whole):
            if len(kept) > _KEPT_WORDS:
                kept.clear()
        for word, ids in fresh.items():
            if len(word) <= _LONGEST_KEPT:
                standalone = _begins_well(word) and self._ends_well(word)
                (self._known if standalone else self._whole)[word] = ids


def _begins_well(unit: str) -> bool:
    body = unit.lstrip(" \t")
    return bool(body) and not body[0].isspace() and body[0] != "/"


def _places_of(mark: str, text: str) -> Iterator[int]:
    """Find where a mark begins in a text, also where it overlaps itself."""
    at = text.find(mark)
    while at >= 0:
        yield at
        at = text.find(mark, at + 1)


def _bytes(ids: Iterable[int]) -> bytes:
    return array.array("i", ids).tobytes()
