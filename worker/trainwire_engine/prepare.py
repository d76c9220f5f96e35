"""Builds the parts of a run from its config, or from a checkpoint and its config; reports what it finds."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime
from functools import partial
from pathlib import Path

import msgspec

from trainwire_engine import memory, native
from trainwire_engine.batches import Order, blank
from trainwire_engine.boundary import Boundary
from trainwire_engine.checkpoint import Saver
from trainwire_engine.data import Dataset, Notice, load_dataset
from trainwire_engine.describe import data_event, init_event, other_environment, versions
from trainwire_engine.failures import disk_error
from trainwire_engine.feed import Feed, shapes_of_run
from trainwire_engine.follow import Follower, Mute
from trainwire_engine.loop import Parts
from trainwire_engine.model import Model, load_model
from trainwire_engine.model_files import read_config, resolve_folder
from trainwire_engine.native import Native
from trainwire_engine.optimizer import Optimizer, Schedule
from trainwire_engine.orders import Control
from trainwire_engine.palette import Palette
from trainwire_engine.profile import ProfiledStep
from trainwire_engine.ranks import Alone
from trainwire_engine.reports import Reports
from trainwire_engine.resume import Past, model_mark, open_past
from trainwire_engine.room import Room
from trainwire_engine.save_lock import SAVE_LOCK_NAME, SaveLock
from trainwire_engine.saving import Saves
from trainwire_engine.schedule import Course, total_steps, warmup_steps
from trainwire_engine.segments import most_groups
from trainwire_engine.shapes import Shapes
from trainwire_engine.snapshot import Contents
from trainwire_engine.state import FORMAT, DataMark, ModelMark, Saved, Stopwatch, TrainState
from trainwire_engine.step import UpdateStep
from trainwire_engine.team import Team
from trainwire_engine.tidying import put_in_order
from trainwire_engine.tokenizer import Tokenizer
from trainwire_engine.values import check_values, try_prompts
from trainwire_engine.watch import Watch
from trainwire_protocol.channel import Begin, Check, EngineChannel
from trainwire_protocol.config import Config
from trainwire_protocol.errors import DatasetInvalid, ModelLoadFailed, Unsupported
from trainwire_protocol.folders import user_cache


def prepare(begin: Begin, channel: EngineChannel | Mute, reports: Reports, ranks: Alone) -> Parts:
    """Load model, tokenizer and data, go on from a checkpoint if there is one, and report `data` and `init`.

    Raises the errors of the protocol, and watch.Stopped.
    """
    reports.alive("load")
    stopwatch_start = time.perf_counter()
    given = msgspec.convert(begin.config, Config)
    run_dir = Path(given.run_dir or ".")
    if ranks.leads:
        tidy(run_dir)
    past = open_past(Path(begin.resume_from), given) if begin.resume_from else None
    watch = Watch(channel, reports, past, ranks)
    computing = choose_blas(begin.blas, past if past and past.saved.ranks == ranks.size else None)
    memory.configure()
    config = past.config if past else given
    prompts = check_values(config)
    folder = locate(config, begin, reports)
    tokenizer = read_tokenizer(folder, config, past)
    try_prompts(prompts, tokenizer)
    model = load(config, past)
    mark = model_mark(model)
    if past is not None:
        past.check_model(mark)
    watch.check()
    with ranks.in_turn():
        train, valid, notices = read_data(config, tokenizer, model, watch, reports)
    train_mark = DataMark(train.digest, len(train))
    valid_mark = DataMark(valid.digest, len(valid)) if valid is not None else None
    if past is not None:
        past.check_data("data", train_mark)
        past.check_data("valid_data", valid_mark)
        past.adapt_position()
    reports.alive("load")
    state = past.saved.state if past else TrainState()
    config, order = resolve(config, model, train)
    # An evaluation's batches are shared out, so all ranks have to make the same ones.
    config = msgspec.structs.replace(config, micro_batch_tokens=ranks.least(config.micro_batch_tokens or 0))
    if past is None or past.moves_horizon:
        state.horizon = total_steps(config, state, order.updates_per_epoch)
    if config.warmup_steps is None:
        config = msgspec.structs.replace(config, warmup_steps=warmup_steps(state.horizon))
    course = Course(state, config, order.updates_per_epoch)
    kind = partial(ProfiledStep, updates=begin.profile, report=reports.log) if begin.profile else UpdateStep
    step = kind(model, Optimizer(config), config, ranks)
    if past is not None:
        past.restore(model, step)
    agree(ranks, course, mark, train, valid)
    groups = most_groups(model.module) if config.packing else None
    shapes = shapes_of_run(train, order, config, state.horizon, ranks.size, groups)
    introduce(begin, course, model, train, valid, order, shapes, notices, computing, past, reports, ranks)
    passport = Saved(
        format=FORMAT,
        training_type="sft",
        run_id=begin.run_id,
        attempt=begin.attempt,
        created_ms=0,
        state=state,
        given=msgspec.to_builtins(given),
        config={},
        model=mark,
        tokenizer=tokenizer.digest,
        data_time=tokenizer.now.isoformat(),
        train=train_mark,
        valid=valid_mark,
        versions=versions(),
        native=computing,
        ranks=ranks.size,
        steps=[],
    )
    stopwatch = Stopwatch(state)
    state.elapsed_ms += (time.perf_counter() - stopwatch_start) * 1000
    lock = SaveLock(run_dir) if ranks.size > 1 else None
    room = Room(model, step, reports)
    saver = Saver(run_dir, state.step, lambda: course.config.max_checkpoints, lock=lock)
    own = past.folder if past and past.folder.parent == run_dir and not past.changes else None
    saves = Saves(course, step, Contents(model, tokenizer), saver, reports, stopwatch, passport, own, room)
    boundary = Boundary(course, model, tokenizer, valid, prompts, reports, saves, room, ranks)
    control: Control | Follower
    if isinstance(channel, Mute):
        assert isinstance(ranks, Team)
        control = Follower(ranks, boundary)
    else:
        control = Control(channel, reports, state, boundary, stopwatch, ranks)
        ranks.ask(control.calls)
    schedule = Schedule(config, state.horizon)
    feed = Feed(train, order, config, ranks, shapes)
    step.meanwhile = feed.look_ahead
    if isinstance(shapes, Palette):
        step.expect(blank(shapes.largest))
    return Parts(course, train, feed, step, schedule, boundary, control, reports, stopwatch, saves, model, ranks)


def agree(ranks: Alone, course: Course, mark: ModelMark, train: Dataset, valid: Dataset | None) -> None:
    """Wait until all ranks are ready; raises ModelLoadFailed or DatasetInvalid if theirs differ."""
    ranks.agree(mark.fingerprint, ModelLoadFailed("its model has other files than that of rank 0."))
    digests = f"{train.digest} {valid.digest if valid else ''} {course.state.step} {course.total_steps}"
    ranks.agree(digests, DatasetInvalid("its data or its checkpoint are others than those of rank 0."))


def choose_blas(wanted: str, past: Past | None = None) -> Native:
    """Set up the BLAS that was asked for, else that of the checkpoint, else the best; raises Unsupported."""
    try:
        if wanted == "auto" and past is not None:
            return native.prepare_like(past.saved.native)
        return native.prepare(wanted, past.saved.native.lanes if past else None)
    except ValueError as error:
        raise Unsupported(
            f"--blas: {error}.", hint="--blas auto takes the best that is found, --blas none MLX's own."
        ) from None


def tidy(run_dir: Path) -> None:
    """Put the run folder in order after a crash; raises DiskFull or IoError."""
    shared = (run_dir / SAVE_LOCK_NAME).exists()
    try:
        # A rank on another host may have outlived its run, and be saving still.
        with SaveLock(run_dir).held(wait=False) if shared else nullcontext(True) as mine:
            if mine:
                put_in_order(run_dir)
    except OSError as error:
        raise disk_error(f"The run folder {run_dir} cannot be put in order", error) from error


def locate(config: Config, begin: Begin | Check, reports: Reports) -> Path:
    """Find the model's folder, or fetch it; raises ModelLoadFailed, and Unsupported for one with code of its own."""
    if not Path(config.model).is_dir():
        reports.alive("download")
    folder = resolve_folder(config.model, config.revision)
    if read_config(folder).get("model_file") and not begin.trust_remote_code:
        raise Unsupported(
            f"The model in {folder} brings code of its own, which is not run unasked.",
            hint="If you trust it, start the worker with --trust-remote-code.",
        )
    reports.alive("load")
    return folder


