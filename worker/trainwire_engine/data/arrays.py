"""Finds the elements of a JSON array in a stream, one after the other."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import BinaryIO

from trainwire_engine.data.problems import file_invalid

_BLOCK = 1 << 20
_SPACE = " \t\r\n"


class _Buffer:
    """A window on the text of a stream that knows its line."""

    def __init__(self, name: str, stream: BinaryIO) -> None:
        self.text = ""
        self.at = 0
        self.line = 1
        self.ended = False
        self._name = name
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def grow(self) -> None:
        """Read on; a window that was too small doubles."""
        data = self._stream.read(max(_BLOCK, len(self.text) - self.at))
        self.ended = not data
        try:
            more = self._decoder.decode(data, final=self.ended)
        except UnicodeDecodeError as error:
            line = self.line + self.text.count("\n", self.at) + error.object.count(b"\n", 0, error.start)
            reason = f"the text is not UTF-8 ({error.reason})"
            raise file_invalid(self._name, line, reason, "Store the file as UTF-8.") from None
        self.text, self.at = self.text[self.at :] + more, 0

    def next_sign(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in _SPACE:
                self.line += self.text[self.at] == "\n"
                self.at += 1
            if self.at < len(self.text):
                return self.text[self.at]
            if self.ended:
                return ""
            self.grow()


def array_elements(name: str, stream: BinaryIO, limit: int) -> Iterator[tuple[int, bytes]]:
    """Give the elements of an array, each as the JSON text it has, with its line.

    An element has at most `limit` bytes. Raises DatasetInvalid.
    """
    buffer = _Buffer(name, stream)
    if buffer.next_sign() != "[":
        if not buffer.text.strip():
            return
        hint = "Name a file with one row a line .jsonl, or write all rows in one array: [row, row]."
        raise file_invalid(name, buffer.line, "a .json file is one array of rows, and this one begins otherwise", hint)
    buffer.at += 1
    count = 0
    while (sign := buffer.next_sign()) != "]":
        if count:
            if sign != ",":
                raise file_invalid(name, buffer.line, "the array ends early, or a comma is missing between rows", None)
            buffer.at += 1
            if buffer.next_sign() == "]":
                raise file_invalid(name, buffer.line, "a comma follows the last row", "Take the comma away.")
        count += 1
        end = _element_end(name, buffer, limit)
        line, text = buffer.line, buffer.text[buffer.at : end]
        buffer.line += text.count("\n")
        buffer.at = end
        yield line, text.encode("utf-8", "surrogatepass")
    buffer.at += 1
    if buffer.next_sign():
        raise file_invalid(name, buffer.line, "there is more behind the end of the array", None)


def _element_end(name: str, buffer: _Buffer, limit: int) -> int:
    decoder = json.JSONDecoder()
    while True:
        try:
            _, end = decoder.raw_decode(buffer.text, buffer.at)
            # A number at the end of the window may go on behind it.
            if end < len(buffer.text) or buffer.ended:
                return end
        except json.JSONDecodeError as error:
            if buffer.ended:
                line = buffer.line + buffer.text.count("\n", buffer.at, error.pos)
                raise file_invalid(name, line, f"this is not JSON: {error.msg}", None) from None
        except RecursionError:
            raise file_invalid(name, buffer.line, "the row is nested too deeply", None) from None
        if len(buffer.text) - buffer.at > limit:
            hint = "Write the rows one a line into a .jsonl file: it can say which one is broken."
            raise file_invalid(name, buffer.line, "a row is larger than 64 MB, or is not JSON", hint)
        buffer.grow()
