"""Passes that the host hands over once for each shape: recorded the first time, played back from then on.

A pass with adapters is some three thousand kernels. The host needs 70 to 100 ms to hand them to the card one by one,
which computes 9,000 tokens meanwhile; to play a recording takes it two or three. A recording is the graphs that MLX
launched (`graphs`), in memory that nobody else uses (`arena`). What changes from pass to pass is copied to where the
recording reads it, and the sums are added to totals at a fixed place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

import mlx.core as mx
import numpy as np

from trainwire_engine.cuda import arena, graphs, kernels, tensors
from trainwire_engine.cuda.graphs import Graph, GraphFailed
from trainwire_engine.cuda.many import Arrays

Inputs = tuple[np.ndarray, ...]
Sums = tuple[tuple[mx.array, mx.array], Arrays]
Shapes = tuple[tuple[int, ...], ...]
Trace = Callable[[Arrays, tuple[mx.array, ...], Arrays], list[mx.array]]
"""Makes a pass over inputs with weights, and adds its sums to totals; gives what must be evaluated for that."""

_DTYPES = {"int32": mx.int32, "uint32": mx.uint32, "float32": mx.float32}

LOSS, CORRECT = "/loss", "/correct"
"""Names of the two sums among the gradients'."""
_DIFFERENCE = 1e-2
"""Share of a gradient's norm by which two passes over the same rows may differ: attention adds up in any order."""

_FRESH_STARTS = 3
"""Times that all recordings are given up to make room for another."""

_rehearsals: list[threading.Thread] = []


class RecordingFailed(Exception):
    """What a recording cannot do, or did wrong; passes can be made without."""


class NoRoom(RecordingFailed):
    """There is not enough memory for all recordings; for fewer there may be."""


@dataclass
class _Recording:
    graphs: list[Graph]
    inputs: mx.array

    def play(self, inputs: Inputs) -> None:
        """Make the pass over other inputs; the host goes on at once."""
        mx.async_eval(tensors.put({"": self.inputs}, {"": _one(inputs)}))
        self.repeat()

    def repeat(self) -> None:
        for graph in self.graphs:
            graph.launch()


class Recordings:
    """Sums of the passes of an update, by recordings.

    `params`, and the gradients' sums, may be joined arrays, of which `split` gives the weights as views. `most` bytes
    may be kept from everybody else. What the passes read besides weights and inputs must stay where it is.
    `largest`, if given, are inputs of the shape that needs most memory. It is recorded before all others, which find
    room in what it took; the other way round each larger one would take its own.
    """

    def __init__(self, trace: Trace, params: Arrays, split: Callable[[Arrays], Arrays], most: int) -> None:
        self._trace = trace
        self._most = most
        self._params = tensors.copied(params)
        sums = {name: mx.zeros(param.shape) for name, param in params.items()}
        scalars = {LOSS: mx.zeros(()), CORRECT: mx.zeros(())}
        self._totals: Arrays = {**sums, **scalars}
        self._weights = split(self._params)
        self._sums = {**split(sums), **scalars}
        mx.eval(self._params, self._totals, self._weights, self._sums)
        self._arena = arena.Arena()
        self._recordings: dict[Shapes, _Recording] = {}
        self._marks: list[mx.array] = []
        self._proved = False
        self._fresh_starts = _FRESH_STARTS
        self.largest: Inputs | None = None

    def sums(self, params: Arrays, passes: Sequence[Inputs], meanwhile: Callable[[], None]) -> Sums:
        """Give ((loss sum, correct), gradient sums) of passes, lazy; `meanwhile` is called once they are under way.

        Raises RecordingFailed; nothing is changed then, and no recording may be used any more.
        """
        while True:
            try:
                return self._make(params, passes, meanwhile)
            except NoRoom:
                if not self._recordings or not self._fresh_starts:
                    raise
                self._fresh_starts -= 1
                self.forget()
            except GraphFailed as error:
                raise RecordingFailed(str(error)) from None

    def begin(self, params: Arrays, passes: Sequence[Inputs]) -> bool:
        """Begin passes whose sums `made` gives, unless one of them has no recording; tells whether they are begun.

        Whatever else is asked for before gives them up.
        """
        recorded = [self._recordings.get(_shapes(inputs)) for inputs in passes]
        if not self._proved or not all(recorded):
            return False
        try:
            mx.async_eval(tensors.put(self._params, params), tensors.clear(self._totals))
            for recording, inputs in zip(recorded, passes):
                recording.play(inputs)  # type: ignore[union-attr]
        except GraphFailed:
            # It will be told when they are asked for.
            return False
        return True

    def made(self) -> Sums:
        """Give ((loss sum, correct), gradient sums) of the passes that were begun or made last, lazy."""
        totals = tensors.copied(self._totals)
        mx.async_eval(totals)
        return (totals.pop(LOSS), totals.pop(CORRECT)), totals

    def _make(self, params: Arrays, passes: Sequence[Inputs], meanwhile: Callable[[], None]) -> Sums:
        if self.largest is not None and not self._recordings:
            self._record(_shapes(self.largest), self.largest)
        mx.async_eval(tensors.put(self._params, params), tensors.clear(self._totals))
        for number, inputs in enumerate(passes):
            shapes = _shapes(inputs)
            # What is compared must be made by MLX, and of rows.
            if shapes in self._recordings and self._proved:
                self._recordings[shapes].play(inputs)
            else:
                self._record(shapes, inputs)
            if number == 0:
                if not self._proved:
                    self._prove(self._recordings[shapes])
                meanwhile()
        return self.made()

    def forget(self) -> None:
        """Give the memory of all recordings back; passes are recorded anew."""
        mx.synchronize()
        self._recordings.clear()
        self._marks.clear()
        self._arena = arena.Arena()
        mx.clear_cache()

    def _record(self, shapes: Shapes, inputs: Inputs) -> None:
        """Make a pass and keep it."""
        held = tensors.copied({"": _one(inputs)})[""]
        views = _apart(held, inputs)
        mx.eval(held, views)
        # What a trace keeps is allocated before MLX gets the arena.
        marks = self._trace(self._weights, views, self._sums)
        before = self._arena.buffers
        try:
            with self._arena.lent(), graphs.watched() as found:
                mx.eval(marks)
        except RuntimeError as error:
            raise NoRoom(str(error)) from None
        if not found:
            raise RecordingFailed("MLX launched no graph")
        if not self._arena.whole_after(before):
            self._recordings.clear()
        if self._arena.size > self._most:
            raise NoRoom(f"recordings take {self._arena.size / 1e9:.1f} GB")
        self._marks += marks
        self._recordings[shapes] = _Recording(found, held)

    def _prove(self, recording: _Recording) -> None:
        """Compare what the first recording does with what was recorded, once."""
        expected = tensors.copied(self._totals)
        mx.eval(expected)
        mx.eval(tensors.clear(self._totals))
        recording.repeat()
        norm = _norm(expected)
        if not isfinite(norm):
            # Recorded anew, as playing one back says nothing about what was recorded.
            self._recordings.clear()
            return
        apart = {name: expected[name] - total for name, total in tensors.copied(self._totals).items()}
        difference = _norm(apart)
        if not difference <= _DIFFERENCE * norm:
            raise RecordingFailed(f"a recording gave sums that are {difference:.3g} of {norm:.3g} apart")
        self._proved = True


