"""What a run folder tells about its run, alive or not: one look for `status`, `runs` and `stop`."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainwire_client.log import Timeline
from trainwire_protocol.rundir import LOG_NAME, list_checkpoints, lock_holder, read_log

_KINDS = ("attempt", "init", "step", "eval_end", "status", "error", "end", "complete")
_VOID_KINDS = ("step", "eval_end")


@dataclass(frozen=True)
class Overview:
    """A run at a glance. `state` is the phase of a living worker, else how the last attempt ended.

    A worker that ended without a word has `died`; `orphan_pid` is then the engine that it left behind, if that still
    saves. `seconds` is the age of the last line.
    """

    run_dir: str
    run_id: str
    alive: bool
    pid: int | None
    orphan_pid: int | None
    state: str
    step: int
    total_steps: int
    loss: float | None
    valid_loss: float | None
    checkpoint: str | None
    error: str | None
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Give it as a JSON object."""
        return asdict(self)


def _last_events(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Give the last event of each kind that matters, void steps of abandoned timelines left out."""
    try:
        timeline = Timeline.of(run_dir / LOG_NAME)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    last = {}
    for event in read_log(run_dir, _KINDS):
        void = event["type"] in _VOID_KINDS and not timeline.holds(event["seq"], event["step"])
        # An evaluation by order may be of some rows only.
        ordered = event["type"] == "eval_end" and event.get("cause") is not None
        if not void and not ordered:
            last[event["type"]] = event
    return last


def look_at(run_dir: Path) -> Overview | None:
    """Read a run folder; None if it holds no run."""
    last = _last_events(run_dir)
    if "attempt" not in last:
        return None
    attempt = last["attempt"]
    started = int(attempt["seq"])

    def since(kind: str) -> dict[str, Any]:
        event = last.get(kind, {})
        return event if event.get("seq", 0) > started else {}

    held = lock_holder(run_dir)
    holder, orphan = (None, held) if held is not None and held.orphan else (held, None)
    end = since("end")
    if holder is not None:
        state = since("status").get("phase") or "loading"
    else:
        state = end.get("outcome") or "died"
    checkpoints = list_checkpoints(run_dir)
    newest = max(int(event["ts"]) for event in last.values())
    return Overview(
        run_dir=str(run_dir),
        run_id=attempt["run_id"],
        alive=holder is not None,
        pid=holder.pid if holder else None,
        orphan_pid=orphan.engine_pid if orphan else None,
        state=state,
        step=since("step").get("step", attempt.get("resumed_from_step") or 0),
        total_steps=last.get("init", {}).get("total_steps", 0),
        loss=last.get("step", {}).get("loss"),
        valid_loss=last.get("eval_end", {}).get("valid_loss"),
        checkpoint=str(checkpoints[0].path) if checkpoints else None,
        error=since("error").get("message"),
        seconds=max(0.0, time.time() - newest / 1000),
    )


def left_behind(overview: Overview) -> str | None:
    """Say that the engine of a dead worker is still there, and what to do; None if there is none."""
    if overview.orphan_pid is None:
        return None
    return (
        f"The engine that its worker left behind, process {overview.orphan_pid}, saves and leaves by itself; it takes"
        f" no orders. Wait for it, or end it with `kill -9 {overview.orphan_pid}`: then the last checkpoint counts."
    )


def find_runs(folder: Path) -> Iterator[Overview]:
    """Go through the runs in a folder and its subfolders, by name."""
    for log in sorted(folder.rglob(LOG_NAME)):
        overview = look_at(log.parent)
        if overview is not None:
            yield overview


def ago(seconds: float) -> str:
    """Say a time span in words."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{int(seconds)} s ago"


def number(value: float | None) -> str:
    """Show a loss."""
    return "–" if value is None else f"{value:.4f}"
