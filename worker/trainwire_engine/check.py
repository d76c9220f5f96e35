"""Looks at a config's model and data without training: what `validate` answers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from trainwire_engine import memory
from trainwire_engine.describe import data_event, resolved
from trainwire_engine.estimate import Sizes, estimate, sizes
from trainwire_engine.failures import as_error
from trainwire_engine.feed import shapes_of_run
from trainwire_engine.optimizer import Optimizer
from trainwire_engine.prepare import choose_blas, load, locate, read_data, read_tokenizer, resolve
from trainwire_engine.reports import Reports
from trainwire_engine.samples import samples
from trainwire_engine.schedule import total_steps, warmup_steps
from trainwire_engine.state import TrainState
from trainwire_engine.step import UpdateStep
from trainwire_engine.values import check_values, try_prompts
from trainwire_protocol.channel import Check
from trainwire_protocol.config import Config
from trainwire_protocol.results import data_report


def check(order: Check, reports: Reports) -> None:
    """Answer with config, data report, estimate and samples, or with the error that a run would end with."""
    try:
        reports.answer(order.order, _checked(order, reports))
    except Exception as error:
        reports.refuse(order.order, as_error(error))


def _checked(order: Check, reports: Reports) -> dict[str, Any]:
    config = msgspec.convert(order.config, Config)
    prompts = check_values(config)
    choose_blas(order.blas)
    memory.configure()
    # The counter is the process's: what was looked at before is no part of this.
    memory.figures(reset_peak=True)
    tokenizer = read_tokenizer(locate(config, order, reports), config, None)
    try_prompts(prompts, tokenizer)
    model = load(config, None)
    train, valid, notices = read_data(config, tokenizer, model, reports.progress, reports)
    state = TrainState()
    config, rows = resolve(config, model, train)
    total = total_steps(config, state, rows.updates_per_epoch)
    if config.warmup_steps is None:
        config = msgspec.structs.replace(config, warmup_steps=warmup_steps(total))
    shapes = shapes_of_run(train, rows, config, total)
    splits = [data_event("train", train, config, rows, shapes)]
    if valid is not None:
        splits.append(data_event("valid", valid, config, None))
    reports.alive("compile")
    step = UpdateStep(model, Optimizer(config), config)

    def planned(budget: int) -> Sizes:
        run = msgspec.structs.replace(config, micro_batch_tokens=budget)
        shapes = shapes_of_run(train, rows, run, total)
        return sizes(train, rows, budget, total, step.lanes, shapes, packing=config.packing)

    evaluated = int(valid.lengths.sum()) * _evaluations(config, total) if valid is not None else 0
    return {
        "valid": True,
        "issues": [{"path": "", "code": notice.code, "message": notice.message} for notice in notices],
        "config": resolved(config, train),
        "data": [data_report(split) for split in splits],
        "total_steps": total,
        "trainable_parameters": model.trainable_parameters,
        "total_parameters": model.total_parameters,
        "estimate": asdict(estimate(model, step, planned, config, steps=total, evaluated_tokens=evaluated)),
        "samples": samples(train, tokenizer),
    }


def _evaluations(config: Config, total: int) -> int:
    return -(-total // config.eval_every) if config.eval_every else 0
