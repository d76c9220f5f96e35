"""Watches a run's loss: halves the learning rate when it is flat, and stops the run when it is good.

    python examples/lower_learning_rate.py my_run.toml --target 1.2 --window 50

It shows what a front end does with the Python client: launch, iterate over typed events, steer, wait.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainwire_client import ClientError, Init, Result, Run, Step, launch


@dataclass
class Plateau:
    """Compares the mean loss of two neighbouring windows of updates, each token counted once."""

    window: int
    min_improvement: float
    _losses: list[tuple[float, int]] = field(default_factory=list)

    def add(self, event: Step) -> None:
        """Take in an update; one without a finite loss says nothing."""
        if event.loss is not None and event.total_tokens:
            self._losses.append((event.loss, event.total_tokens))

    def _mean(self, part: Sequence[tuple[float, int]]) -> float:
        return sum(loss * tokens for loss, tokens in part) / sum(tokens for _, tokens in part)

    @property
    def loss(self) -> float | None:
        """The mean loss of the newest window, once it is full."""
        return self._mean(self._losses[-self.window :]) if len(self._losses) >= self.window else None

    @property
    def is_flat(self) -> bool:
        """Whether the newest window is hardly better than the one before it."""
        if len(self._losses) < 2 * self.window:
            return False
        before = self._mean(self._losses[-2 * self.window : -self.window])
        return before - self._mean(self._losses[-self.window :]) < self.min_improvement * before

    def restart(self) -> None:
        """Begin anew: losses under another learning rate are not compared."""
        self._losses.clear()


def steer(run: Run, plateau: Plateau, target: float, min_learning_rate: float) -> Result:
    """Follow the run to its end, and give its result."""
    peak = 0.0
    for event in run:
        match event:
            case Init(config=config):
                peak = config["learning_rate"]
            case Step(step=step):
                plateau.add(event)
                if plateau.loss is not None and plateau.loss <= target:
                    checkpoint = run.stop().checkpoint
                    print(f"step {step}: loss {plateau.loss:.3f} is good; saved {checkpoint}")
                    break
                if plateau.is_flat and peak / 2 >= min_learning_rate:
                    peak = run.set(learning_rate=peak / 2).applied["learning_rate"]
                    print(f"step {step}: the loss is flat; learning_rate is {peak:g} now")
                    plateau.restart()
    return run.wait().check()


def main() -> int:
    """Launch a run from a config file and steer it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="TOML file of the run")
    parser.add_argument("--target", type=float, default=0.5, help="stop at this mean loss, in nats a token")
    parser.add_argument("--window", type=int, default=50, help="updates whose mean loss is compared")
    parser.add_argument("--min-improvement", type=float, default=0.01, help="share below which the loss is flat")
    parser.add_argument("--min-learning-rate", type=float, default=1e-6)
    parser.add_argument("--worker-arg", action="append", default=[], help="argument of the worker, as in --offline")
    options = parser.parse_args()
    plateau = Plateau(options.window, options.min_improvement)
    with launch(options.config, worker_args=options.worker_arg, supervise=True) as run:
        try:
            result = steer(run, plateau, options.target, options.min_learning_rate)
        except ClientError as error:
            print(error, file=sys.stderr)
            return 1
    loss = result.metrics.get("loss")
    print(f"{result.outcome} at step {result.step}" + (f", last loss {loss:.3f}" if loss is not None else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
