"""Encodes text word by word with a memory of words already seen, for tokenizers where that changes nothing.

A text is cut only where no token can reach over the cut: next to an added token, before a space between two
characters that are no spaces, and behind a newline. Whether that holds is read off the tokenizer: each alternative
of its pre-tokenizer's pattern must be one of those below, none of which matches a space behind another character or
goes on behind a newline (but with a slash); without a pattern, the vocabulary itself must have no such token.
Everything else is left to the tokenizer, as every word is when it is seen for the first time.
"""

from __future__ import annotations

import array
import bisect
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_KEPT_WORDS = 250_000
_LONGEST_KEPT = 64

_NEWLINES_FIRST = r"\s*[\r\n]+"
_ALTERNATIVES = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    *(r"'s", r"'t", r"'re", r"'ve", r"'m", r"'ll", r"'d"),
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"\p{N}",
    r"\p{N}{1,3}",
    r" ?\p{L}+",
    r" ?\p{N}+",
    r" ?[^\s\p{L}\p{N}]+",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r" ?[\p{P}\p{S}]+[\r\n]*",
    _NEWLINES_FIRST,
    r"\s+(?!\S)",
    r"\s+",
}
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class _Rules:
    """Where a tokenizer's text may be cut.

    `newline_runs`: also behind several newlines, not only behind a single one that follows no space.
    `not_after`: characters behind which a space is no place to cut. `nfc`: the text has to be in this form.
    """

    newline_runs: bool
    not_after: str = ""
    nfc: bool = False


_Items = list[bytes | str]
"""Encoded words, and words that are still to be encoded."""


