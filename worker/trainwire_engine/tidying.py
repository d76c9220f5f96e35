"""What earlier processes left in a run folder: half of a save, and checkpoints of a timeline that is abandoned."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from trainwire_engine.disk import Disk
from trainwire_protocol.rundir import ABANDONED_NAME, BEST_NAME, FINAL_NAME, TEMPORARY_PREFIX, read_manifest

REPLACED, REMOVING = ".replaced-", ".removing-"
"""Start of the names of a checkpoint that another one takes the place of, and of one that is being removed."""
_NAMED_BY_STEP = re.compile(r"(?:emergency-)?checkpoint-(\d{6,})")


def put_in_order(run_dir: Path, disk: Disk | None = None) -> list[str]:
    """Tidy up after a crash: remove what was half written, bring back what was being replaced; gives the names."""
    disk = disk or Disk()
    names = []
    with contextlib.suppress(FileNotFoundError):
        for folder in sorted(run_dir.iterdir()):
            name = folder.name
            if name.startswith(REPLACED) and not (run_dir / name.removeprefix(REPLACED)).exists():
                disk.rename(folder, run_dir / name.removeprefix(REPLACED))
            elif name.startswith((TEMPORARY_PREFIX, REMOVING, REPLACED)):
                disk.remove(folder)
            else:
                continue
            names.append(name)
    return names


def abandoned_checkpoints(run_dir: Path, start_step: int) -> list[Path]:
    """Find the checkpoints above the step that a run goes on from, broken ones included."""
    found = []
    with contextlib.suppress(OSError):
        for folder in sorted(run_dir.iterdir()):
            if folder.name.startswith(".") or folder.name == ABANDONED_NAME or not folder.is_dir():
                continue
            manifest = read_manifest(folder)
            named = _NAMED_BY_STEP.fullmatch(folder.name)
            if manifest is not None:
                step = manifest.step
            elif named or folder.name in (FINAL_NAME, BEST_NAME):
                step = int(named[1]) if named else start_step + 1
            else:
                continue
            if step > start_step:
                found.append(folder)
    return found
