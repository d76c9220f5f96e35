"""What the engine says about a run before its first update: its data, its parts, what it runs on."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import mlx.core as mx
import msgspec

from trainwire_engine import native
from trainwire_engine.batches import Order, plan
from trainwire_engine.data import Dataset
from trainwire_engine.model import Model
from trainwire_engine.native import Native
from trainwire_engine.palette import Palette
from trainwire_engine.schedule import Course
from trainwire_engine.shapes import Shapes
from trainwire_engine.state import Saved
from trainwire_protocol.channel import Begin
from trainwire_protocol.config import Config
from trainwire_protocol.events import Data, Init
from trainwire_protocol.version import VERSION

_PADDING_SAMPLE = 32
"""Updates whose batches are made to tell how much of them is padding."""


def data_event(
    split: Literal["train", "valid"],
    dataset: Dataset,
    config: Config,
    order: Order | None,
    shapes: Shapes | Palette | None = None,
) -> Data:
    """Report a split: what was read, used and left out, and the padding its batches will have in these shapes."""
    fields = dataset.report.as_dict()
    known = {field: fields[field] for field in Data.__struct_fields__ if field in fields}
    padding = expected_padding(dataset, config, order, shapes)
    return msgspec.convert({"type": "data", "split": split, "padding_fraction": padding, **known}, Data)


def expected_padding(
    dataset: Dataset, config: Config, order: Order | None, shapes: Shapes | Palette | None = None
) -> float:
    """Share of computed positions that hold no token, from a sample of the first epoch's updates, or, without an
    order, from rows sorted by length as an evaluation takes them."""
    if order is not None:
        updates = range(min(order.updates_per_epoch, _PADDING_SAMPLE))
        samples = [order.rows(0, update) for update in updates]
    else:
        by_length = sorted(range(min(len(dataset), 256)), key=lambda row: int(dataset.lengths[row]))
        samples = [by_length]
    computed = real = 0
    for rows in samples:
        for batch in plan(dataset, rows, config.micro_batch_tokens or 0, shapes, packing=config.packing):
            computed += batch.tokens.size
            real += batch.real_tokens
    return 1 - real / computed if computed else 0.0


def resolved(config: Config, train: Dataset) -> dict[str, Any]:
    """Give the config with every value resolved; `train_on` stays None where the data's files differ in it.

    A resume goes by the value that was given: the validation data may be of another kind than the training data.
    """
    return {**msgspec.to_builtins(config), "train_on": config.train_on or train.train_on}


def init_event(begin: Begin, course: Course, model: Model, train: Dataset, blas: str | None) -> Init:
    """Report that the run is ready to train; `config` has every value resolved."""
    config = course.config
    return Init(
        model=config.model,
        config=resolved(config, train),
        training_type="sft",
        run_id=begin.run_id,
        run_name=config.run_name or "",
        run_dir=config.run_dir or "",
        total_steps=course.total_steps,
        trainable_parameters=model.trainable_parameters,
        total_parameters=model.total_parameters,
        examples=len(train),
        start_step=course.state.step,
        device=device_name(),
        head="chunked" if model.head == "chunked" else "full",
        blas=blas,
    )


def device_name() -> str:
    """Name what MLX computes on."""
    info = mx.device_info()
    kind = "cpu" if mx.default_device() == mx.cpu else "gpu"
    name = info.get("device_name") or info.get("architecture") or platform.machine()
    return f"{kind}: {name}"


def versions() -> dict[str, str]:
    """Name what computes, for the checkpoint: another one may give other last bits."""
    found = {
        "device": device_name(),
        "trainwire": VERSION,
        "python": platform.python_version(),
        "platform": f"{sys.platform}-{platform.machine()}",
    }
    for package in ("mlx", "mlx-lm", "tokenizers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def other_environment(saved: Saved, computing: Native, ranks: int) -> dict[str, dict[str, Any]]:
    """List what computes otherwise than it did for a checkpoint, and so may give other last bits."""
    before: dict[str, Any] = {**saved.versions, "blas": saved.native.blas, "ranks": saved.ranks}
    now: dict[str, Any] = {**versions(), "blas": computing.blas, "ranks": ranks}
    if computing.path is not None and computing.lanes > native.cores():
        # The streams are as many as before; a BLAS gets no more threads than there are cores.
        before["cores"], now["cores"] = computing.lanes, native.cores()
    return {key: {"from": old, "to": now.get(key)} for key, old in before.items() if old != now.get(key)}
