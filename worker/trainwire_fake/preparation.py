"""What a scripted run does before its first update: it loads, tokenizes, and says what it will train."""

from pathlib import Path
from typing import Literal

import msgspec

from trainwire_protocol import channel as ch
from trainwire_protocol.errors import ShuttingDown
from trainwire_protocol.events import Data, Init, Log, Progress, Step
from trainwire_protocol.rundir import FINAL_NAME, read_manifest

from .disk import check_config, read_checkpoint
from .orders import Leave, Orders
from .plan import resolve
from .session import Session

SLICE_MS = 50.0
TOKENIZE_PARTS = 4
TOTAL_PARAMETERS, TRAINABLE_PARAMETERS = 1_000_000, 10_000


def prepare(session: Session, orders: Orders, begin: ch.Begin) -> None:
    """Load, tokenize and report `data` and `init`. Raises Leave for a stop, and the errors of the script."""
    inbox, plan = session.inbox, session.plan
    history = _go_on_from(session, Path(begin.resume_from)) if begin.resume_from else []
    inbox.alive("load", session.state.step)
    try:
        _take_time(session, orders, session.script.load_ms)
        session.acts.perform("load", session.state.step)
        inbox.alive("tokenize", session.state.step)
        _tokenize(session, orders)
    except Leave:
        inbox.refuse(begin.order, ShuttingDown("The run was stopped before it began."))
        raise
    plan.horizon = session.state.horizon = session.state.horizon or plan.horizon
    session.config = config = resolve(session.config, plan)
    if begin.resume_from:
        session.went_on_from(Path(begin.resume_from))
    inbox.emit(
        Init(
            model=config.model,
            config=msgspec.to_builtins(config),
            training_type="sft",
            run_id=begin.run_id,
            run_name=config.run_name or "",
            run_dir=str(session.run_dir),
            total_steps=plan.total_steps,
            trainable_parameters=TRAINABLE_PARAMETERS,
            total_parameters=TOTAL_PARAMETERS,
            examples=plan.examples,
            start_step=session.state.step,
            device="scripted",
            head="chunked",
        )
    )
    inbox.answer(
        begin.order,
        run_id=begin.run_id,
        run_dir=str(session.run_dir),
        total_steps=plan.total_steps,
        resumed_from=begin.resume_from,
    )
    if begin.resume_from:
        inbox.report(ch.StepHistory(steps=history))
    session.start_step = session.state.step
    session.begun = True


def _go_on_from(session: Session, folder: Path) -> list[Step]:
    """Take up a checkpoint; gives the update reports that it carries."""
    session.state, history = read_checkpoint(folder)
    state = session.state
    session.config = check_config(state, session.given)
    manifest = read_manifest(folder)
    end = max(state.step, state.config.get("max_steps", 0))
    if manifest is not None and manifest.kind == FINAL_NAME and session.config.max_steps > end:
        # After an early stop the patience begins anew.
        state.worse_evaluations = 0
    session.plan.set_max_steps(session.config.max_steps, session.state.step)
    session.newest = folder
    return history


def _take_time(session: Session, orders: Orders, ms: float) -> None:
    """Let time pass while only a stop is listened to."""
    while ms > 0:
        _listen(session, orders)
        session.clock.wait(min(ms, SLICE_MS))
        ms -= SLICE_MS
    _listen(session, orders)


def _listen(session: Session, orders: Orders) -> None:
    if (order := session.inbox.take_urgent(ch.StopOrder)) is not None:
        orders.handle(order)
    if session.inbox.closed and not session.script.ignore_close:
        raise Leave


def _tokenize(session: Session, orders: Orders) -> None:
    inbox, script, total = session.inbox, session.script, session.plan.examples
    title = "Tokenizing train"
    for part in range(TOKENIZE_PARTS + 1):
        if part:
            _take_time(session, orders, script.tokenize_ms / TOKENIZE_PARTS)
        done = total * part // TOKENIZE_PARTS
        inbox.emit(Progress(id=title, title=title, done=done, total=total, unit="rows"))
    session.acts.perform("tokenize", session.state.step)
    inbox.emit(data_event(session, "train"))
    if script.valid_examples:
        inbox.emit(data_event(session, "valid"))
    else:
        inbox.emit(Log(level="info", code="no_validation", message="There is no validation data: evaluation is off."))


def data_event(session: Session, split: Literal["train", "valid"]) -> Data:
    """Report a split as the script has it."""
    script = session.script
    rows = session.plan.examples if split == "train" else script.valid_examples
    dropped = script.rows_dropped if split == "train" else {}
    length = script.tokens_per_example * 2
    return Data(
        split=split,
        rows_read=rows + sum(reason.count for reason in dropped.values()),
        rows_used=rows,
        rows_dropped=dropped,
        tokens=rows * length,
        trained_tokens=rows * script.tokens_per_example,
        length_histogram={str(1 << (length - 1).bit_length()): rows},
        padding_fraction=0.0,
    )
