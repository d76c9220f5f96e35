"""The loop of a scripted run: the real engine's order of events, with scripted numbers."""

import math
from pathlib import Path
from typing import Literal

from trainwire_protocol import rundir
from trainwire_protocol.coalesce import perplexity
from trainwire_protocol.errors import NonFinite
from trainwire_protocol.events import EpochEnd, EpochStart, Generation, Log, Step

from .orders import Orders
from .plan import learning_rate
from .session import Session, six_digits

ACTIVE_BYTES, CACHE_BYTES, PEAK_BYTES = 64 << 20, 16 << 20, 96 << 20
Reason = Literal["finished", "early_stopping"]


def train(session: Session, orders: Orders) -> Reason:
    """Train from the session's state to the end of the run, and say why it ended.

    At a boundary come, in this order: the evaluation and the generations that are due, the end of the epoch, the
    checkpoints, the orders, the end of the run. Raises Leave and TrainwireError.
    """
    state, plan, inbox = session.state, session.plan, session.inbox
    begun = 0
    while True:
        best = _do_due(session, orders)
        if state.epoch_updates >= plan.updates_per_epoch:
            _end_epoch(session)
            state.next_epoch()
        _save_due(session, best=best)
        session.acts.perform("boundary", state.step)
        orders.serve()
        if (reason := _ended(session)) is not None:
            if state.epoch_updates:
                _end_epoch(session)
            return reason
        inbox.alive("train", state.step)
        if begun != state.epoch:
            begun = state.epoch
            total = max(begun, plan.total_epochs)
            inbox.emit(EpochStart(epoch=begun, total_epochs=total, num_batches=plan.updates_per_epoch))
        _update(session)


def _ended(session: Session) -> Reason | None:
    if session.state.step >= session.plan.total_steps:
        return "finished"
    patience = session.config.early_stopping_patience
    return "early_stopping" if patience and session.state.worse_evaluations >= patience else None


def _do_due(session: Session, orders: Orders) -> bool:
    """Evaluate and generate when it is time; true if the evaluation was the best so far."""
    config, state = session.config, session.state
    last, best = _ended(session) is not None, False

    def every(interval: int) -> bool:
        if state.step == 0:
            return config.eval_at_start and interval > 0
        return interval > 0 and (last or state.step % interval == 0)

    if every(config.eval_every) and session.script.valid_examples and state.evaluated_step < state.step:
        best = session.evaluate(None, orders.give_way).best
        state.evaluated_step = state.step
    if every(config.generate_every) and state.generated_step < state.step:
        _generate(session, orders)
        state.generated_step = state.step
    return best


def _save_due(session: Session, *, best: bool) -> None:
    config, state = session.config, session.state
    last = _ended(session) is not None
    if config.save_every and state.step > session.start_step and not last and state.step % config.save_every == 0:
        session.save_due(rundir.checkpoint_name(state.step), "periodic")
    if best and config.keep_best:
        session.save_due(rundir.BEST_NAME, "best")


def _generate(session: Session, orders: Orders) -> None:
    prompts = session.config.prompts
    if isinstance(prompts, str):
        prompts = [line for line in Path(prompts).read_text().splitlines() if line.strip()]
    for index, prompt in enumerate(prompts):
        text, tokens, _ = session.generate(session.config.generate_max_tokens, orders.give_way)
        session.inbox.emit(
            Generation(index=index, prompt=prompt, completion=text, tokens=tokens, step=session.state.step)
        )


def _end_epoch(session: Session) -> None:
    state = session.state
    session.inbox.emit(
        EpochEnd(
            epoch=state.epoch,
            avg_loss=six_digits(state.epoch_loss / state.epoch_tokens) if state.epoch_tokens else None,
            epoch_time_secs=round(state.epoch_ms / 1000.0, 6),
            updates=state.epoch_updates,
        )
    )


def _update(session: Session) -> None:
    state, plan, script, clock = session.state, session.plan, session.script, session.clock
    started = clock.now_ms()
    step = state.step + 1
    clock.wait(script.step_ms)
    scripted = session.acts.perform("update", step)
    loss = float(scripted) if scripted else script.loss_at(step)
    finite = math.isfinite(loss)
    tokens = plan.rows(state.epoch_updates + 1) * script.tokens_per_example if finite else 0
    elapsed = clock.now_ms() - started
    state.count(loss, tokens, elapsed)
    peak = session.config.learning_rate or 1e-4
    event = Step(
        step=step,
        loss=loss,
        total_tokens=tokens,
        training_time_ms=round(elapsed, 3),
        updates=1,
        total_steps=plan.total_steps,
        epoch=state.epoch,
        epoch_progress=round(state.epoch_updates / plan.updates_per_epoch, 6),
        learning_rate=learning_rate(session.config, plan.horizon, step, peak),
        grad_norm=round(loss / 2, 6) if finite else loss,
        token_accuracy=six_digits(math.exp(-loss)) if finite else None,
        perplexity=six_digits(perplexity(loss)),
        trained_tokens=state.trained_tokens,
        tokens_per_second=round(1000.0 * tokens / elapsed, 3) if elapsed else 0.0,
        padding_fraction=0.0,
        micro_batches=1,
        data_time_ms=0.0,
        active_bytes=ACTIVE_BYTES,
        cache_bytes=CACHE_BYTES,
        peak_bytes=PEAK_BYTES,
        eta_ms=round((plan.total_steps - step) * state.time_ms / step),
        skipped=0 if finite else 1,
    )
    session.inbox.step(event, out=step % session.config.log_every == 0 or step >= plan.total_steps)
    if not finite:
        _guard(session, loss)


def _guard(session: Session, loss: float) -> None:
    """Report an update that was skipped; raises NonFinite when there were too many."""
    state, config = session.state, session.config
    rows = [f"scripted:{state.step}"]
    session.inbox.emit(
        Log(
            level="warn",
            code="non_finite",
            message=f"Update {state.step} was skipped: its loss is {loss}.",
            details={"step": state.step, "loss": loss, "rows": rows, "in_row": state.skipped_in_row},
        )
    )
    for key, count, kind in (
        ("max_consecutive_non_finite", state.skipped_in_row, "in a row"),
        ("max_non_finite", state.skipped, "in all"),
    ):
        if count >= getattr(config, key):
            raise NonFinite(
                f"{count} updates {kind} had a loss that is not finite; {key} is {count}.",
                hint="Lower learning_rate, or look at the rows that the log names.",
                step=state.step,
                key=key,
                rows=rows,
            )