def read_tokenizer(folder: Path, config: Config, past: Past | None) -> Tokenizer:
    """Read the tokenizer; a template that tells the time gets the time of the run's first attempt."""
    now = datetime.fromisoformat(past.saved.data_time) if past else None
    return Tokenizer.from_folder(folder, config.chat_template, config.chat_template_args, now)


def load(config: Config, past: Past | None) -> Model:
    """Load the model; on a resume its weights come from the checkpoint, and what it started from is not needed."""
    return load_model(msgspec.structs.replace(config, start_from=None) if past else config)


def read_data(
    config: Config, tokenizer: Tokenizer, model: Model, watch: Callable[[str, int, int, str], None], reports: Reports
) -> tuple[Dataset, Dataset | None, list[Notice]]:
    """Read both splits."""
    reports.alive("tokenize")
    notices: list[Notice] = []
    train = load_dataset(config, tokenizer, "train", watch, model.vocab_size, notices)
    assert train is not None
    return train, load_dataset(config, tokenizer, "valid", watch, model.vocab_size, notices), notices


def resolve(config: Config, model: Model, train: Dataset) -> tuple[Config, Order]:
    """Fill in what depends on model and machine, and make the order of the rows."""
    tokens = config.micro_batch_tokens or memory.default_micro_batch_tokens(
        model.model_config, config.method, config.max_seq_length
    )
    config = msgspec.structs.replace(config, micro_batch_tokens=tokens, cache_dir=config.cache_dir or str(user_cache()))
    order = Order(len(train), config.batch_size, config.seed, config.shuffle, config.group_by_length, train.lengths)
    return config, order


