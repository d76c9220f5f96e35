"""What is due when: the length of a run, and what happens after an update. Decisions only, no work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from trainwire_engine.state import TrainState
from trainwire_protocol.config import Config


@dataclass(frozen=True)
class Due:
    """What is to be done at an update boundary, in this order."""

    evaluate: bool
    generate: bool
    save: bool


def due(step: int, config: Config, *, last: bool) -> Due:
    """Say what is due once `step` updates are done.

    The last step is evaluated and generated from whatever the interval is; it is not saved, since the final
    checkpoint follows. Before the first update only `eval_at_start` makes something due.
    """
    if step == 0:
        start = config.eval_at_start
        return Due(start and config.eval_every > 0, start and config.generate_every > 0, False)

    def every(interval: int) -> bool:
        return interval > 0 and (last or step % interval == 0)

    return Due(every(config.eval_every), every(config.generate_every), not last and every(config.save_every))


def total_steps(config: Config, state: TrainState, updates_per_epoch: int) -> int:
    """Updates of the whole run, from where it stands: `max_steps`, or what is left of its epochs."""
    if config.max_steps:
        return max(config.max_steps, state.step)
    left = (config.num_epochs - state.epoch + 1) * updates_per_epoch - state.epoch_update
    return state.step + max(left, 0)


def warmup_steps(total: int) -> int:
    """The warm-up where the config names none: 3 % of the run."""
    return round(0.03 * total)


@dataclass
class Course:
    """Where the run stands, the settings in force (`set` replaces `config`), and what follows from both."""

    state: TrainState
    config: Config
    updates_per_epoch: int

    @property
    def total_steps(self) -> int:
        """Updates of the whole run."""
        return total_steps(self.config, self.state, self.updates_per_epoch)

    @property
    def total_epochs(self) -> int:
        """Passes over the data that the run begins."""
        by_steps = -(-self.total_steps // self.updates_per_epoch)
        return max(by_steps if self.config.max_steps else self.config.num_epochs, self.state.epoch)

    @property
    def ended(self) -> Literal["finished", "early_stopping"] | None:
        """Why the run ends here, or None if it goes on."""
        if self.state.step >= self.total_steps:
            return "finished"
        patience = self.config.early_stopping_patience
        return "early_stopping" if patience and self.state.worse_evaluations >= patience else None

    @property
    def due(self) -> Due:
        """What is due at this boundary."""
        return due(self.state.step, self.config, last=self.ended is not None)

    @property
    def reports_now(self) -> bool:
        """Whether the update reports collected so far go out after this update."""
        return self.state.step % self.config.log_every == 0 or self.state.step >= self.total_steps

    def mark(self) -> tuple[TrainState, Config]:
        """What a checkpoint of this moment holds; equal marks need no second checkpoint. Times do not count."""
        return msgspec.structs.replace(self.state, elapsed_ms=0.0, epoch_ms=0.0), self.config
