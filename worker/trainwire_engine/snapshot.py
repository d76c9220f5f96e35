"""What a checkpoint holds: weights that mlx-lm loads, the tokenizer, and what a resume needs besides."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from trainwire_engine.model import Model
from trainwire_engine.tensors import Tensors, lay_out, load
from trainwire_protocol.rundir import STATE_NAME

ADAPTERS, ADAPTER_CONFIG = "adapters.safetensors", "adapter_config.json"
WEIGHTS, MASTERS, OPTIMIZER = "model.safetensors", "masters.safetensors", "optimizer.safetensors"


@dataclass(frozen=True)
class Snapshot:
    """The files of a checkpoint as they are to be, by name; later updates do not change it.

    It holds the arrays of the update it was taken after, so it costs memory only once the next update is made; of
    weights that are joined to long arrays it holds copies.
    """

    step: int
    files: dict[str, bytes | Tensors]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(c.size if isinstance(c, Tensors) else len(c) for c in self.files.values())

    def chunks(self, name: str) -> Iterable[bytes | memoryview]:
        """Give a file's content, piece by piece."""
        content = self.files[name]
        return content.chunks() if isinstance(content, Tensors) else (content,)


class Contents:
    """Takes snapshots of a run; what never changes in it (tokenizer, template, configs) is read once."""

    def __init__(self, model: Model, tokenizer: Any) -> None:
        self._model = model
        self._small: dict[str, bytes | Tensors] = {}
        with tempfile.TemporaryDirectory(prefix="trainwire-") as folder:
            tokenizer.save(folder)
            for file in sorted(Path(folder).iterdir()):
                self._small[file.name] = file.read_bytes()
        if model.method == "full":
            self._small["config.json"] = (model.folder / "config.json").read_bytes()
        self._small[ADAPTER_CONFIG] = _json(model.adapter_config())

    def take(self, step: int, optimizer: dict[str, mx.array], state: bytes) -> Snapshot:
        """Take one after an update: weights, masters that the saved weights would round, optimizer and state."""
        model = self._model
        files = dict(self._small)
        files[ADAPTERS if model.method != "full" else WEIGHTS] = lay_out(model.tensors_to_save())
        masters = model.exact_masters()
        if masters:
            files[MASTERS] = lay_out(masters)
        files[OPTIMIZER] = lay_out(optimizer)
        files[STATE_NAME] = state
        return Snapshot(step, files)


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"


def read_weights(folder: Path, names: Iterable[str], method: str) -> dict[str, mx.array]:
    """Read the trained weights of a checkpoint exactly as they were, in the order of `names`.

    A name that the files lack is left out. Raises OSError or RuntimeError for a file that cannot be read.
    """
    if method != "full":
        found = load(folder / ADAPTERS)
    else:
        found = load(folder / WEIGHTS)
        if (folder / MASTERS).exists():
            found |= load(folder / MASTERS)
    return {name: found[name] for name in names if name in found}
