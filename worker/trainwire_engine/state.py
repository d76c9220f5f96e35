"""Where a run stands: the one small type that a checkpoint keeps, besides weights and optimizer state."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import msgspec

from trainwire_engine.native import Native
from trainwire_protocol.events import Step

FORMAT = 1
"""Version of `trainer_state.json`; a checkpoint of another one is not resumed."""


class TrainState(msgspec.Struct):
    """Position, sums and counts of a run; times in ms, losses in nats. Nothing here is read from the clock.

    `epoch` counts from 1, `epoch_update` is the number of its updates that are done. `horizon` is the length of
    the learning rate's schedule in updates. `evaluated_step` and `generated_step` are the steps at which the
    scheduled evaluation and generations were last finished, so that a resume neither repeats nor leaves out one.
    """

    step: int = 0
    epoch: int = 1
    epoch_update: int = 0
    epoch_loss: float = 0.0
    epoch_tokens: int = 0
    epoch_ms: float = 0.0
    trained_tokens: int = 0
    elapsed_ms: float = 0.0
    horizon: int = 0
    best_loss: float | None = None
    best_step: int | None = None
    worse_evaluations: int = 0
    evaluated_step: int = -1
    generated_step: int = -1
    non_finite: int = 0
    non_finite_in_row: int = 0

    def count(self, loss: float, tokens: int, *, skipped: bool) -> None:
        """Take note of an update; a skipped one advances the position, and trained nothing."""
        self.step += 1
        self.epoch_update += 1
        if skipped:
            self.non_finite += 1
            self.non_finite_in_row += 1
            return
        self.non_finite_in_row = 0
        self.trained_tokens += tokens
        self.epoch_loss += loss * tokens
        self.epoch_tokens += tokens

    @property
    def epoch_average(self) -> float | None:
        """The epoch's loss so far, weighted by tokens."""
        return self.epoch_loss / self.epoch_tokens if self.epoch_tokens else None

    def next_epoch(self) -> None:
        """Stand before the first update of the next epoch."""
        self.epoch += 1
        self.epoch_update = self.epoch_tokens = 0
        self.epoch_loss = self.epoch_ms = 0.0

    def judge(self, valid_loss: float) -> bool:
        """Take note of a scheduled evaluation: true if it is the best so far, which nan never is."""
        better = math.isfinite(valid_loss) and (self.best_loss is None or valid_loss < self.best_loss)
        if better:
            self.best_loss, self.best_step, self.worse_evaluations = valid_loss, self.step, 0
        else:
            self.worse_evaluations += 1
        return better


class Stopwatch:
    """Adds the time that the run works, pauses left out, to its state."""

    def __init__(self, state: TrainState, now: Callable[[], float] = time.perf_counter) -> None:
        self._state = state
        self._now = now
        self._mark = now()

    def lap(self) -> float:
        """Add what has passed since the last mark, and set the next one; gives it in ms."""
        now = self._now()
        passed = (now - self._mark) * 1000
        self._mark = now
        self._state.elapsed_ms += passed
        self._state.epoch_ms += passed
        return passed

    def skip(self) -> None:
        """Set the mark without adding anything, as after a pause."""
        self._mark = self._now()


class DataMark(msgspec.Struct):
    """What a split was: its content hash and its number of examples."""

    digest: str
    examples: int


class ModelMark(msgspec.Struct):
    """Which base model it was: its folder, its architecture and a hash of its files."""

    folder: str
    model_type: str
    fingerprint: str


class Saved(msgspec.Struct):
    """The content of `trainer_state.json`.

    `given` is the config as the worker passed it, with the defaults that are computed still open; `config` has
    every value that held when the checkpoint was written, those that `set` changed included. `versions` and
    `native` name what computes, on so many `ranks`. `steps` are the last update reports: those since the periodic
    checkpoint before, and those that a worker may have left unread.
    """

    format: int
    training_type: str
    run_id: str
    attempt: int
    created_ms: int
    state: TrainState
    given: dict[str, Any]
    config: dict[str, Any]
    model: ModelMark
    tokenizer: str
    data_time: str
    train: DataMark
    valid: DataMark | None
    versions: dict[str, str]
    native: Native
    steps: list[Step]
    ranks: int = 1


def encode_saved(saved: Saved) -> bytes:
    """Write it as JSON; a non-finite number of an update report is named beside its null, as on the wire."""
    return msgspec.json.format(msgspec.json.encode(saved), indent=1)


def decode_saved(raw: bytes) -> Saved:
    """Read it; raises msgspec.DecodeError or msgspec.ValidationError."""
    return msgspec.json.decode(raw, type=Saved)


def named_non_finite(step: Step) -> Step:
    """Give an update report whose non-finite numbers are null and named, as JSON needs it."""
    marks: dict[str, Any] = {}
    for name in ("loss", "grad_norm", "token_accuracy", "perplexity"):
        value = getattr(step, name)
        if value is not None and not math.isfinite(value):
            marks[name] = "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if not marks:
        return step
    return msgspec.structs.replace(step, non_finite=marks, **dict.fromkeys(marks))
