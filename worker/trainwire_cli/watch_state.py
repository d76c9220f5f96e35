"""What the live view shows, folded from events one by one."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from trainwire_client import (
    Attempt,
    Checkpoint,
    ConfigChanged,
    End,
    EpochStart,
    Error,
    EvalEnd,
    Generation,
    Init,
    Log,
    Progress,
    Series,
    Status,
    Step,
)

MAX_POINTS = 800
"""Points of a curve that are kept; beyond them neighbours are put together, over the whole run alike."""


class Curve:
    """A curve of any length in few points, each the mean of as many neighbours."""

    def __init__(self) -> None:
        self._points: list[tuple[int, float]] = []
        self._each = 1
        self._newest: list[tuple[int, float]] = []

    def __len__(self) -> int:
        return len(self._points) + bool(self._newest)

    def add(self, step: int, value: float) -> None:
        """Append a point."""
        self._newest.append((step, value))
        if len(self._newest) < self._each:
            return
        self._points.append(_mean(self._newest))
        self._newest = []
        if len(self._points) == MAX_POINTS:
            self._points = [_mean(self._points[i : i + 2]) for i in range(0, MAX_POINTS, 2)]
            self._each *= 2

    def cut(self, step: int) -> None:
        """Forget what lies above a step."""
        self._points = [point for point in self._points if point[0] <= step]
        self._newest = [point for point in self._newest if point[0] <= step]

    def points(self) -> list[tuple[int, float]]:
        """The points, the newest of which may still grow."""
        # Copies: another thread may be adding.
        whole, newest = list(self._points), list(self._newest)
        return [*whole, _mean(newest)] if newest else whole


def _mean(points: list[tuple[int, float]]) -> tuple[int, float]:
    """Put neighbours together, at the step of the last."""
    return points[-1][0], sum(value for _, value in points) / len(points)


@dataclass
class WatchState:
    """A run as the view knows it."""

    name: str = ""
    model: str = ""
    phase: str = "idle"
    activity: str = "none"
    message: str = ""
    total_steps: int = 0
    peak: float | None = None
    """The schedule's peak, which `set` changes."""
    epoch: int = 0
    total_epochs: int = 0
    newest: Step | None = None
    valid: EvalEnd | None = None
    checkpoint: Checkpoint | None = None
    progress: Progress | None = None
    end: End | None = None
    losses: Curve = field(default_factory=Curve)
    valid_losses: Curve = field(default_factory=Curve)
    notices: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=50))
    generations: deque[Generation] = field(default_factory=lambda: deque(maxlen=8))

    def observe(self, event: Any) -> None:
        """Take notice of an event."""
        if isinstance(event, Step):
            self.newest, self.total_steps, self.activity = event, event.total_steps, "train"
            if event.loss is not None:
                self.losses.add(event.step, event.loss)
        elif isinstance(event, Status):
            self.phase, self.activity, self.message = event.phase, event.activity, event.message
        elif isinstance(event, EvalEnd):
            # One by order may be of some rows only.
            if event.cause is not None:
                return
            self.valid = event
            if event.valid_loss is not None:
                self.valid_losses.add(event.step, event.valid_loss)
        elif isinstance(event, Attempt):
            self._go_on(event.resumed_from_step or 0)
        elif isinstance(event, Init):
            self.name, self.model, self.total_steps = event.run_name, event.model, event.total_steps
            self.progress = None
            self.peak = event.config.get("learning_rate")
        elif isinstance(event, EpochStart):
            self.epoch, self.total_epochs = event.epoch, event.total_epochs
        elif isinstance(event, Progress):
            self.progress = None if event.done >= event.total else event
        else:
            self._observe_rest(event)

    def _go_on(self, step: int) -> None:
        """Forget what lies above the step that an attempt goes on from: it is void."""
        self.losses.cut(step)
        self.valid_losses.cut(step)
        if self.newest is not None and self.newest.step > step:
            self.newest = None
        if self.valid is not None and self.valid.step > step:
            self.valid = None
        while self.generations and self.generations[-1].step > step:
            self.generations.pop()
        self.end = None

    def recall(self, loss: Series, valid_loss: Series, last: int) -> None:
        """Take in the curves of earlier attempts up to a step, of which no event came."""
        for curve, series in ((self.losses, loss), (self.valid_losses, valid_loss)):
            for step, value in zip(series.steps, series.values):
                if value is not None and step <= last:
                    curve.add(step, value)

    def lose(self, why: str) -> None:
        """Take notice that no more will come, though the run has not ended."""
        self.phase, self.activity = "died", "none"
        self.notices.append(("error", why))

    def _observe_rest(self, event: Any) -> None:
        if isinstance(event, Checkpoint):
            self.checkpoint = event
            self.notices.append(("info", f"step {event.step}  {event.kind} checkpoint"))
        elif isinstance(event, Generation):
            self.generations.append(event)
        elif isinstance(event, Log):
            self.notices.append((event.level, event.message))
        elif isinstance(event, ConfigChanged):
            if "learning_rate" in event.changes:
                self.peak = event.changes["learning_rate"].to
            changed = ", ".join(f"{key} = {change.to}" for key, change in event.changes.items())
            self.notices.append(("info", f"from step {event.effective_step} on: {changed}"))
        elif isinstance(event, Error):
            self.notices.append(("error", event.message + (f" {event.hint}" if event.hint else "")))
        elif isinstance(event, End):
            self.end, self.phase, self.activity = event, "ended", "none"
