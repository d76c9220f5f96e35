"""The curves of a run, read from its log: only what counts, void steps of abandoned timelines left out."""

from dataclasses import dataclass
from pathlib import Path

from trainwire_client import ClientError, Series, history
from trainwire_protocol.rundir import read_log

MAX_POINTS = 2000
"""Points of a curve at most; more than a picture has pixels are put together, weighted by their tokens."""


@dataclass(frozen=True)
class Curves:
    """What is drawn of a run; `epochs` are the steps at which epochs ended, `checkpoints` (step, kind).

    Evaluations by order are not in it: they may be of some rows only.
    """

    run_dir: Path
    loss: Series
    learning_rate: Series
    tokens_per_second: Series
    valid_loss: Series
    epochs: list[int]
    checkpoints: list[tuple[int, str]]


def read_curves(run_dir: Path) -> Curves:
    """Read a run's curves. Raises ClientError if the folder holds no run."""
    series = history(run_dir, ("loss", "learning_rate", "tokens_per_second"), MAX_POINTS)
    valid: list[tuple[int, float | None]] = []
    epochs: list[int] = []
    checkpoints: list[tuple[int, str]] = []
    step, begun = 0, False
    for event in read_log(run_dir, ("attempt", "step", "epoch_end", "checkpoint", "eval_end")):
        if event["type"] == "attempt":
            begun = True
            # Whatever lies above was abandoned.
            step = event.get("resumed_from_step") or 0
            epochs = [at for at in epochs if at <= step]
            checkpoints = [(at, kind) for at, kind in checkpoints if at <= step]
            valid = [(at, loss) for at, loss in valid if at <= step]
        elif event["type"] == "epoch_end":
            epochs.append(step)
        elif event["type"] == "eval_end":
            if event.get("cause") is None:
                valid.append((event["step"], event["valid_loss"]))
        elif event["type"] == "checkpoint":
            if event["kind"] == "best":
                # There is one folder for the best: a later one replaces it.
                checkpoints = [mark for mark in checkpoints if mark[1] != "best"]
            checkpoints.append((event["step"], event["kind"]))
        else:
            step = event["step"]
    if not begun:
        raise ClientError(f"{run_dir} holds no run.")
    return Curves(
        run_dir.absolute(),
        series["loss"],
        series["learning_rate"],
        series["tokens_per_second"],
        Series([at for at, _ in valid], [loss for _, loss in valid]),
        epochs,
        checkpoints,
    )


def smoothed(values: list[float | None], window: int) -> list[float | None]:
    """Give the mean over a centred window; points that were not finite have no say."""
    half, result = window // 2, []
    for i in range(len(values)):
        near = [v for v in values[max(0, i - half) : i + half + 1] if v is not None]
        result.append(sum(near) / len(near) if near else None)
    return result
