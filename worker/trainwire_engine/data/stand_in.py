"""The text that stands for a content while a template is recorded, and asks for an answer whatever it is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from trainwire_engine.data.recorder import Recorder, Untraceable

# The methods of a text: those that give a text, a fact, or several texts, and those that are not followed.
_TEXTS = "strip lstrip rstrip upper lower title capitalize replace removeprefix removesuffix"
_FACTS = "startswith endswith __contains__ find rfind count __len__ isdigit isalpha isspace isupper islower"
_LISTS = "split rsplit splitlines partition rpartition"
_LOST = (
    "__mod__ __rmod__ __mul__ __rmul__ __format__ __repr__ __hash__ __lt__ __le__ __gt__ __ge__ __reversed__ format"
    " format_map join translate maketrans encode index rindex center ljust rjust zfill expandtabs casefold swapcase"
    " isalnum isascii isdecimal isidentifier isnumeric isprintable istitle"
)


class StandIn(str):
    """A text with signs in it: whatever is asked of it is asked of the contents, by the recorder.

    Only code that looks at a text without asking it could be misled: the template's environment keeps such away.
    """

    _recorder: Recorder

    def __new__(cls, text: str, recorder: Recorder) -> StandIn:
        self = super().__new__(cls, text)
        self._recorder = recorder
        return self

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        return bool(ask(self, "__bool__", ()))

    def __add__(self, other: str) -> StandIn:
        return StandIn(str.__add__(self, other), self._recorder)

    def __radd__(self, other: str) -> StandIn:
        return StandIn(str.__add__(other, self), self._recorder)

    def __eq__(self, other: object) -> bool:
        return bool(ask(self, "__eq__", (other,))) if isinstance(other, str) else False

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __getitem__(self, place: Any) -> StandIn:
        if not isinstance(place, int | slice):
            raise TypeError(f"a text has no {place!r}")
        result: StandIn = ask(self, "__getitem__", (place,))
        return result

    def __iter__(self) -> Iterator[str]:
        # Templates ask whether a content is iterable; that alone is no question about it.
        return _refuse_items()


def _refuse_items() -> Iterator[str]:
    raise Untraceable("iteration")
    yield


def plain(text: str) -> str:
    """The text with its signs, as an ordinary one."""
    return str.__getitem__(text, slice(None)) if isinstance(text, StandIn) else text


def ask(text: StandIn, name: str, args: tuple[Any, ...]) -> Any:
    """Ask the contents: a text comes back as a stand-in, and so do the entries of a list. Raises Untraceable."""
    if not all(is_plain(arg) for arg in args):
        raise Untraceable(name)
    recorder = text._recorder
    answer = recorder.ask(plain(text), name, args)
    if isinstance(answer, str):
        return StandIn(answer, recorder)
    return [StandIn(part, recorder) for part in answer] if isinstance(answer, list) else answer


def is_plain(value: Any) -> bool:
    """Whether a value surely holds no stand-in: a number, an ordinary text, or a collection of those."""
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or type(value) in (str, int, float, bool, slice)


def joined(pieces: Iterable[Any]) -> str:
    """Join texts to one, which is a stand-in if one of them is."""
    pieces = list(pieces)
    text = "".join(pieces)
    return next((StandIn(text, piece._recorder) for piece in pieces if isinstance(piece, StandIn)), text)


def _asked(name: str) -> Callable[..., Any]:
    def method(self: StandIn, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            raise Untraceable(name)
        return ask(self, name, args)

    return method


def _lost(name: str) -> Callable[..., Any]:
    def method(self: StandIn, *args: Any, **kwargs: Any) -> NoReturn:
        raise Untraceable(name)

    return method


for _name in f"{_TEXTS} {_FACTS} {_LISTS}".split():
    setattr(StandIn, _name, _asked(_name))
for _name in _LOST.split():
    setattr(StandIn, _name, _lost(_name))
