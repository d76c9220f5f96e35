"""Where the time of an update goes: updates made as always, but waited for and taken apart.

The passes and the rest of an update are timed where the update has them. What of the passes is the blocks' forward
half, the head and the blocks' backward half comes from making these parts once more by themselves, one micro-batch
after another, so a profiled update takes about three times as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from trainwire_engine import native
from trainwire_engine.batches import MicroBatch
from trainwire_engine.loss import before_head, head_sums
from trainwire_engine.model import Arrays, Model
from trainwire_engine.optimizer import Optimizer
from trainwire_engine.passes import compiled, device_arrays
from trainwire_engine.ranks import Alone
from trainwire_engine.segments import apart
from trainwire_engine.step import UpdateResult, UpdateStep
from trainwire_protocol.events import Level


class ProfiledStep(UpdateStep):
    """Makes updates as UpdateStep does and reports on the first `updates` after the first one, or as many as there are.

    `report` is called once, with the level, a code, a sentence and the figures: milliseconds of an update by part.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        config: Any,
        ranks: Alone | None = None,
        *,
        updates: int,
        report: Callable[[Level, str, str, dict[str, Any]], None],
    ) -> None:
        super().__init__(model, optimizer, config, ranks)
        self._updates = updates
        self._made = -1
        self._report = report
        self._left_at = 0.0
        self._spent = dict.fromkeys(("outside", "passes", "ranks", "finish", "forward", "head", "alone"), 0.0)
        self._tokens = 0
        self._forward = compiled(self._trace_forward)
        self._head = compiled(self._trace_head)

    @property
    def _measures(self) -> bool:
        return 0 <= self._made < self._updates

    def __call__(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        step: int,
        learning_rate: float,
        max_grad_norm: float | None,
        more: bool = False,
    ) -> UpdateResult:
        """Make an update; see UpdateStep. While it is measured nothing of the next one is begun."""
        started = time.perf_counter()
        inside = self._spent["passes"] + self._spent["ranks"]
        if self._measures:
            self._spent["outside"] += started - self._left_at
            self._take_apart(micro_batches, step)
            started = time.perf_counter()
        result = super().__call__(
            micro_batches,
            step=step,
            learning_rate=learning_rate,
            max_grad_norm=max_grad_norm,
            more=more and self._made >= self._updates,
        )
        if self._measures:
            inner = self._spent["passes"] + self._spent["ranks"] - inside
            self._spent["finish"] += time.perf_counter() - started - inner
            self._tokens += result.tokens
        self._made += 1
        if self._made == self._updates or (not more and self._made < self._updates):
            self._tell()
        self._left_at = time.perf_counter()
        return result

    def sums(self, micro_batches: Sequence[MicroBatch], step: int) -> Any:
        """The passes of an update, waited for if it is measured."""
        started = time.perf_counter()
        sums = super().sums(micro_batches, step)
        if self._measures:
            mx.eval(sums)
            self._spent["passes"] += time.perf_counter() - started
        return sums

    def reduce(self, own: Any, micro_batches: Sequence[MicroBatch]) -> tuple[Any, int]:
        """The sums over the ranks, and the wait for those that are not as far."""
        started = time.perf_counter()
        summed = super().reduce(own, micro_batches)
        if self._measures:
            self._spent["ranks"] += time.perf_counter() - started
        return summed

    def _take_apart(self, micro_batches: Sequence[MicroBatch], step: int) -> None:
        params = self.model.trainable
        native.use_threads(1)
        for batch in micro_batches:
            arrays = device_arrays(batch)
            hidden = self._timed("forward", partial(self._forward, params, arrays))
            self._timed("head", partial(self._head, params, hidden, arrays))
            self._timed("alone", partial(self._sums, params, arrays, self.dropout_keys(batch, step)))

    def _timed(self, part: str, work: Callable[[], Any]) -> Any:
        mx.eval(work())
        started = time.perf_counter()
        made = work()
        mx.eval(made)
        self._spent[part] += time.perf_counter() - started
        return made

    def _trace_forward(self, params: Arrays, batch: tuple[mx.array, ...]) -> mx.array:
        self._traced = True
        self.model.train_mode(True)
        with apart(*batch[5:]):
            return before_head(self.model, params, batch)

    def _trace_head(self, params: Arrays, hidden: mx.array, batch: tuple[mx.array, ...]) -> Any:
        self._traced = True
        self.model.bind(params)

        def loss(hidden: mx.array) -> tuple[mx.array, mx.array]:
            return head_sums(self.model, params, hidden, batch, smoothing=self._smoothing, gradient=True)

        return mx.value_and_grad(loss)(hidden)

    def _tell(self) -> None:
        if not self._made:
            self._report("warn", "profile", "The run has one update, and the first is not measured.", {"updates": 0})
            return
        spent = {part: seconds * 1000 / self._made for part, seconds in self._spent.items()}
        scale = spent["passes"] / max(spent["alone"], 1e-9)
        parts = {
            "forward_ms": spent["forward"] * scale,
            "head_ms": spent["head"] * scale,
            "backward_ms": max(0.0, spent["alone"] - spent["forward"] - spent["head"]) * scale,
            "optimizer_ms": spent["finish"],
            "outside_ms": spent["outside"],
        }
        if self._ranks.size > 1:
            parts["ranks_ms"] = spent["ranks"]
        whole = sum(parts.values())
        rate = self._tokens / self._made / whole * 1000
        words = ", ".join(f"{part[:-3]} {ms:.1f} ms ({ms / whole:.0%})" for part, ms in parts.items())
        self._report(
            "info",
            "profile",
            f"An update takes {whole:.1f} ms, {rate:,.0f} trained tokens/s: {words}.",
            {"updates": self._made, **{part: round(ms, 3) for part, ms in parts.items()}},
        )
