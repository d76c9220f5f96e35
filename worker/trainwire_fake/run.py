"""A scripted run from its first order to its last report."""

import contextlib
from typing import Any

import msgspec

from trainwire_protocol import channel as ch
from trainwire_protocol import rundir
from trainwire_protocol.config import Config
from trainwire_protocol.errors import DiskFull, Internal, IoError, NonFinite, TrainwireError
from trainwire_protocol.events import Complete, Log, Outcome
from trainwire_protocol.results import data_report

from .acts import Acts
from .clock import Clock, FakeClock, RealClock
from .inbox import Inbox
from .loop import Reason, train
from .orders import Leave, Orders
from .plan import make_plan, resolve
from .preparation import TOTAL_PARAMETERS, TRAINABLE_PARAMETERS, data_event, prepare
from .script import Script
from .session import Session


def run(script: Script, inbox: Inbox) -> int:
    """Serve one worker: its first order says what. Gives the process's exit code."""
    order = inbox.first()
    if order is None:
        return 0
    clock: Clock = FakeClock() if script.clock == "scripted" else RealClock()
    acts = Acts(script, inbox, clock)
    session: Session | None = None
    try:
        if not isinstance(order, ch.Begin | ch.Check):
            raise Internal(f"The first order was {type(order).__name__}.")
        config = msgspec.convert(order.config, Config)
        session = Session(script, inbox, clock, acts, config, make_plan(config, script))
        if isinstance(order, ch.Check):
            inbox.answer(order.order, **_check(session))
        else:
            acts.attempt = order.attempt
            _run(session, order)
        acts.perform("exit", session.state.step)
        return 0
    except TrainwireError as error:
        checkpoint = None if session is None else _rescue(session, error)
        inbox.report(
            ch.Failed(
                code=error.code,
                message=error.message,
                details=error.details or None,
                hint=error.hint,
                checkpoint=checkpoint,
            )
        )
        return error.exit_code or 1


def _run(session: Session, begin: ch.Begin) -> None:
    """Prepare, train, complete and linger; leave when told to."""
    orders, inbox = Orders(session), session.inbox
    try:
        prepare(session, orders, begin)
        _complete(session, orders, train(session, orders), hold=begin.hold_on_failed_save)
        if begin.linger:
            orders.linger()
        outcome: Outcome = "completed"
    except Leave:
        outcome = "completed" if orders.finished else "stopped"
        keep = orders.stop is None or orders.stop.save
        if outcome == "stopped" and session.begun and keep and session.state.step and session.whole() is None:
            session.save(rundir.checkpoint_name(session.state.step), "periodic")
    path = None if session.newest is None else str(session.newest)
    orders.end(outcome=outcome, step=session.state.step, checkpoint=path)
    inbox.report(ch.Finished(outcome=outcome, step=session.state.step, checkpoint=path))


def _complete(session: Session, orders: Orders, reason: Reason, *, hold: bool) -> None:
    """Write the final checkpoint and report the end; with `hold` a save that fails pauses the run instead."""
    state = session.state
    while True:
        try:
            session.save(rundir.FINAL_NAME, "final")
            break
        except DiskFull as error:
            if not hold or session.inbox.closed:
                raise
            details = {"path": rundir.FINAL_NAME, "step": state.step, "code": error.code}
            message = f"{error.message} The run pauses with its weights in memory: make room, then resume."
            session.inbox.emit(Log(level="error", code="save_failed", message=message, details=details))
            orders.pause()
            orders.serve()
    seconds = round(state.time_ms / 1000.0, 6)
    session.inbox.emit(Complete(total_steps=state.step, total_time_secs=seconds, reason=reason))


def _rescue(session: Session, error: TrainwireError) -> str | None:
    """Save the last good state before the engine leaves with an error; gives the newest whole checkpoint."""
    state = session.state
    if isinstance(error, NonFinite):
        state.skipped_in_row = 0
    if session.begun and state.step and not isinstance(error, DiskFull | IoError) and session.whole() is None:
        with contextlib.suppress(TrainwireError):
            session.save(rundir.emergency_name(state.step), "emergency")
    return None if session.newest is None else str(session.newest)


def _check(session: Session) -> dict[str, Any]:
    """Answer `validate`: what the data gives, and how long the run would be."""
    session.acts.perform("load", 0)
    session.acts.perform("tokenize", 0)
    session.config = resolve(session.config, session.plan)
    splits = [data_event(session, "train")]
    if session.script.valid_examples:
        splits.append(data_event(session, "valid"))
    return {
        "valid": True,
        "issues": [],
        "config": msgspec.to_builtins(session.config),
        "data": [data_report(split) for split in splits],
        "total_steps": session.plan.total_steps,
        "trainable_parameters": TRAINABLE_PARAMETERS,
        "total_parameters": TOTAL_PARAMETERS,
        "estimate": _estimate(session),
        "samples": [_SAMPLE],
    }


_SAMPLE = {
    "row": "train.jsonl:1",
    "tokens": 64,
    "trained_tokens": 32,
    "segments": [{"text": "A question.\n", "trained": False}, {"text": "An answer.", "trained": True}],
}


def _estimate(session: Session) -> dict[str, Any]:
    """Estimate the run by the script's own times."""
    seconds = session.script.step_ms / 1000
    return {
        "peak_bytes": 2 << 20,
        "available_bytes": 1 << 30,
        "update_seconds": seconds,
        "total_seconds": seconds * session.plan.total_steps,
        "largest_micro_batch_tokens": 4096,
    }
