"""Keeps what the newest lines of a run say, so that a timeout can tell what the worker was doing."""

import time

from trainwire_protocol.events import (
    Attempt,
    Checkpoint,
    End,
    Error,
    EvalEnd,
    Event,
    Heartbeat,
    Init,
    RunEvent,
    Status,
    Step,
)

_STEP_METRICS = (
    "step",
    "loss",
    "perplexity",
    "token_accuracy",
    "learning_rate",
    "grad_norm",
    "trained_tokens",
    "tokens_per_second",
)


class Tracker:
    """The newest facts about a run. One thread notes, any thread asks."""

    def __init__(self) -> None:
        self.phase = "starting"
        self.activity = "none"
        self.step = 0
        self.run_dir: str | None = None
        self.run_id: str | None = None
        self.last_checkpoint: str | None = None
        self.error: Error | None = None
        self.end: End | None = None
        self.saving_since: float | None = None
        """When the checkpoint began that is being written now, on the monotonic clock."""
        self._last_step: Step | None = None
        self._last_eval: EvalEnd | None = None
        self._last_event: Event | None = None
        self._heard_at = time.monotonic()
        self._loop_age_ms = 0
        self.heard: set[type] = set()

    def renew(self) -> None:
        """Forget what a dead worker was doing, but not what the run has reached."""
        self.phase, self.activity, self.saving_since = "starting", "none", None
        self.end = self.error = None

    def note_event(self, event: RunEvent) -> None:
        """Take in an event."""
        self._last_event = event
        self._heard_at = time.monotonic()
        kind = type(event)
        self.heard.add(kind)
        if isinstance(event, Step):
            self._last_step = event
            self.step = event.step
        elif isinstance(event, Status):
            self.phase, self.step = event.phase, event.step
            self._work(event.activity)
        elif isinstance(event, Checkpoint):
            self.last_checkpoint = event.path
            self.saving_since = None
        elif isinstance(event, EvalEnd):
            self._last_eval = event
        elif isinstance(event, Init):
            self.run_dir = event.run_dir
        elif isinstance(event, Attempt):
            self.run_id = event.run_id
            self.last_checkpoint = event.resumed_from or self.last_checkpoint
        elif isinstance(event, Error):
            self.error = event
        elif isinstance(event, End):
            self.end = event
            self.last_checkpoint = event.checkpoint or self.last_checkpoint

    def note_heartbeat(self, beat: Heartbeat) -> None:
        """Take in a sign of life."""
        self.phase, self.step, self._loop_age_ms = beat.phase, beat.step, beat.loop_age_ms
        self._work(beat.activity)

    def _work(self, activity: str) -> None:
        self.activity = activity
        if activity != "checkpoint":
            self.saving_since = None
        elif self.saving_since is None:
            self.saving_since = time.monotonic()

    def doing(self) -> str:
        """Say what the worker was doing, to stand behind "in"."""
        text = f"phase {self.phase}, activity {self.activity}, at step {self.step}"
        event = self._last_event
        if event is None:
            return f"{text}, and had reported no event"
        place = f" (seq {event.seq})" if event.seq else ""
        ago = time.monotonic() - self._heard_at
        text += f"; its last event, {event.type}{place}, came {ago:.1f} s before"
        if self._loop_age_ms >= 1000:
            text += f"; its engine had been silent for {self._loop_age_ms / 1000:.0f} s at the last heartbeat"
        return text

    def metrics(self) -> dict[str, float | None]:
        """Give the newest numbers: those of the last step event, and `valid_loss`."""
        metrics: dict[str, float | None] = {}
        if self._last_step is not None:
            metrics.update({name: getattr(self._last_step, name) for name in _STEP_METRICS})
        if self._last_eval is not None:
            metrics["valid_loss"] = self._last_eval.valid_loss
        return metrics
