"""One order of the worker, from its arrival to the engine's last word: a run, or a check of one."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from pathlib import Path

import msgspec

from trainwire_engine.check import check
from trainwire_engine.checkpoint import Target
from trainwire_engine.failures import as_error, disk_error
from trainwire_engine.follow import Mute
from trainwire_engine.loop import Parts, Reason, train
from trainwire_engine.meeting import form
from trainwire_engine.orders import Control
from trainwire_engine.prepare import prepare
from trainwire_engine.reports import Reports
from trainwire_engine.team import Team
from trainwire_engine.watch import Stopped
from trainwire_protocol.channel import LEADER_HANGS, LEADER_LOST, Begin, Check, EngineChannel
from trainwire_protocol.errors import DiskFull, EngineUnavailable, Internal, IoError, NonFinite, TrainwireError
from trainwire_protocol.events import CheckpointKind
from trainwire_protocol.rundir import FINAL_NAME, LOCK_NAME, checkpoint_name, emergency_name


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
        return lead(order, channel, reports)
    except Stopped as stopped:
        reports.finished("stopped", stopped.step, stopped.checkpoint)
        return 0
    except Exception as error:
        return _fail(as_error(error), reports, None)


def lead(begin: Begin, channel: EngineChannel, reports: Reports) -> int:
    """Carry out a run as its only rank, or as the first of several."""
    ranks = form()
    reports.alive("load")
    ranks.tell("begin", msgspec.to_builtins(begin))

    def end(error: TrainwireError, checkpoint: Path | None = None) -> int:
        status = _fail(error, reports, checkpoint)
        ranks.leave()
        return status

    ranks.on_lost(lambda error: _exit(end(error)))
    try:
        parts = prepare(begin, channel, reports, ranks)
        ranks.on_lost(lambda error: _exit(end(error, _rescue(parts, error))))
        try:
            return _run(begin, parts)
        except Exception as error:
            known = as_error(ranks.verdict(error))
            return end(known, _rescue(parts, known))
    except Stopped:
        raise
    except Exception as error:
        return end(as_error(ranks.verdict(error)))
    finally:
        ranks.leave()


def assist() -> int:
    """Carry out another rank's part of a run; rank 0 says which run, and when it is over."""
    team, parts = form(), None
    if not isinstance(team, Team):
        print("There is no rank 0 to assist: MLX finds one process only.", file=sys.stderr)
        return EngineUnavailable.exit_code or 1
    team.on_lost(lambda error: _exit(_bereaved(team, parts, error)))
    try:
        begin = msgspec.convert(team.follow("begin")[1], Begin)
        if begin.offline:
            os.environ["HF_HUB_OFFLINE"] = "1"
        parts = prepare(begin, Mute(), Reports(Mute()), team)
        # Rank 0 comes to the same errors of the numbers by itself.
        with contextlib.suppress(NonFinite):
            train(parts)
        team.stay()
    except Exception as error:
        cause = team.verdict(error)
        if cause is team.hub.lost:
            return _bereaved(team, parts, as_error(cause))
        traceback.print_exc(file=sys.stderr)
        team.fail(as_error(cause))
    team.stay()


def _bereaved(team: Team, parts: Parts | None, error: TrainwireError) -> int:
    """Leave because rank 0 is lost; the next rank saves what it has, where it reaches the run's folder."""
    print(error.message, file=sys.stderr)
    if team.rank == 1 and parts is not None:
        # A rank 0 that has died has left the folder; one that stands still in the middle of a save never does.
        died = not (error.details.get("silent") or error.details.get("hangs"))
        if (Path(parts.course.config.run_dir or ".") / LOCK_NAME).exists():
            _rescue(parts, error, wait=died)
    return LEADER_HANGS if error.details.get("hangs") else LEADER_LOST


def _exit(status: int) -> None:
    """Leave from another thread than the main one, which waits for what will not come."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _fail(error: TrainwireError, reports: Reports, checkpoint: Path | None) -> int:
    if isinstance(error, Internal):
        traceback.print_exc(file=sys.stderr)
    reports.failed(error, str(checkpoint) if checkpoint else None)
    return error.exit_code or 1


def _run(begin: Begin, parts: Parts) -> int:
    control = parts.control
    assert isinstance(control, Control)
    reason = train(parts)
    if reason is not None and not _complete(parts, control, reason, hold=begin.hold_on_failed_save):
        reason = None
    if reason is None:
        return _stop(parts, control)
    final = parts.saves.newest
    if begin.linger:
        control.linger()
    step = parts.course.state.step
    control.end({"outcome": "completed", "step": step, "checkpoint": str(final)})
    parts.reports.finished("completed", step, str(final))
    return 0


def _complete(parts: Parts, control: Control, reason: Reason, *, hold: bool) -> bool:
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
            if not hold or control.gone:
                raise known from error
        parts.reports.log(
            "error",
            "save_failed",
            f"{known.message} The run pauses with its weights in memory: make room, then resume.",
            {"path": FINAL_NAME, "step": parts.course.state.step, "code": known.code},
        )
        control.pause()
        if not control.serve():
            return False
    parts.stopwatch.lap()
    state = parts.course.state
    parts.reports.complete(state.step, state.elapsed_ms, reason)
    return True


def _stop(parts: Parts, control: Control) -> int:
    """Leave because of a stop, or because the worker is gone: with a checkpoint, unless nothing is to be kept."""
    saves, state = parts.saves, parts.course.state
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


def _rescue(parts: Parts, error: TrainwireError, *, wait: bool = True) -> Path | None:
    """Save the last good state before the engine leaves with an error, if the disk lets it; gives the newest
    whole checkpoint. Without `wait` it is left to the rank that is saving, if one is."""
    saves, state = parts.saves, parts.course.state
    kind: CheckpointKind = "emergency"
    try:
        saves.settle()
        if isinstance(error, NonFinite):
            # A resume of it gets as many attempts as the run had.
            state.non_finite_in_row = 0
        if state.step > 0 and not isinstance(error, DiskFull | IoError) and saves.whole() is None:
            parts.model.release()
            saves.last(Target(emergency_name(state.step), kind), wait=wait)
    except Exception:
        traceback.print_exc(file=sys.stderr)
    return saves.newest
