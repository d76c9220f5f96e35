"""One optimizer update from several micro-batches: gradients summed, divided once, clipped, guarded, applied."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from trainwire_engine import low_rank, memory, pieces
from trainwire_engine.adapters import set_dropout_keys
from trainwire_engine.batches import MicroBatch
from trainwire_engine.cuda import recordings, tensors
from trainwire_engine.cuda.recordings import CORRECT, LOSS, RecordingFailed, Recordings
from trainwire_engine.dropout import token_keys
from trainwire_engine.failures import with_room
from trainwire_engine.fastmath import on_cpu
from trainwire_engine.gradients import added, as_masters, whole_norm
from trainwire_engine.joined import layout
from trainwire_engine.lanes import Lanes, in_pieces, together
from trainwire_engine.loss import micro_batch_sums
from trainwire_engine.model import Arrays, Model
from trainwire_engine.optimizer import Optimizer
from trainwire_engine.passes import compiled, device_arrays, host_arrays
from trainwire_engine.ranks import Alone
from trainwire_engine.segments import apart

_AN_UPDATE = 6
"""Times the trained weights' bytes that an update with recordings takes: their own weights and sums, the gradients, the
new weights, and a new state of twice the size."""


@dataclass(frozen=True)
class UpdateResult:
    """What one update measured: `loss` in nats over `tokens` trained tokens, `correct` of them predicted.

    `grad_norm` is the norm before clipping. `skipped`: the loss or the norm was not finite, and weights, state
    and its count are as before. `not_recorded`: why passes are not recorded any more, from this update on.
    `room_made`: memory ran out, that of recorded passes was given back, and what had failed was done once more.
    """

    loss: float
    tokens: int
    correct: int
    grad_norm: float
    skipped: bool
    not_recorded: str = ""
    room_made: bool = False


@dataclass(frozen=True)
class _Begun:
    """Passes that are under way: of which micro-batches and update, and with which weights."""

    micro_batches: Sequence[MicroBatch]
    step: int
    params: Arrays

    def are(self, micro_batches: Sequence[MicroBatch], step: int, params: Arrays) -> bool:
        return micro_batches is self.micro_batches and step == self.step and params is self.params


class UpdateStep:
    """Make updates of a model; `state` is the optimizer's state and can be set for a resume.

    Two functions, compiled on GPUs: one is the forward and backward pass of a micro-batch (traced once per
    shape), one the rest of the update. Everything is summed over trained tokens and divided by their number at the end,
    so the split into micro-batches leaves loss, gradient and norm as they are. `meanwhile` is called in every update
    once its passes are under way, and may give the next update's micro-batches. Its thread waits for the device once,
    at the end, where one lane is in use. On a CUDA card passes are recorded, and those of the next update begun before
    this one is reported.
    """

    def __init__(self, model: Model, optimizer: Optimizer, config: Any, ranks: Alone | None = None) -> None:
        self.model = model
        self._ranks = ranks or Alone()
        self.optimizer = optimizer
        self._layout = layout(model.trainable, optimizer)
        self._params = self._layout.join(model.trainable)
        self._replaced = model.replaced
        self._state = optimizer.init(self._params)
        self._seed: int = config.seed
        self._smoothing: float = config.label_smoothing
        self._max_value: float | None = config.max_grad_value
        self._drops = any(layer.dropout for layer in model.adapter_layers)
        self._traced = False
        self._met: set[tuple[int, ...]] = set()
        self.lanes = Lanes(model.total_parameters)
        self.meanwhile: Callable[[], Sequence[MicroBatch] | None] = lambda: None
        self._following: Sequence[MicroBatch] | None = None
        self._begun: _Begun | None = None
        self._largest: MicroBatch | None = None
        self._not_recorded = ""
        self._room_made = False
        self._whole = True
        self._binding = threading.Lock()
        self._sums = compiled(self._trace_sums)
        self._recordings = self._new_recordings()
        # A dozen launches in all need no trace, and MLX compares the outputs of such launches pair by pair.
        few = optimizer.together(self._params)
        self._finish: Callable[..., Any] = self._trace_finish if few else compiled(self._trace_finish, fused=True)

    def __call__(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        step: int,
        learning_rate: float,
        max_grad_norm: float | None,
        more: bool = False,
    ) -> UpdateResult:
        """Make the update number `step` (which seeds dropout); 0, None or infinity do not clip. `more`: one follows."""
        model = self.model
        if self._replaced != model.replaced:
            self._params, self._replaced = self._layout.join(model.trainable), model.replaced
        own = with_room(lambda: self.sums(micro_batches, step), self._make_room) if micro_batches else None
        totals, tokens = self.reduce(own, micro_batches)
        del own
        limits = mx.array([tokens, learning_rate, max_grad_norm or float("inf")], mx.float32)
        inputs = [(self._params, self._state, totals)]
        del totals
        # The memory that recordings leave free has room for them beside their successors.
        kept = self._recordings is not None

        def finish() -> Any:
            params, state, ((loss, correct), grads) = inputs[0] if kept else inputs.pop()
            with pieces.noted(on_cpu()) as notes:
                params, state, measured = self._finish(params, state, grads, loss, correct, limits)
            del grads
            # Nothing else holds the old ones now, unless kept, so the new ones take their memory where they can.
            model.adopt(functools.partial(self._layout.split, params), traced=self._traced)
            self._params, self._state, self._traced = params, state, False
            self._whole = False
            pieces.compute(notes)
            if more:
                self._begin(step + 1, after=(params, state, measured))
            mx.eval(params, state, measured)
            self._whole = True
            return measured

        mean, guessed, norm, finite = with_room(finish, self._make_room).tolist()
        reason, self._not_recorded = self._not_recorded, ""
        room_made, self._room_made = self._room_made, False
        return UpdateResult(
            mean, tokens, round(guessed), norm, skipped=not finite, not_recorded=reason, room_made=room_made
        )

    @property
    def state(self) -> Arrays:
        """The optimizer's state by weights; setting it, and the model's weights, is a resume.

        Raises RuntimeError after an update that failed halfway: its weights are neither the old nor the new ones.
        """
        if not self._whole:
            raise RuntimeError("The last update was left halfway: there is nothing whole to save.")
        return self._layout.split_state(self._state)

    @state.setter
    def state(self, state: Arrays) -> None:
        self._state, self._whole = self._layout.join_state(state), True

    def reduce(self, own: Any, micro_batches: Sequence[MicroBatch]) -> tuple[Any, int]:
        """Add the sums of all ranks up; gives them with their trained tokens."""
        return self._ranks.reduce(own, self._params, micro_batches)

    def compiles(self, micro_batches: Sequence[MicroBatch]) -> bool:
        """Tell whether an update will trace or compile: the first one, and on a GPU one with a shape not met yet."""
        met = bool(self._met) and (on_cpu() or all(batch.shape in self._met for batch in micro_batches))
        self._met |= {batch.shape for batch in micro_batches}
        return not met

    def expect(self, largest: MicroBatch) -> None:
        """Say of what shape the largest passes will be: recorded first, they have room for all others."""
        self._largest = largest
        if self._recordings is not None:
            self._recordings.largest = self._inputs([largest], 0)[0]

    def sums(self, micro_batches: Sequence[MicroBatch], step: int) -> Any:
        """Give ((loss sum, correct), gradient sums), lazy: the passes of an update, without the rest of it."""
        begun, self._begun = self._begun, None
        if self._recordings is not None:
            if begun is not None and begun.are(micro_batches, step, self._params):
                self._look_ahead()
                return self._recordings.made()
            try:
                return self._recordings.sums(self._params, self._inputs(micro_batches, step), self._look_ahead)
            except RecordingFailed as failure:
                # What is under way computes in their memory.
                mx.synchronize()
                self._recordings, self._not_recorded = None, str(failure)
        batches, lane_of = self.lanes.spread(micro_batches)
        lanes = max(lane_of) + 1

        def passes(lane: int) -> Any:
            total: Any = None
            for batch in (batch for batch, of in zip(batches, lane_of) if of == lane):
                key = self.dropout_keys(batch, step)
                # The module holds one pass's weights at a time.
                with self._binding, pieces.noted(in_pieces(self.model.total_parameters, batch)) as notes:
                    sums = self._sums(self.model.trainable, device_arrays(batch), key)
                    total = added(total, sums) if total is not None else sums
                    del sums
                pieces.compute(notes, total[1])
                # Without a start here, the passes of all micro-batches would be alive at once.
                mx.async_eval(total)
            if lane == 0:
                self._look_ahead()
            if lanes > 1:
                # A stream belongs to its thread, and so does what has not been computed on it.
                mx.eval(total)
            return total

        totals, grads = functools.reduce(added, together(passes, lanes))
        return totals, self._layout.join(grads)

    def _begin(self, step: int, after: Any) -> None:
        """Begin the passes of the update that follows, with the weights of the one that is being made."""
        batches, self._following = self._following, None
        recordings = self._recordings
        if not batches or recordings is None:
            return
        mx.async_eval(after)
        if recordings.begin(self._params, self._inputs(batches, step)):
            self._begun = _Begun(batches, step, self._params)

    def _look_ahead(self) -> None:
        self._following = self.meanwhile()

    def _inputs(self, micro_batches: Sequence[MicroBatch], step: int) -> list[tuple[np.ndarray, ...]]:
        return [(*host_arrays(batch), self._keys(batch, step)) for batch in micro_batches]

    def dropout_keys(self, batch: MicroBatch, step: int) -> mx.array:
        """The keys of a micro-batch's tokens, from seed, update, row and place in the row; one key without dropout."""
        return mx.array(self._keys(batch, step))

    def _keys(self, batch: MicroBatch, step: int) -> np.ndarray:
        return token_keys(batch, self._seed, step) if self._drops else np.zeros((1, 1, 2), np.uint32)

    def uncompiled_sums(self, micro_batch: MicroBatch) -> Any:
        """Give the sums of one micro-batch, lazy and not compiled: their graph tells what a gradient keeps."""
        return self._trace_sums(self.model.trainable, device_arrays(micro_batch), self.dropout_keys(micro_batch, 1))

    def trace_anew(self) -> None:
        """Forget compiled passes, because the model's layers were changed."""
        self._sums = compiled(self._trace_sums)
        # The memory of the old ones first, once nothing computes in it.
        mx.synchronize()
        self._recordings = self._begun = None
        self._recordings = self._new_recordings()
        if self._largest is not None:
            self.expect(self._largest)

    def give_back(self) -> bool:
        """Give back the memory that is kept between updates, at the price of some time in the next ones.

        Tells whether memory is kept at all.
        """
        if self._recordings is None:
            return False
        self._recordings.forget()
        self._begun = None
        self._met.clear()
        return True

    def _make_room(self) -> bool:
        made = self.give_back()
        self._room_made |= made
        return made

    def _new_recordings(self) -> Recordings | None:
        if not recordings.usable(self._params):
            return None
        weights = sum(param.nbytes for param in self._params.values())
        most = min(memory.total_memory() // 2, memory.available() - _AN_UPDATE * weights)
        if most <= 0:
            self._not_recorded = f"beside {weights / 1e9:.1f} GB of weights and their update there is no room for that"
            return None
        return Recordings(compiled(self._trace_into), self._params, self._layout.split, most)

    def _trace_into(self, params: Arrays, inputs: tuple[mx.array, ...], into: Arrays) -> list[mx.array]:
        with low_rank.collecting(into) as collected:
            (loss, correct), grads = self._leaf_sums(params, inputs[:-1], inputs[-1])
        if collected.again:
            raise RecordingFailed(f"{min(collected.again)} has several gradients in a pass")
        more = {**grads, LOSS: loss, CORRECT: correct}
        rest = {name: total for name, total in into.items() if name not in collected.names}
        return [*collected.marks, *tensors.add_to(rest, more)]

    def _trace_sums(
        self, params: Arrays, batch: tuple[mx.array, ...], key: mx.array
    ) -> tuple[tuple[mx.array, mx.array], Arrays]:
        totals, grads = self._leaf_sums(params, batch, key)
        return totals, as_masters(grads, params)

    def _leaf_sums(
        self, params: Arrays, batch: tuple[mx.array, ...], key: mx.array
    ) -> tuple[tuple[mx.array, mx.array], Arrays]:
        self._traced = True
        self.model.train_mode(True)
        set_dropout_keys(self.model.adapter_layers, key)

        def sums(params: Arrays) -> tuple[mx.array, mx.array]:
            return micro_batch_sums(self.model, params, batch, smoothing=self._smoothing, gradient=True)

        # The gradient for a master is the one for its rounded leaf, in the master's dtype.
        with apart(*batch[5:]):
            made: tuple[tuple[mx.array, mx.array], Arrays] = mx.value_and_grad(sums)(self.model.leaves(params))
        return made

    def _trace_finish(
        self, params: Arrays, state: Arrays, grads: Arrays, loss: mx.array, correct: mx.array, limits: mx.array
    ) -> tuple[Arrays, Arrays, mx.array]:
        # Not limits[0]: MLX takes a single number with a gather, which costs CUDA's compiler three seconds.
        tokens, learning_rate, max_norm = (part.reshape(()) for part in mx.split(limits, 3))
        loss = loss / tokens
        norm = clipped_norm = whole_norm(grads) / tokens
        accept = mx.isfinite(norm) & mx.isfinite(loss)
        if self._max_value is not None:
            limit = self._max_value * tokens
            grads = {name: mx.clip(grad, -limit, limit) for name, grad in grads.items()}
            clipped_norm = whole_norm(grads) / tokens
        scale = mx.minimum(1.0, max_norm / (clipped_norm + 1e-6)) / tokens
        params, state = self.optimizer.apply(params, grads, state, learning_rate, scale=scale, accept=accept)
        return params, state, mx.stack([loss, correct, norm, accept.astype(mx.float32)])
