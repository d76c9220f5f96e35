"""Checkpoints of a scripted run: small, whole by their manifest, and enough to resume from."""

import json
import math
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import msgspec

from trainwire_protocol import rundir
from trainwire_protocol.config import ON_RESUME, Config, OnResume
from trainwire_protocol.errors import ResumeRefused
from trainwire_protocol.events import CheckpointKind, Step

HISTORY_NAME = "step_history.msgpack"


class State(msgspec.Struct, kw_only=True):
    """All that a scripted run needs to go on; times in milliseconds, sums weighted by tokens."""

    engine: str = "fake"
    step: int = 0
    epoch: int = 1
    trained_tokens: int = 0
    time_ms: float = 0.0
    epoch_loss: float = 0.0
    epoch_tokens: int = 0
    epoch_updates: int = 0
    epoch_ms: float = 0.0
    best_loss: float | None = None
    worse_evaluations: int = 0
    evaluated_step: int = -1
    generated_step: int = -1
    skipped: int = 0
    skipped_in_row: int = 0
    horizon: int = 0
    given: dict[str, Any] = {}
    config: dict[str, Any] = {}

    def count(self, loss: float, tokens: int, ms: float) -> None:
        """Take note of an update; one without tokens was skipped."""
        self.step += 1
        self.epoch_updates += 1
        self.time_ms += ms
        self.epoch_ms += ms
        if not math.isfinite(loss):
            self.skipped += 1
            self.skipped_in_row += 1
            return
        self.skipped_in_row = 0
        self.trained_tokens += tokens
        self.epoch_tokens += tokens
        self.epoch_loss += loss * tokens

    def next_epoch(self) -> None:
        """Stand before the first update of the next epoch."""
        self.epoch += 1
        self.epoch_updates = self.epoch_tokens = 0
        self.epoch_loss = self.epoch_ms = 0.0

    def judge(self, loss: float) -> bool:
        """Take note of an evaluation: true if it is the best so far, which nan never is."""
        best = math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss)
        if best:
            self.best_loss, self.worse_evaluations = loss, 0
        else:
            self.worse_evaluations += 1
        return best


def write_checkpoint(
    run_dir: Path, name: str, kind: CheckpointKind, state: State, history: list[Step], created_ms: int
) -> tuple[Path, int]:
    """Write a checkpoint aside and rename it: its path and its size in bytes.

    A checkpoint of the same name, which an abandoned timeline left, is moved aside.
    """
    folder, aside = run_dir / name, run_dir / (rundir.TEMPORARY_PREFIX + name)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    (aside / "adapters.safetensors").write_bytes(_safetensors(state.step))
    (aside / "adapter_config.json").write_text('{"fine_tune_type": "lora"}\n')
    (aside / rundir.STATE_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(state)) + b"\n")
    (aside / HISTORY_NAME).write_bytes(msgspec.msgpack.encode(history))
    files = {
        path.name: rundir.FileEntry(path.stat().st_size, rundir.file_sha256(path)) for path in sorted(aside.iterdir())
    }
    manifest = rundir.Manifest(format=1, step=state.step, kind=kind, files=files, created_ms=created_ms)
    (aside / rundir.MANIFEST_NAME).write_bytes(msgspec.json.encode(manifest))
    if folder.exists():
        _move_aside(run_dir, folder)
    aside.rename(folder)
    return folder, sum(entry.size for entry in files.values())


def read_checkpoint(folder: Path) -> tuple[State, list[Step]]:
    """Read what `write_checkpoint` wrote. Raises ResumeRefused for another engine's checkpoint."""
    try:
        state = msgspec.json.decode((folder / rundir.STATE_NAME).read_bytes(), type=State)
        history = msgspec.msgpack.decode((folder / HISTORY_NAME).read_bytes(), type=list[Step])
    except (OSError, msgspec.DecodeError) as error:
        raise ResumeRefused(f"{folder} is no checkpoint of a scripted run: {error}.") from None
    return state, history


def check_config(state: State, config: Config) -> Config:
    """Give the config to go on with: what the checkpoint had, but for keys that were changed and may be.

    Raises ResumeRefused for the others.
    """
    now, values = msgspec.to_builtins(config), dict(state.config)
    for key, rule in ON_RESUME.items():
        if now[key] in (state.given.get(key), state.config.get(key)):
            continue
        accepted = rule is OnResume.FREE or (rule is OnResume.OVERRIDE and key in config.resume_override)
        if not accepted:
            raise ResumeRefused(
                f"The run cannot be resumed with another config: {key} was {state.config.get(key)!r} in the"
                f" checkpoint and is {now[key]!r} in the config.",
                changes={key: {"from": state.config.get(key), "to": now[key], "on_resume": rule.value}},
            )
        values[key] = now[key]
    return msgspec.convert({**values, "run_dir": now["run_dir"]}, Config)


def _move_aside(run_dir: Path, folder: Path) -> None:
    abandoned = run_dir / rundir.ABANDONED_NAME
    abandoned.mkdir(exist_ok=True)
    number = 1
    while (abandoned / f"{folder.name}-{number}").exists():
        number += 1
    os.rename(folder, abandoned / f"{folder.name}-{number}")


def _safetensors(step: int) -> bytes:
    """Make a file that any safetensors reader opens: one float32 number."""
    header = json.dumps({"step": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + struct.pack("<f", step)
