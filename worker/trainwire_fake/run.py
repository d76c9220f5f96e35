"""A scripted run from its first order to its last report."""

from pathlib import Path
from typing import Any, Literal

import msgspec

from trainwire_protocol import channel as ch
from trainwire_protocol.config import Config
from trainwire_protocol.errors import Internal, TrainwireError
from trainwire_protocol.events import Data, Init, Log, Outcome, Progress

from .acts import Acts
from .clock import Clock, FakeClock, RealClock
from .inbox import Inbox
from .loop import PEAK_BYTES, train
from .orders import Orders, Stopped, WorkerGone
from .plan import make_plan, resolve
from .script import Script
from .session import Session

LOAD_SLICE_MS = 50.0
TOKENIZE_PARTS = 4
TOTAL_PARAMETERS, TRAINABLE_PARAMETERS = 1_000_000, 10_000


def run(script: Script, inbox: Inbox) -> int:
    """Serve one worker: its first order says what. Gives the process's exit code."""
    order = inbox.first()
    if order is None:
        return 0
    clock: Clock = FakeClock() if script.clock == "fake" else RealClock()
    acts = Acts(script, inbox, clock)
    session: Session | None = None
    try:
        if not isinstance(order, ch.Begin | ch.Check):
            raise Internal(f"The first order is {type(order).__name__} instead of Begin.")
        config = msgspec.convert(order.config, Config)
        plan = make_plan(config, script)
        session = Session(script, inbox, clock, acts, resolve(config, plan), plan)
        if isinstance(order, ch.Check):
            inbox.answer(order.order, **_check(session))
        else:
            acts.attempt = order.attempt
            _train(session, order)
        acts.perform("exit", session.state.step)
        return 0
    except TrainwireError as error:
        checkpoint = None if session is None or session.last_checkpoint is None else str(session.last_checkpoint)
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


def _train(session: Session, begin: ch.Begin) -> None:
    orders = Orders(session)
    inbox = session.inbox
    outcome: Outcome = "completed"
    try:
        _prepare(session, orders, begin)
        train(session, orders)
        if begin.linger:
            inbox.alive("none", session.state.step)
            orders.finished = True
            while True:
                _linger(inbox, orders)
    except Stopped:
        outcome = "completed" if orders.finished else "stopped"
    except WorkerGone:
        if not orders.finished:
            session.save_for_leaving()
        return
    while (order := inbox.take(block=False)) is not None:
        inbox.refuse(order.order, "shutting_down", "The run is over.")
    path = None if session.last_checkpoint is None else str(session.last_checkpoint)
    inbox.report(ch.Finished(outcome=outcome, step=session.state.step, checkpoint=path))


def _linger(inbox: Inbox, orders: Orders) -> None:
    order = inbox.take(block=True)
    if order is None:
        raise WorkerGone
    orders.handle(order)


def _prepare(session: Session, orders: Orders, begin: ch.Begin) -> None:
    """Load, tokenize and say what will be trained; a stop ends it early."""
    inbox, script, config = session.inbox, session.script, session.config
    history = session.resume_from(Path(begin.resume_from)) if begin.resume_from else []
    inbox.alive("load", session.state.step)
    try:
        _take_time(session, orders, script.load_ms)
        session.acts.perform("load", session.state.step)
        inbox.alive("tokenize", session.state.step)
        _tokenize(session, orders)
    except Stopped:
        inbox.refuse(begin.order, "shutting_down", "The run was stopped before it began.")
        raise
    if not script.valid_examples:
        message = "There is no validation data: evaluation is off."
        inbox.emit(Log(level="info", code="no_validation", message=message))
    init = Init(
        model=config.model,
        config=msgspec.to_builtins(config),
        training_type="sft",
        run_id=begin.run_id,
        run_name=config.run_name or "run",
        run_dir=str(session.run_dir),
        total_steps=session.plan.total_steps,
        trainable_parameters=TRAINABLE_PARAMETERS,
        total_parameters=TOTAL_PARAMETERS,
        examples=session.plan.examples,
        start_step=session.state.step,
        device="scripted",
        head="chunked",
        cause=begin.order,
    )
    inbox.emit(init)
    if history:
        inbox.report(ch.StepHistory(steps=history))
    inbox.answer(
        begin.order,
        run_id=begin.run_id,
        run_dir=init.run_dir,
        total_steps=init.total_steps,
        resumed_from=begin.resume_from,
    )


def _take_time(session: Session, orders: Orders, ms: float) -> None:
    """Let time pass while only a stop is listened to."""
    while ms > 0:
        if (order := session.inbox.take_urgent(ch.StopOrder)) is not None:
            orders.handle(order)
        session.clock.wait(min(ms, LOAD_SLICE_MS))
        ms -= LOAD_SLICE_MS


def _tokenize(session: Session, orders: Orders) -> None:
    inbox, script, total = session.inbox, session.script, session.plan.examples
    done = 0
    inbox.emit(Progress(id="tokenize-train", title="Tokenizing train", done=0, total=total, unit="rows"))
    for part in range(1, TOKENIZE_PARTS + 1):
        _take_time(session, orders, script.tokenize_ms / TOKENIZE_PARTS)
        if part == TOKENIZE_PARTS:
            session.acts.perform("tokenize", session.state.step)
        done = total * part // TOKENIZE_PARTS
        inbox.emit(Progress(id="tokenize-train", title="Tokenizing train", done=done, total=total, unit="rows"))
    inbox.emit(_data(session, "train"))
    if script.valid_examples:
        inbox.emit(_data(session, "valid"))


def _data(session: Session, split: Literal["train", "valid"]) -> Data:
    script = session.script
    rows = session.plan.examples if split == "train" else script.valid_examples
    dropped = script.rows_dropped if split == "train" else {}
    return Data(
        split=split,
        rows_read=rows + sum(reason.count for reason in dropped.values()),
        rows_used=rows,
        rows_dropped=dropped,
        tokens=rows * script.tokens_per_example * 2,
        trained_tokens=rows * script.tokens_per_example,
        length_histogram={str(1 << (script.tokens_per_example * 2 - 1).bit_length()): rows},
        padding_fraction=0.0,
    )


def _check(session: Session) -> dict[str, Any]:
    """Answer `validate`: what the data gives, and what the run would take."""
    issues: list[dict[str, str]] = []
    try:
        session.acts.perform("load", 0)
        session.acts.perform("tokenize", 0)
    except TrainwireError as error:
        issues.append({"path": "data", "code": error.code, "message": error.message})
    return {
        "valid": not issues,
        "issues": issues,
        "config": msgspec.to_builtins(session.config),
        "data": [msgspec.to_builtins(_data(session, "train"))],
        "estimate": {
            "total_steps": session.plan.total_steps,
            "step_ms": session.script.step_ms,
            "total_time_secs": session.plan.total_steps * session.script.step_ms / 1000.0,
            "peak_bytes": PEAK_BYTES,
        },
    }
