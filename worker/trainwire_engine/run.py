"""One order of the worker, from its arrival to the engine's last word: a run, or a check of one."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from trainwire_engine.check import check
from trainwire_engine.checkpoint import Target
from trainwire_engine.failures import as_error, disk_error
from trainwire_engine.loop import Parts, Reason, train
from trainwire_engine.prepare import Stopped, prepare
from trainwire_engine.reports import Reports
from trainwire_protocol.channel import Begin, Check, EngineChannel
from trainwire_protocol.errors import DiskFull, Internal, IoError, NonFinite, TrainwireError
from trainwire_protocol.events import CheckpointKind
from trainwire_protocol.rundir import FINAL_NAME, checkpoint_name, emergency_name


def serve(channel: EngineChannel) -> int:
    """Wait for the worker's first order, carry it out, and give the exit status of the process."""
    order = channel.next(block=True)
    if order is None:
        return 0
    reports = Reports(channel)
    try:
        if isinstance(order, Begin | Check) and order.offline:
            os.environ["HF_HUB_OFFLINE"] = "1"
        if isinstance(order, Check):
            check(order, reports)
            return 0
        if not isinstance(order, Begin):
            raise Internal(f"The first order was {type(order).__name__}.")
        return _run(order, channel, reports)
    except Stopped as stopped:
        reports.finished("stopped", stopped.step, stopped.checkpoint)
        return 0
    except Exception as error:
        return _fail(as_error(error), reports, None)


def _fail(error: TrainwireError, reports: Reports, checkpoint: Path | None) -> int:
    if isinstance(error, Internal):
        traceback.print_exc(file=sys.stderr)
    reports.failed(error, str(checkpoint) if checkpoint else None)
    return error.exit_code or 1


def _run(begin: Begin, channel: EngineChannel, reports: Reports) -> int:
    parts = prepare(begin, channel, reports)
    try:
        reason = train(parts)
        if reason is not None and not _complete(parts, reason, hold=begin.hold_on_failed_save):
            reason = None
        if reason is None:
            return _stop(parts)
    except Exception as error:
        known = as_error(error)
        return _fail(known, reports, _rescue(parts, known))
    final = parts.saves.newest
    if begin.linger:
        parts.control.linger()
    step = parts.course.state.step
    parts.control.end({"outcome": "completed", "step": step, "checkpoint": str(final)})
    reports.finished("completed", step, str(final))
    return 0


def _complete(parts: Parts, reason: Reason, *, hold: bool) -> bool:
    """Write the final checkpoint and report the end.

    If it cannot be written, DiskFull or IoError is raised, or with `hold` the run pauses until somebody has made
    room: the weights are in memory. False if it is stopped meanwhile.
    """
    while True:
        try:
            parts.saves.now(Target(FINAL_NAME, "final"))
            break
        except OSError as error:
            known = disk_error("The final checkpoint could not be saved", error)
            if not hold or parts.control.gone:
                raise known from error
        parts.reports.log(
            "error",
            "save_failed",
            f"{known.message} The run pauses with its weights in memory: make room, then resume.",
            {"path": FINAL_NAME, "step": parts.course.state.step, "code": known.code},
        )
        parts.control.pause()
        if not parts.control.serve():
            return False
    parts.stopwatch.lap()
    state = parts.course.state
    parts.reports.complete(state.step, state.elapsed_ms, reason)
    return True


def _stop(parts: Parts) -> int:
    """Leave because of a stop, or because the worker is gone: with a checkpoint, unless nothing is to be kept."""
    control, saves, state = parts.control, parts.saves, parts.course.state
    if (control.stop is None or control.stop.save) and state.step > 0:
        try:
            saves.now(Target(checkpoint_name(state.step), "periodic"))
        except OSError as error:
            raise disk_error("The checkpoint of the stop could not be saved", error) from error
    saves.settle()
    checkpoint = str(saves.newest) if saves.newest else None
    control.end({"outcome": "stopped", "step": state.step, "checkpoint": checkpoint})
    parts.reports.finished("stopped", state.step, checkpoint)
    return 0


def _rescue(parts: Parts, error: TrainwireError) -> Path | None:
    """Save the last good state before the engine leaves with an error, if the disk lets it; gives the newest
    whole checkpoint."""
    saves, state = parts.saves, parts.course.state
    kind: CheckpointKind = "emergency"
    try:
        saves.settle()
        if isinstance(error, NonFinite):
            # A resume of it gets as many attempts as the run had.
            state.non_finite_in_row = 0
        if state.step > 0 and not isinstance(error, DiskFull | IoError) and saves.whole() is None:
            parts.model.release()
            saves.now(Target(emergency_name(state.step), kind))
    except Exception:
        traceback.print_exc(file=sys.stderr)
    return saves.newest