def introduce(
    begin: Begin,
    course: Course,
    model: Model,
    train: Dataset,
    valid: Dataset | None,
    order: Order,
    shapes: Shapes | Palette,
    notices: list[Notice],
    computing: Native,
    past: Past | None,
    reports: Reports,
    ranks: Alone,
) -> None:
    """Report what the run is about to do, and answer the order that began it."""
    reports.send(data_event("train", train, course.config, order, shapes))
    if valid is not None:
        reports.send(data_event("valid", valid, course.config, None))
    for notice in notices:
        reports.log("info" if notice.code == "no_validation" else "warn", notice.code, notice.message)
    reports.send(init_event(begin, course, model, train, computing.words))
    reports.answer(
        begin.order,
        {
            "run_id": begin.run_id,
            "run_dir": course.config.run_dir,
            "total_steps": course.total_steps,
            "resumed_from": begin.resume_from,
        },
    )
    if past is not None:
        reports.recall(past.saved.steps)
        if past.changes:
            listed = {change.key: {"from": change.old, "to": change.new} for change in past.changes}
            message = f"The run goes on with other values than {past.folder.name} has: {', '.join(listed)}."
            reports.log("warn", "resume_changed", message, listed)
        if other := other_environment(past.saved, computing, ranks.size):
            message = f"What computes is not what wrote {past.folder.name}: numbers may differ in their last bits."
            reports.log("info", "environment_changed", message, other)
