"""How long a scripted run is and which learning rate it shows: the arithmetic of the config's keys."""

import math
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trainwire_protocol.config import Config

from .script import Script

DEFAULT_UPDATES = 20


@dataclass
class Plan:
    """The lengths of a run in updates, as the config and the script give them; `set` may change `total_steps`."""

    examples: int
    batch_size: int
    epochs: int
    total_steps: int
    horizon: int
    """Where the schedule ends; it stays when `max_steps` is set while training."""

    @property
    def updates_per_epoch(self) -> int:
        """Updates of a whole epoch; the last one may be smaller."""
        return -(-self.examples // self.batch_size)

    @property
    def total_epochs(self) -> int:
        """Epochs that are at least begun."""
        return max(1, -(-self.total_steps // self.updates_per_epoch))

    def rows(self, update: int) -> int:
        """Give the examples in an update of an epoch, counted from 1."""
        rest = self.examples - (self.updates_per_epoch - 1) * self.batch_size
        return rest if update == self.updates_per_epoch else self.batch_size

    def set_max_steps(self, max_steps: int, done: int = 0) -> None:
        """Move the end of the run, not before what is done; 0 counts by epochs."""
        self.total_steps = max(max_steps or self.epochs * self.updates_per_epoch, done)


def make_plan(config: Config, script: Script) -> Plan:
    """Work out the lengths of a run."""
    plan = Plan(
        examples=script.examples or DEFAULT_UPDATES * config.batch_size,
        batch_size=config.batch_size,
        epochs=script.epochs or config.num_epochs,
        total_steps=0,
        horizon=0,
    )
    plan.set_max_steps(config.max_steps)
    plan.horizon = plan.total_steps
    return plan


def resolve(config: Config, plan: Plan) -> Config:
    """Fill in the defaults that depend on model, data and machine."""
    warmup = config.warmup_steps if config.warmup_steps is not None else round(0.03 * plan.horizon)
    return msgspec.structs.replace(
        config,
        train_on=config.train_on or "assistant",
        warmup_steps=warmup,
        micro_batch_tokens=config.micro_batch_tokens or 2048,
        cache_dir=config.cache_dir or str(Path(config.run_dir or ".") / "cache"),
        learning_rate=config.learning_rate or 1e-4,
    )


def learning_rate(config: Config, horizon: int, step: int, peak: float) -> float:
    """Give the learning rate of an update, from 1, to nine digits, so that it is the same on every machine."""
    warmup, floor = config.warmup_steps or 0, config.min_learning_rate
    if step <= warmup:
        return _round(peak * step / warmup)
    done = min(1.0, (step - warmup) / max(1, horizon - warmup))
    if config.schedule == "constant":
        return _round(peak)
    share = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return _round(floor + (peak - floor) * share)


def _round(value: float) -> float:
    return float(f"{value:.9g}")
