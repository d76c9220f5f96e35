"""Weights & Biases. Needs the extra `wandb`; project, entity and mode come from its own `WANDB_…` variables."""

from typing import Any

import wandb

from .interface import RunInfo, metrics


class WeightsAndBiases:
    """One run there is one run here, also over resumes: the run_id is its id."""

    def __init__(self) -> None:
        self._run: Any = None

    def begin(self, run: RunInfo, resumed_from_step: int | None) -> None:
        """Begin the run, or go on with it."""
        if self._run is not None:
            return
        self._run = wandb.init(
            id=run.run_id,
            name=run.run_name,
            config=run.config,
            dir=str(run.run_dir),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def event(self, event: dict[str, Any]) -> None:
        """Log the numbers of an event, or an answer, over the run's own step."""
        found: dict[str, Any] = dict(metrics(event))
        if event["type"] == "generation":
            found[f"generation/{event['index']}"] = event["completion"]
        if found:
            self._run.log({"step": event["step"], **found})

    def close(self, outcome: str | None) -> None:
        """Finish the run; it failed if its worker says so or died."""
        self._run.finish(exit_code=0 if outcome in ("completed", "stopped", "interrupted") else 1)
