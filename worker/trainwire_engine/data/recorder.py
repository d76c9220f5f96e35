"""Answers a template's questions about contents that stand behind signs, and writes every question down.

Two conversations of the same structure whose contents give the same answers are rendered alike, so that the text of
the second follows from the first without running the template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

# Letters and digits alone: no filter, escape or strip of a template changes them.
SIGN = re.compile(r"Qz([0-9]+)zQw7")


class Untraceable(Exception):
    """The template does something with a content that is not followed."""


def sign_text(number: int) -> str:
    """What stands for the content of a number."""
    return f"Qz{number}zQw7"


Step = tuple[str, str, tuple[Any, ...], Any]
"""A text with signs, a method of it, the arguments; and the answer, or a Pick for a new sign."""


Origin = tuple[int, tuple[tuple[str, str, tuple[Any, ...], int], ...]]
"""A content, and which entries of which lists that it was cut into."""


class Pick:
    """The result is a new content: all of it, or one entry of a list."""

    def __init__(self, entry: int | None) -> None:
        self.entry = entry


class Recorder:
    """Knows what each sign stands for, and keeps every question in `steps`, in order.

    `owners` and `kinds` say for each sign whose message it is from (None: from several) and what it was there;
    `roots` say which content it comes from, and `origins` which parts of which contents.
    """

    def __init__(self, contents: Sequence[str], owners: Sequence[int], kinds: Sequence[str]) -> None:
        self.values = list(contents)
        self.owners: list[int | None] = list(owners)
        self.kinds = list(kinds)
        self.roots = list(range(len(contents)))
        self.origins: list[frozenset[Origin]] = [frozenset([(number, ())]) for number in self.roots]
        self.steps: list[Step] = []
        self._asked: dict[Any, Any] = {}

    def ask(self, text: str, name: str, args: tuple[Any, ...]) -> Any:
        """Answer as the contents would, and keep the question: a text, or texts, come back with signs of their own.

        Raises Untraceable where the contents have no answer, as for an index behind their end.
        """
        key = (text, name, *map(repr, args))
        if key not in self._asked:
            self._asked[key] = self._answer(text, name, args)
        return self._asked[key]

    def _answer(self, text: str, name: str, args: tuple[Any, ...]) -> Any:
        try:
            answer = apply(value_of(text, self.values), name, args)
        except (TypeError, ValueError, LookupError):
            raise Untraceable(name) from None
        if isinstance(answer, str):
            return self._derived(text, name, args, None, answer)
        if isinstance(answer, list | tuple):
            self.steps.append((text, name, args, len(answer)))
            return [self._derived(text, name, args, at, part) for at, part in enumerate(answer)]
        self.steps.append((text, name, args, answer))
        return answer

    def _derived(self, text: str, name: str, args: tuple[Any, ...], entry: int | None, value: str) -> str:
        """Give a new sign to a text that was made of others."""
        numbers = [int(n) for n in SIGN.findall(text)]
        owners = {self.owners[n] for n in numbers}
        self.steps.append((text, name, args, Pick(entry)))
        self.values.append(value)
        self.owners.append(owners.pop() if len(owners) == 1 else None)
        single = SIGN.fullmatch(text)
        self.kinds.append(self.kinds[numbers[0]] if single else "mixed")
        self.roots.append(self.roots[numbers[0]] if single else len(self.values) - 1)
        part = () if entry is None else ((text, name, args, entry),)
        self.origins.append(frozenset((root, path + part) for n in numbers for root, path in self.origins[n]))
        return sign_text(len(self.values) - 1)


def overlap(one: frozenset[Origin], other: frozenset[Origin]) -> bool:
    """Whether two texts may hold the same part of a content: they do not if both are other entries of one list."""
    return any(
        root == its and not any(a[:-1] == b[:-1] and a[-1] != b[-1] for a, b in zip(path, its_path))
        for root, path in one
        for its, its_path in other
    )


def value_of(text: str, values: Sequence[str]) -> str:
    """Put the contents in the place of their signs."""
    return SIGN.sub(lambda sign: values[int(sign[1])], text)


def apply(value: str, name: str, args: tuple[Any, ...]) -> Any:
    """Call a method of a text."""
    if name == "json":
        return json.dumps(value, ensure_ascii=args[0])[1:-1]
    if name == "__bool__":
        return bool(value)
    return getattr(value, name)(*args)