class WordEncoder:
    """Encodes batches of texts exactly as `backend` does, several times faster where words repeat."""

    def __init__(self, backend: Any, rules: _Rules) -> None:
        self._backend = backend
        self._rules = rules
        tokens = backend.get_added_tokens_decoder()
        self._marks = {token.content: _bytes([index]) for index, token in tokens.items()}
        raw = [token.content for token in tokens.values() if not token.normalized]
        normalized = [token.content for token in tokens.values() if token.normalized]
        # The tokenizer looks for added tokens twice, and so does this.
        self._splitters = [re.compile(f"({any_of(texts)})") for texts in (raw, normalized) if texts]
        self._known: dict[str, bytes] = {}
        self._whole: dict[str, bytes] = {}

    @classmethod
    def of(cls, backend: Any) -> WordEncoder | None:
        """Make one for a tokenizer; None where it is not known that its text may be cut."""
        added = backend.get_added_tokens_decoder().values()
        if any(token.lstrip or token.rstrip or token.single_word or not token.content for token in added):
            return None
        rules = _rules(backend)
        return None if rules is None else cls(backend, rules)

    def __call__(self, texts: Sequence[str], places: Sequence[Sequence[int]]) -> list[tuple[np.ndarray, list[int]]]:
        """Encode texts: for each its ids, int32, and for each of its places the first token that begins there or later.

        Places are positions of characters, in order.
        """
        plans = [self._plan(text, cuts) for text, cuts in zip(texts, places)]
        missing = list(dict.fromkeys(i for plan in plans for _, items in plan for i in items if type(i) is str))
        encodings = self._backend.encode_batch_fast(missing, add_special_tokens=False)
        fresh = {word: _bytes(encoding.ids) for word, encoding in zip(missing, encodings)}
        results = [self._joined(text, plan, cuts, fresh) for text, plan, cuts in zip(texts, plans, places)]
        self._keep(fresh)
        return results

    def _plan(self, text: str, cuts: Sequence[int]) -> list[tuple[int, _Items]]:
        """Cut a text into parts, so that a place lies between two parts, or inside of one that is a single word."""
        if "\0" in text or (self._rules.nfc and not text.isascii() and not unicodedata.is_normalized("NFC", text)):
            return [(0, [text])]
        plan: list[tuple[int, _Items]] = []
        at, cut = 0, 0
        for index, part in enumerate(self._split(text)):
            if not part:
                continue
            start, at = at, at + len(part)
            while cut < len(cuts) and cuts[cut] <= start:
                cut += 1
            if index & 1:
                plan.append((start, [self._marks[part]]))
            elif cut < len(cuts) and cuts[cut] < at:
                plan += self._cut_part(part, start, cuts[cut:])
            else:
                plan.append((start, self._items(self._units(part))))
        return plan

    def _cut_part(self, part: str, start: int, places: Sequence[int]) -> list[tuple[int, _Items]]:
        """Cut plain text at the places inside it; word by word if one of them is within a word."""
        units = self._units(part)
        plan: list[tuple[int, _Items]] = []
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

    def _word_by_word(self, units: Sequence[str], at: int) -> list[tuple[int, _Items]]:
        plan: list[tuple[int, _Items]] = []
        index = 0
        while index < len(units):
            end = self._word_end(units, index)
            word = "".join(units[index:end])
            plan.append((at, [self._seen(word)]))
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

    def _units(self, part: str) -> list[str]:
        """Cut before each space and behind each run of newlines; an empty unit stands where both meet."""
        units = part.replace(" ", "\0 ").replace("\n", "\n\0").replace("\0\n", "\n").split("\0")
        if not units[-1]:
            units.pop()
        if not units[0]:
            del units[0]
        return units

    def _items(self, units: list[str]) -> _Items:
        """Look units up; those not known are joined with their neighbours where no cut is allowed."""
        ids: list[bytes | None] = list(map(self._known.get, units))
        if None not in ids:
            return ids  # type: ignore[return-value]
        items: _Items = []
        done = 0
        for index in [index for index, found in enumerate(ids) if found is None]:
            if index < done:
                continue
            start, end = index, self._word_end(units, index)
            while start > done and not self._may_cut(units[start - 1], units[start]):
                start -= 1
            items += ids[done:start]  # type: ignore[arg-type]
            if word := "".join(units[start:end]):
                items.append(self._seen(word))
            done = end
        return items + ids[done:]  # type: ignore[operator]

    def _seen(self, word: str) -> bytes | str:
        return self._known.get(word) or self._whole.get(word) or word

    def _word_end(self, units: Sequence[str], index: int) -> int:
        """Where the word that holds a unit ends."""
        index += 1
        while index < len(units) and not self._may_cut(units[index - 1], units[index]):
            index += 1
        return index

    def _may_cut(self, before: str, after: str) -> bool:
        if not before or not after:
            return False
        behind_newline = before[-1] == "\n"
        return (after[0] == " ") != behind_newline and self._ends_well(before) and _begins_well(after)

    def _ends_well(self, unit: str) -> bool:
        last = unit[-1]
        if last != "\n":
            return not last.isspace() and last not in self._rules.not_after
        return self._rules.newline_runs or (len(unit) > 1 and not unit[-2].isspace())

    def _joined(
        self, text: str, plan: list[tuple[int, _Items]], places: Sequence[int], fresh: dict[str, bytes]
    ) -> tuple[np.ndarray, list[int]]:
        parts = [b"".join([fresh[i] if type(i) is str else i for i in items]) for _, items in plan]  # type: ignore
        found: list[int] = []
        tokens = 0
        for index, (start, _) in enumerate(plan):
            end = plan[index + 1][0] if index + 1 < len(plan) else len(text)
            while len(found) < len(places) and places[len(found)] < end:
                inside = places[len(found)] - start
                found.append(tokens + (self._before(text[start:end], inside) if inside > 0 else 0))
            tokens += len(parts[index]) // 4
        found += [tokens] * (len(places) - len(found))
        return np.frombuffer(b"".join(parts), np.int32), found

    def _before(self, unit: str, position: int) -> int:
        """How many tokens of a unit begin before a character of it."""
        offsets = self._backend.encode(unit, add_special_tokens=False).offsets
        return bisect.bisect_left(offsets, (position,))

    def _keep(self, fresh: dict[str, bytes]) -> None:
        for kept in (self._known, self._whole):
            if len(kept) > _KEPT_WORDS:
                kept.clear()
        for unit, ids in fresh.items():
            if len(unit) > _LONGEST_KEPT:
                continue
            if _begins_well(unit) and self._ends_well(unit):
                self._known[unit] = ids
            else:
                self._whole[unit] = ids


