"""Finds out where the text of a tokenizer can be cut so that its pieces encode as the whole does.

The places are: before a run of spaces that follows another character, and behind a newline that is not followed by
a slash. That no token reaches over them is read off the tokenizer: each alternative of its pre-tokenizer's pattern
must be one of those below, none of which matches a space behind another character, or goes on behind a newline but
with a slash. Without a pattern the vocabulary itself must have no such token. Many patterns also take digits out one
by one, or in groups of three: then a text may be cut around them too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

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
_MAY_HOLD_A_DIGIT = {r"\p{N}": 1, r"\p{N}{1,3}": 3, r" ?\p{N}+": 0, r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+": 0}
"""Alternatives that match digits, with the size of the groups that they cut them into; 0 if into none."""
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class CutRules:
    """Where a tokenizer's text may be cut.

    `newline_runs`: also behind several newlines, not only behind a single one that follows no space.
    `not_after`: characters behind which a space is no place to cut. `nfc`: the text has to be in this form.
    `digits`: also around groups of so many digits, counted from the left of each number; 0 for nowhere there.
    """

    newline_runs: bool
    not_after: str = ""
    nfc: bool = False
    digits: int = 0


def cut_rules(backend: Any) -> CutRules | None:
    """Read the rules off a tokenizer; None where it is not known that its text can be cut."""
    model = backend.model
    if type(model).__name__ != "BPE" or model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    if model.unk_token and not model.byte_fallback:
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
    # At a digit the first of these matches.
    digits = next((_MAY_HOLD_A_DIGIT[a] for a in alternatives if a in _MAY_HOLD_A_DIGIT), 0)
    return CutRules(newline_runs=runs, nfc=normalizer == {"type": "NFC"}, digits=digits)


# There are no spaces any more when it comes to split.
_NO_SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}


def _rules_of_vocabulary(vocabulary: Iterable[str]) -> CutRules | None:
    """The rules of a tokenizer that merges over whole texts: no token may reach over a cut."""
    not_after = {"▁"}  # it stands for a space when it is in the text itself
    for token in vocabulary:
        if "\n" in token and re.search(r"\n[^\n▁]", token):
            return None
        if "▁" in token[1:]:
            not_after.update(re.findall(r"([^▁\s])(?=▁)", token))
    return CutRules(newline_runs=True, not_after="".join(not_after)) if len(not_after) <= 8 else None


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
        elif step["type"] == "Digits":
            found += [r"\p{N}"] if step["individual_digits"] else [r" ?\p{N}+"]
        else:
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
