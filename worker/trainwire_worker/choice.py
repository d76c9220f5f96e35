"""Which checkpoint a run goes on from, by its `resume` key, or why it is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from trainwire_protocol.config import ON_RESUME, Config, OnResume
from trainwire_protocol.errors import ResumeRefused
from trainwire_protocol.rundir import CheckpointInfo, defect, newest_whole_checkpoint, read_manifest

from .past import Past


def choose(config: Config, run_dir: Path, past: Past) -> tuple[CheckpointInfo | None, list[tuple[Path, str]]]:
    """Decide which checkpoint the run goes on from, by the `resume` key."""
    if config.resume == "never":
        if past.attempts:
            raise ResumeRefused(
                f"The run folder {run_dir} holds a run, and resume is never.",
                hint="Choose another run_dir, or add --overwrite to remove that run.",
            )
        return None, []
    if config.resume not in ("auto", "latest"):
        return _named(Path(config.resume)), []
    found, passed_over = newest_whole_checkpoint(run_dir)
    if config.resume == "latest" and found is None:
        raise ResumeRefused(f"The run folder {run_dir} has no whole checkpoint.", hint='Use resume = "auto".')
    if past.finished and past.config is not None:
        _check_raised(config, past.config, past.finished, run_dir)
    if found is None and past.config is not None:
        _check_same_run(config, past.config, run_dir)
    return found, passed_over


def _named(folder: Path) -> CheckpointInfo:
    manifest = read_manifest(folder)
    problem = defect(folder)
    if manifest is None or problem is not None:
        raise ResumeRefused(
            f"The checkpoint {folder} cannot be used: {problem}.",
            hint="`start_from` begins a new run from an adapter or weights alone.",
        )
    return CheckpointInfo(folder.absolute(), manifest)


def _check_raised(config: Config, before: Mapping[str, Any], reason: str, run_dir: Path) -> None:
    """Refuse to go on with a finished run unless its end was moved, or a patience that had ended it."""
    patience, had = config.early_stopping_patience, before.get("early_stopping_patience") or 0
    stopped_early = reason == "early_stopping"
    if stopped_early and (not patience or patience > had):
        return
    key = "max_steps" if config.max_steps else "num_epochs"
    was, now = before.get(key) or 0, getattr(config, key)
    if bool(before.get("max_steps")) == bool(config.max_steps) and now <= was:
        raised = f"{key} (it is {was})" + (f" or early_stopping_patience (it is {had})" if stopped_early else "")
        raise ResumeRefused(
            f"The run in {run_dir} {'was stopped early' if stopped_early else 'is finished'}.",
            hint=f"Raise {raised} to go on from its final checkpoint, or choose another run_dir.",
        )


def _check_same_run(config: Config, before: Mapping[str, Any], run_dir: Path) -> None:
    """Refuse another run's folder even where it has no checkpoint that could tell."""
    now = msgspec.to_builtins(config)
    for key, rule in ON_RESUME.items():
        if rule is OnResume.FIXED and key in before and now[key] is not None and before[key] != now[key]:
            raise ResumeRefused(
                f"The run folder {run_dir} holds another run: its {key} is {before[key]!r}, not {now[key]!r}.",
                hint="Choose another run_dir.",
            )
