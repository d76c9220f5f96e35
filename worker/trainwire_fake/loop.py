"""The loop of a scripted run: the real engine's order of events, with scripted numbers."""

import math
from pathlib import Path

from trainwire_protocol import rundir
from trainwire_protocol.coalesce import perplexity
from trainwire_protocol.errors import NonFinite
from trainwire_protocol.events import Complete, EpochEnd, EpochStart, Generation, Log, Step

from .orders import Orders
from .plan import learning_rate
from .session import Session

ACTIVE_BYTES, CACHE_BYTES, PEAK_BYTES = 64 << 20, 16 << 20, 96 << 20


def train(session: Session, orders: Orders) -> None:
    """Train from the session's state to the end of the run. Raises Stopped, WorkerGone and TrainwireError."""
    state, plan, inbox = session.state, session.plan, session.inbox
    if session.config.eval_at_start and state.step == 0:
        _evaluate(session, orders)
    early = False
    inbox.alive("train", state.step)
    orders.serve()
    while state.step < plan.total_steps and not early:
        epoch = state.step // plan.updates_per_epoch + 1
        inbox.emit(EpochStart(epoch=epoch, total_epochs=plan.total_epochs, num_batches=plan.updates_per_epoch))
        epoch_end = epoch * plan.updates_per_epoch
        while state.step < min(epoch_end, plan.total_steps) and not early:
            _update(session, epoch)
            orders.count()
            early = _what_is_due(session, orders)
            inbox.alive("train", state.step)
            orders.serve()
        inbox.emit(
            EpochEnd(
                epoch=epoch,
                avg_loss=state.epoch_loss_sum / state.epoch_tokens if state.epoch_tokens else None,
                epoch_time_secs=round(state.epoch_time_ms / 1000.0, 6),
                updates=state.epoch_updates,
            )
        )
        state.epoch_loss_sum, state.epoch_tokens, state.epoch_updates, state.epoch_time_ms = 0.0, 0, 0, 0.0
    session.save(rundir.FINAL_NAME, "final")
    inbox.emit(
        Complete(
            total_steps=state.step,
            total_time_secs=round(state.time_ms / 1000.0, 6),
            reason="early_stopping" if early else "finished",
        )
    )


def _update(session: Session, epoch: int) -> None:
    state, plan, script, clock = session.state, session.plan, session.script, session.clock
    started = clock.now_ms()
    step = state.step + 1
    clock.wait(script.step_ms)
    scripted = session.acts.perform("update", step)
    loss = float(scripted) if scripted else script.loss_at(step)
    finite = math.isfinite(loss)
    tokens = plan.rows(step) * script.tokens_per_example if finite else 0
    elapsed = clock.now_ms() - started
    state.step = step
    state.time_ms += elapsed
    state.epoch_time_ms += elapsed
    state.epoch_updates += 1
    if finite:
        state.trained_tokens += tokens
        state.epoch_tokens += tokens
        state.epoch_loss_sum += loss * tokens
        state.skipped_in_a_row = 0
    else:
        state.skipped += 1
        state.skipped_in_a_row += 1
    peak = session.config.learning_rate or 1e-4
    session.inbox.step(
        Step(
            step=step,
            loss=loss,
            total_tokens=tokens,
            training_time_ms=round(elapsed, 3),
            updates=1,
            total_steps=plan.total_steps,
            epoch=epoch,
            epoch_progress=round(state.epoch_updates / plan.updates_per_epoch, 6),
            learning_rate=learning_rate(session.config, plan.horizon, step, peak),
            grad_norm=round(loss / 2, 6) if finite else loss,
            token_accuracy=round(math.exp(-loss), 6) if finite else None,
            perplexity=_six_digits(perplexity(loss)),
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
    )
    if not finite:
        _refuse_non_finite(session, loss)


def _six_digits(value: float | None) -> float | None:
    return value if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _refuse_non_finite(session: Session, loss: float) -> None:
    """Report an update that was skipped, and end the run when there were too many."""
    state, config = session.state, session.config
    session.inbox.emit(
        Log(
            level="warn",
            code="non_finite",
            message=f"The loss of update {state.step} is {loss}: the update was skipped.",
            details={"step": state.step, "rows": [f"scripted:{state.step}"]},
        )
    )
    in_a_row = state.skipped_in_a_row >= config.max_consecutive_non_finite
    if in_a_row or state.skipped >= config.max_non_finite:
        session.save(rundir.emergency_name(state.step), "emergency")
        count = f"{state.skipped_in_a_row} updates in a row" if in_a_row else f"{state.skipped} updates in all"
        raise NonFinite(
            f"The loss of {count} was not finite.", hint="Lower learning_rate, or look at the rows of the warnings."
        )


def _what_is_due(session: Session, orders: Orders) -> bool:
    """Evaluate, generate and save when it is time; true if the run ends early."""
    config, state = session.config, session.state
    last = state.step >= session.plan.total_steps
    early = False
    if session.script.valid_examples and config.eval_every and (state.step % config.eval_every == 0 or last):
        _evaluate(session, orders)
        early = 0 < config.early_stopping_patience <= state.evaluations_without_best
    if config.generate_every and state.step % config.generate_every == 0:
        _generate(session, orders)
    if config.save_every and state.step % config.save_every == 0 and not last:
        session.save_periodic()
    return early


def _evaluate(session: Session, orders: Orders) -> None:
    event = session.evaluate(None, orders.give_way)
    if event.best and session.config.keep_best and session.state.step:
        session.save(rundir.BEST_NAME, "best")


def _generate(session: Session, orders: Orders) -> None:
    prompts = session.config.prompts
    if isinstance(prompts, str):
        prompts = [line for line in Path(prompts).read_text().splitlines() if line.strip()]
    for index, prompt in enumerate(prompts):
        text, tokens, _ = session.generate(session.config.generate_max_tokens, orders.give_way)
        session.inbox.emit(
            Generation(index=index, prompt=prompt, completion=text, tokens=tokens, step=session.state.step)
        )