def _shapes(inputs: Inputs) -> Shapes:
    return tuple(array.shape for array in inputs)


def _one(inputs: Inputs) -> mx.array:
    """All inputs in one array, each from a multiple of 16 bytes on: MLX takes long for an array from the host."""
    words = [np.pad(array.reshape(-1).view(np.uint32), (0, -array.size % 4)) for array in inputs]
    return mx.array(np.concatenate(words))


def _apart(held: mx.array, inputs: Inputs) -> tuple[mx.array, ...]:
    """The inputs in one array again, each with its type and shape."""
    views, start = [], 0
    for array in inputs:
        end = start + array.size
        views.append(held[start:end].view(_DTYPES[array.dtype.name]).reshape(array.shape))
        start = end + -array.size % 4
    return tuple(views)


def usable(params: Arrays) -> bool:
    """Tell whether passes for these weights can be recorded here."""
    fitting = tensors.usable(params) and all(param.dtype == mx.float32 for param in params.values())
    # It makes and drops arrays, while MLX's cache of buffers is looked at.
    while _rehearsals:
        _rehearsals.pop().join()
    return fitting and kernels.available() and graphs.usable() and arena.usable()


def rehearse(weights: int, leaf: mx.Dtype) -> None:
    """Compile, in a thread of its own, what the first update of so many weights will launch: a second's work.

    What a launch computes is never asked for here; only its source counts.
    """

    def launch() -> None:
        masters = {str(number): mx.zeros(1) for number in range(weights)}
        leaves = {name: mx.zeros(1, leaf) for name in masters}
        tensors.cast(masters, dict.fromkeys(masters, leaf))
        tensors.add_to(masters, leaves)
        joined = {"weights": mx.zeros(1)}
        totals = {**joined, LOSS: mx.zeros(1), CORRECT: mx.zeros(1)}
        tensors.add_to({LOSS: mx.zeros(1), CORRECT: mx.zeros(1)}, totals)
        for arrays in (joined, totals):
            tensors.copied(arrays)
        tensors.put(joined, joined)
        tensors.clear(totals)
        tensors.square_sum(joined)
        tensors.square_sum(totals)
        arena.compile_claims()

    _rehearsals.append(threading.Thread(target=launch, name="rehearsal", daemon=True))
    _rehearsals[-1].start()


def _norm(arrays: Arrays) -> float:
    return float(mx.sqrt(tensors.square_sum(arrays)).item())  # type: ignore[arg-type]