def _begins_well(unit: str) -> bool:
    first = unit[0]
    return len(unit) > 1 and not unit[1].isspace() if first == " " else not first.isspace() and first != "/"


def _bytes(ids: Iterable[int]) -> bytes:
    return array.array("i", ids).tobytes()


def any_of(texts: Iterable[str]) -> str:
    """Write a pattern that matches the longest of some texts, as a tree of their beginnings."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for sign in text:
            node = node.setdefault(sign, {})
        node[""] = {}

    def written(node: dict[str, Any]) -> str:
        branches = [re.escape(sign) + written(below) for sign, below in node.items() if sign]
        if not branches:
            return ""
        body = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
        return body + "?" if "" in node else body

    return written(tree)


def _rules(backend: Any) -> _Rules | None:
    model = backend.model
    plain = model.dropout is None and not model.continuing_subword_prefix and not model.end_of_word_suffix
    if type(model).__name__ != "BPE" or not plain or (model.unk_token and not model.byte_fallback):
        return None
    normalizer, splits = _state(backend.normalizer), _state(backend.pre_tokenizer)
    if normalizer == {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
        return _rules_of_vocabulary(backend.get_vocab()) if splits == _NO_SPLIT else None
    if normalizer not in (None, {"type": "NFC"}, {"type": "Sequence", "normalizers": []}):
        return None
    alternatives = _alternatives_of(splits)
    if alternatives is None or not all(a in _ALTERNATIVES for a in alternatives):
        return None
    rest = r"\s+(?!\S)"
    runs = _NEWLINES_FIRST in alternatives and alternatives.index(_NEWLINES_FIRST) < alternatives.index(rest)
    return _Rules(newline_runs=runs, nfc=normalizer == {"type": "NFC"})


# There are no spaces any more when it comes to split.
_NO_SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}


def _rules_of_vocabulary(vocabulary: Iterable[str]) -> _Rules | None:
    """The rules of a tokenizer that merges over whole texts: no token may reach over a cut."""
    not_after = {"▁"}  # it stands for a space when it is in the text itself
    for token in vocabulary:
        if re.search(r"\n[^\n▁]", token):
            return None
        not_after.update(re.findall(r"([^▁\s])(?=▁)", token))
    return _Rules(newline_runs=True, not_after="".join(not_after)) if len(not_after) <= 8 else None


def _alternatives_of(pre_tokenizer: Any) -> list[str] | None:
    """All alternatives of a byte-level pre-tokenizer's patterns, in order; None for other kinds."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer]) if pre_tokenizer else []
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    found: list[str] = []
    for step in steps:
        if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            pattern = step["pattern"].get("Regex")
            if pattern is None:
                return None
            found += _top_level(pattern.replace("\r", r"\r").replace("\n", r"\n"))
        elif step["type"] == "ByteLevel":
            found += _top_level(_GPT2) if step["use_regex"] else []
        elif step["type"] != "Digits":
            return None
    return found if r"\s+(?!\S)" in found else None


def _top_level(pattern: str) -> list[str]:
    """Cut a pattern at its outermost bars."""
    found, depth, brackets, start = [], 0, False, 0
    skip = False
    for index, sign in enumerate(pattern):
        if skip:
            skip = False
        elif sign == "\\":
            skip = True
        elif brackets:
            brackets = sign != "]"
        elif sign == "[":
            brackets = True
        elif sign == "|" and not depth:
            found.append(pattern[start:index])
            start = index + 1
        else:
            depth += (sign == "(") - (sign == ")")
    return [*found, pattern[start:]]


def _state(component: Any) -> Any:
    return None if component is None else json.loads(component.__getstate__())
