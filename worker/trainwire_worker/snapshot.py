"""What the run looks like now: kept from the events themselves, for `status`, the heartbeat and the end."""

from typing import Any

import msgspec

from trainwire_protocol.events import (
    Activity,
    Attempt,
    Checkpoint,
    Complete,
    ConfigChanged,
    EpochStart,
    EvalEnd,
    Event,
    Init,
    Phase,
    Step,
)


class Snapshot:
    """The state of a run as its events tell it."""

    def __init__(self) -> None:
        self.phase: Phase = "idle"
        self.activity: Activity = "none"
        self.step = 0
        self.total_steps = 0
        self.epoch = 0
        self.run_id: str | None = None
        self.run_dir: str | None = None
        self.attempt = 0
        self.attempt_started = False
        """True once an update of this attempt is done."""
        self._start_step = 0
        self.checkpoint: Checkpoint | None = None
        self.resumed_from: str | None = None
        self.metrics: Step | None = None
        self.valid_loss: float | None = None
        self.settings: dict[str, tuple[Any, int]] = {}
        """What `set` has changed in this process: each value, and the first update that used it."""
        self.completed: str | None = None
        """Why the run came to its end by itself, once it has."""

    def observe(self, event: Event) -> None:
        """Take notice of an event."""
        if type(event) is Step:
            self.reach(event.step)
            self.metrics = event
        elif isinstance(event, Checkpoint):
            if event.kind != "best":
                self.checkpoint = event
        elif isinstance(event, Init):
            self.total_steps = event.total_steps
            self.step = event.start_step
        elif isinstance(event, EpochStart):
            self.epoch = event.epoch
        elif isinstance(event, ConfigChanged):
            self.settings.update({key: (change.to, event.effective_step) for key, change in event.changes.items()})
        elif isinstance(event, EvalEnd):
            self.valid_loss = event.valid_loss
        elif isinstance(event, Complete):
            self.completed = event.reason
        elif isinstance(event, Attempt):
            self.run_id, self.attempt = event.run_id, event.attempt
            self.attempt_started = False
            self.checkpoint = None
            self.resumed_from = event.resumed_from
            self.step = self._start_step = event.resumed_from_step or 0

    def reach(self, step: int) -> None:
        """Take notice that so many updates are done, whether they were reported or wait to be put together."""
        self.step = max(self.step, step)
        if step > self._start_step:
            self.attempt_started = True

    def settings_after(self, step: int) -> dict[str, Any]:
        """Give the settings in force that a checkpoint of this step may lack."""
        return {key: value for key, (value, effective) in self.settings.items() if effective > step}

    @property
    def last_checkpoint(self) -> str | None:
        """Path of the newest checkpoint that a resume can use."""
        return self.checkpoint.path if self.checkpoint else self.resumed_from

    def as_result(self) -> dict[str, Any]:
        """Give the snapshot as the result of `status`."""
        metrics = self.metrics
        return {
            "phase": self.phase,
            "activity": self.activity,
            "step": self.step,
            "total_steps": self.total_steps,
            "epoch": self.epoch,
            "run_id": self.run_id,
            "run_dir": self.run_dir,
            "attempt": self.attempt,
            "metrics": msgspec.to_builtins(metrics) if metrics else None,
            "valid_loss": self.valid_loss,
            "checkpoint": self.last_checkpoint,
            "memory": {
                "active_bytes": metrics.active_bytes,
                "cache_bytes": metrics.cache_bytes,
                "peak_bytes": metrics.peak_bytes,
                "as_of_step": metrics.step,
            }
            if metrics
            else None,
        }
