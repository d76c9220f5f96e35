"""What a tracker is, how one is found by its name, and how a run's events reach it."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

BUILT_IN = {"tensorboard": "tensorboard:TensorBoard", "wandb": "wandb:WeightsAndBiases"}
_NUMBERS = {
    "step": {
        "loss": "train/loss",
        "token_accuracy": "train/token_accuracy",
        "learning_rate": "train/learning_rate",
        "grad_norm": "train/grad_norm",
        "trained_tokens": "train/trained_tokens",
        "tokens_per_second": "speed/tokens_per_second",
        "padding_fraction": "speed/padding_fraction",
        "peak_bytes": "memory/peak_bytes",
        "active_bytes": "memory/active_bytes",
    },
    "eval_end": {
        "valid_loss": "valid/loss",
        "perplexity": "valid/perplexity",
        "token_accuracy": "valid/token_accuracy",
    },
}


@dataclass(frozen=True)
class RunInfo:
    """Which run it is; `config` is resolved, and None until the `init` event came."""

    run_dir: Path
    run_id: str
    run_name: str
    config: dict[str, Any]


class Tracker(Protocol):
    """Takes a run's events. It may be slow, block or fail: training does not notice."""

    def begin(self, run: RunInfo, resumed_from_step: int | None) -> None:
        """A process of the run has loaded; what was seen above `resumed_from_step` is void. Called per attempt."""

    def event(self, event: dict[str, Any]) -> None:
        """Any event of the log behind `begin`, as PROTOCOL.md has it."""

    def close(self, outcome: str | None) -> None:
        """The run is over: completed, stopped, failed, interrupted; None if its worker died without a word."""


def metrics(event: dict[str, Any]) -> dict[str, float]:
    """Give the numbers of a `step` or `eval_end` event under the names that the built-in trackers use.

    What was not finite is left out.
    """
    names = _NUMBERS.get(event["type"], {})
    return {name: event[field] for field, name in names.items() if isinstance(event.get(field), int | float)}


def load(name: str) -> Tracker:
    """Make a tracker by its name, or by `package.module:Class`. Raises ImportError or AttributeError."""
    module, _, attribute = BUILT_IN.get(name, name).partition(":")
    path = f"{__package__}.{module}" if name in BUILT_IN else module
    tracker: Tracker = getattr(importlib.import_module(path), attribute)()
    return tracker


class Follower:
    """Hands the events of a log to a tracker: `begin` at each `init`, `close` at the end of the last attempt."""

    def __init__(self, tracker: Tracker, run_dir: Path) -> None:
        self._tracker = tracker
        self._run_dir = run_dir
        self._attempt: dict[str, Any] = {}
        self._begun = False
        self.outcome: str | None = None
        """How the newest attempt ended; None while it goes on."""

    def take(self, event: dict[str, Any]) -> None:
        """Take the next event of the log."""
        if event["type"] == "attempt":
            self._attempt, self.outcome = event, None
        elif event["type"] == "init":
            info = RunInfo(self._run_dir, event["run_id"], event["run_name"], event["config"])
            self._tracker.begin(info, self._attempt.get("resumed_from_step"))
            self._begun = True
        if event["type"] == "end":
            self.outcome = event["outcome"]
        if self._begun:
            self._tracker.event(event)

    def close(self) -> None:
        """Say that nothing follows; a tracker that never began has nothing to close."""
        if self._begun:
            self._tracker.close(self.outcome)
