"""What the engine reports, as events, phases and answers."""

import os

from trainwire_protocol.channel import Alive, Answer, AnyReport, Report, StepHistory
from trainwire_protocol.errors import from_code
from trainwire_protocol.events import (
    Activity,
    Checkpoint,
    Complete,
    ConfigChanged,
    Event,
    Init,
    Paused,
    Phase,
    Resumed,
    Step,
)

from .state import RunState

_WORDS_FOR: dict[Activity, tuple[Phase, str]] = {
    "tokenize": ("preparing", "Reading and tokenizing the data."),
    "compile": ("running", "Compiling the update for a new shape."),
}
LOW_DISK_FACTOR = 2
"""A warning is given when fewer checkpoints than this fit on the disk."""


class Reports:
    """Follows the engine of a run."""

    def __init__(self, state: RunState) -> None:
        self._state = state

    def take(self, report: AnyReport) -> None:
        """Handle one report."""
        if type(report) is Step:
            self._state.emitter.emit(report)
        elif isinstance(report, Report):
            self._on_private(report)
        else:
            self._on_event(report)

    def _on_event(self, event: AnyReport) -> None:
        assert isinstance(event, Event)
        state, snapshot = self._state, self._state.snapshot
        order = state.begin_order if isinstance(event, Init) else event.cause
        pending = state.desk.cause(order if isinstance(order, int) else None)
        event.cause = pending.id if pending else None
        if isinstance(event, ConfigChanged) and order == 0:
            # A restart puts settings in force again, some of which the checkpoint may have had.
            event.changes = {key: change for key, change in event.changes.items() if change.from_ != change.to}
            if not event.changes:
                return
        if isinstance(event, Paused):
            state.desk.paused()
            snapshot.activity = "none"
            if state.ending is None:
                state.enter("paused", "Paused.")
        elif isinstance(event, Resumed):
            snapshot.activity = "train"
            if state.ending is None:
                state.enter("running", "Training.")
        elif isinstance(event, Complete) and state.request and state.request.linger and state.ending is None:
            snapshot.activity = "none"
            state.enter("lingering", "Finished; the model stays for eval and generate.")
        seq = state.emitter.emit(event)
        if pending is not None:
            pending.seq = seq
        if isinstance(event, Init):
            state.desk.set_effect(state.begin_order, seq)
            snapshot.activity = "train"
            if snapshot.phase in ("loading", "preparing"):
                state.enter("running", "Training.")
        elif isinstance(event, Checkpoint):
            self._check_disk(event)

    def _on_private(self, report: Report) -> None:
        if isinstance(report, Answer):
            error = None
            if report.code is not None:
                error = from_code(report.code, report.message or "", hint=report.hint, **(report.details or {}))
            if report.order:
                self._state.desk.answer(report.order, report.result, error)
        elif isinstance(report, Alive):
            self._on_alive(report)
        elif isinstance(report, StepHistory):
            self._complete_log(report)

    def _on_alive(self, report: Alive) -> None:
        snapshot = self._state.snapshot
        # Updates that wait for `log_every` are done all the same.
        snapshot.reach(report.step)
        if report.activity == snapshot.activity:
            return
        before, snapshot.activity = snapshot.activity, report.activity
        if report.activity in ("download", "load") and snapshot.phase == "loading":
            # The seed's view shows this message as the model's name.
            self._state.enter("loading", self._state.request.config.model if self._state.request else "")
        elif words := _WORDS_FOR.get(report.activity):
            phase, message = words
            keeps = snapshot.phase not in ("loading", "preparing", "running") or report.activity == "compile"
            self._state.enter(snapshot.phase if keeps else phase, message)
        elif before == "compile" and snapshot.phase == "running":
            # Whoever shows the last status would show for long that a shape is compiled.
            self._state.enter("running", "Training.")

    def _complete_log(self, history: StepHistory) -> None:
        """Append the updates that the log lacks, so that log and weights agree after a crash of the worker."""
        state = self._state
        assert state.prepared is not None
        known = state.prepared.log.past.last_step
        for step in history.steps:
            if step.step > known and state.attempt == state.prepared.attempt:
                state.emitter.emit(step)

    def _check_disk(self, checkpoint: Checkpoint) -> None:
        try:
            disk = os.statvfs(checkpoint.path)
        except OSError:
            return
        free = disk.f_bavail * disk.f_frsize
        if free < LOW_DISK_FACTOR * checkpoint.bytes:
            self._state.log("warn", f"Only {free} bytes are left on the disk.", "low_disk", free_bytes=free)
