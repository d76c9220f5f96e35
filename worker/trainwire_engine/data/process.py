"""Encodes chunks of rows in processes of their own, so that all cores parse, render and tokenize.

A process gets frames on its standard input and answers each on its standard output; it ends when its input does,
and so with the process that started it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import struct
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import IO, Any

import msgspec
import numpy as np

from trainwire_engine.data.encode import Encoded, Encoder
from trainwire_engine.data.files import RawRow
from trainwire_engine.data.options import Options
from trainwire_engine.data.rows import SHAPES, Shape
from trainwire_engine.tokenizer import Tokenizer
from trainwire_protocol.errors import Internal, TrainwireError, from_code

_LENGTH = struct.Struct("<Q")
_COLLECTED_AFTER = 50_000


@dataclass(frozen=True)
class Chunk:
    """Rows of one source, by its number and name, that are encoded together."""

    source: int
    name: str
    shape: Shape
    rows: list[RawRow]


def encode_here(chunks: Iterable[Chunk], tokenizer: Tokenizer, options: Options) -> Generator[tuple[int, Encoded]]:
    """Encode chunks in this process, in order: with each the number of its source."""
    encoder = Encoder(tokenizer, options)
    for chunk in chunks:
        yield chunk.source, encoder(chunk.name, chunk.shape, chunk.rows)


def encode_apart(
    chunks: Iterable[Chunk], tokenizer: Tokenizer, options: Options, processes: int
) -> Generator[tuple[int, Encoded]]:
    """Encode chunks in that many processes; the results come in the order of the chunks."""
    helpers = [_Helper(tokenizer, options) for _ in range(processes)]
    idle: SimpleQueue[_Helper] = SimpleQueue()
    for helper in helpers:
        idle.put(helper)

    def encode(chunk: Chunk) -> Encoded:
        helper = idle.get()
        try:
            return helper.encode(chunk)
        finally:
            idle.put(helper)

    threads = ThreadPoolExecutor(processes)
    waiting: deque[tuple[int, Future[Encoded]]] = deque()
    try:
        for chunk in chunks:
            waiting.append((chunk.source, threads.submit(encode, chunk)))
            # Enough to keep every process busy; more would only fill the memory.
            if len(waiting) >= 2 * processes:
                source, future = waiting.popleft()
                yield source, future.result()
        while waiting:
            source, future = waiting.popleft()
            yield source, future.result()
    finally:
        for helper in helpers:
            helper.stop()
        threads.shutdown(cancel_futures=True)


class _Helper:
    """A process that encodes one chunk after the other."""

    def __init__(self, tokenizer: Tokenizer, options: Options) -> None:
        # One thread each: the processes are as many as the cores.
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONSAFEPATH": "1"}
        command = [sys.executable, "-m", __name__.rpartition(".")[0]]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._start = {"tokenizer": tokenizer.recipe, "options": options.as_dict()}

    def encode(self, chunk: Chunk) -> Encoded:
        to, back = self._process.stdin, self._process.stdout
        assert to is not None
        assert back is not None
        try:
            if self._start:
                _write(to, self._start)
                self._start = {}
            _write(to, [chunk.name, SHAPES.index(chunk.shape), [tuple(row) for row in chunk.rows]])
            answer = _read(back)
        except OSError:
            answer = None
        if answer is None:
            raise Internal(f"A process that tokenizes ended with status {self._process.wait()}.")
        if "error" in answer:
            code, message, hint, details = answer["error"]
            raise from_code(code, message, hint=hint, **details)
        tokens = np.frombuffer(answer.pop("tokens"), np.int32)
        notices, train_on = set(answer.pop("notices")), set(answer.pop("train_on"))
        return Encoded(tokens=[tokens], notices=notices, train_on=train_on, **answer)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                # What was not written yet is not wanted any more.
                with contextlib.suppress(OSError):
                    pipe.close()


def _write(pipe: IO[bytes], value: Any) -> None:
    data = msgspec.msgpack.encode(value)
    pipe.write(_LENGTH.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> Any:
    """Read a frame; None at the end of the pipe."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    length = _LENGTH.unpack(head)[0]
    data = pipe.read(length)
    return msgspec.msgpack.decode(data) if len(data) == length else None


def _answer(encoder: Encoder, name: str, shape: int, rows: list[Any]) -> dict[str, Any]:
    try:
        encoded = encoder(name, SHAPES[shape], [RawRow(line, data) for line, data in rows])
    except TrainwireError as error:
        return {"error": [error.code, error.message, error.hint, error.details]}
    except Exception as error:
        return {"error": ["internal", f"Tokenizing {name} failed: {error!r}.", None, {"trace": traceback.format_exc()}]}
    return {
        "tokens": b"".join(tokens.tobytes() for tokens in encoded.tokens),
        "lengths": encoded.lengths,
        "lines": encoded.lines,
        "rows_read": encoded.rows_read,
        "truncated": encoded.truncated,
        "dropped": encoded.dropped,
        "notices": list(encoded.notices),
        "train_on": list(encoded.train_on),
    }


def _move_away(fd: int, instead: int, mode: str) -> IO[bytes]:
    """Keep a standard stream for frames, and let whoever prints or reads use another descriptor instead of it."""
    kept = os.fdopen(os.dup(fd), mode)
    os.dup2(instead, fd)
    return kept


def serve() -> None:
    """Answer frames until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What a library prints or reads must not get between the frames.
    source, target = _move_away(0, os.open(os.devnull, os.O_RDONLY), "rb"), _move_away(1, 2, "wb")
    start = _read(source)
    if start is None:
        return
    encoder = Encoder(Tokenizer.from_recipe(start["tokenizer"]), Options(**start["options"]))
    # A chunk makes many objects, and none that only the collector could free: looking for such costs a tenth.
    gc.freeze()
    gc.set_threshold(_COLLECTED_AFTER)
    while (frame := _read(source)) is not None:
        _write(target, _answer(encoder, *frame))
