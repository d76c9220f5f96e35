"""Going on from a checkpoint: does it fit the config, the model and the data, and which value wins."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec

from trainwire_engine.model import Model
from trainwire_engine.snapshot import OPTIMIZER, read_weights
from trainwire_engine.state import FORMAT, DataMark, ModelMark, Saved, decode_saved
from trainwire_engine.step import UpdateStep
from trainwire_engine.tensors import load
from trainwire_protocol.config import FIELDS, ON_RESUME, Config, OnResume
from trainwire_protocol.errors import ResumeRefused
from trainwire_protocol.rundir import FINAL_NAME, STATE_NAME, read_manifest

JUDGED_BY_CONTENT = ("model", "data", "valid_data")
"""Keys whose values may be written differently as long as what they name is the same."""
ROW_KEYS = ("train_on", "chat_template", "chat_template_args", "max_seq_length", "on_overlong")
"""Keys that make other rows of both splits: a change of one of them that was accepted explains other data."""
OWN_KEYS = ("resume", "resume_override", "run_dir", "run_name")
"""Keys that belong to an attempt and not to the run: never taken from the checkpoint, and no change of it."""
HORIZON_KEYS = ("num_epochs", "max_steps", "batch_size", "data", "max_train_samples")
_SAMPLE = 64 << 10
_DEFAULTS = Config(model="", data="")


@dataclass(frozen=True)
class Change:
    """A key whose value differs from the checkpoint's."""

    key: str
    old: Any
    new: Any


@dataclass
class Past:
    """A checkpoint that a run goes on from; `config` has the values that win, `changes` those that were accepted."""

    folder: Path
    saved: Saved
    given: Config
    config: Config
    changes: list[Change] = field(default_factory=list)

    def check_model(self, mark: ModelMark) -> None:
        """Raise ResumeRefused if the checkpoint belongs to another base model, wherever the folders lie."""
        old = self.saved.model
        if old.fingerprint != mark.fingerprint:
            raise self._refused(
                f"{self.folder.name} belongs to the {old.model_type} model {old.folder}; the config names the"
                f" {mark.model_type} model {mark.folder}, whose files are others.",
                "Set model back, or choose another run_dir for a new run.",
                Change("model", old.folder, mark.folder),
            )

    def check_data(self, key: str, new: DataMark | None) -> None:
        """Compare a split's rows with the checkpoint's; raises ResumeRefused unless the change is accepted."""
        old = self.saved.train if key == "data" else self.saved.valid
        if (old and old.digest) == (new and new.digest):
            return
        change = Change(key, old and old.digest, new and new.digest)
        makers = ROW_KEYS if key == "valid_data" else (*ROW_KEYS, "data", "max_train_samples")
        explained = any(c.key in makers for c in self.changes)
        if not explained and key not in self.given.resume_override:
            raise self._refused(
                f"{key} has other rows than in {self.folder.name}: it was {_told(old)}, and is {_told(new)}.",
                f'Put the data back, or accept the change with resume_override = ["{key}"].',
                change,
            )
        self.changes.append(change)

    def adapt_position(self) -> None:
        """Keep the place in the epoch under an accepted change of batch_size: no example of it is left out."""
        old, state = self.saved.config["batch_size"], self.saved.state
        if old != self.config.batch_size:
            state.epoch_update = state.epoch_update * old // self.config.batch_size

    @property
    def moves_horizon(self) -> bool:
        """Whether the learning rate's schedule gets another length: the config asks for another end of the run."""
        return any(change.key in HORIZON_KEYS for change in self.changes)

    def restore(self, model: Model, step: UpdateStep) -> None:
        """Give the model and the optimizer what the checkpoint holds, bit for bit; raises ResumeRefused.

        Weights and state keep their order: sums over all of them (the gradient norm) depend on it in the last bit.
        """
        try:
            weights = read_weights(self.folder, model.trainable, model.method)
            stored = load(self.folder / OPTIMIZER)
        except (OSError, RuntimeError, ValueError) as error:
            raise ResumeRefused(f"{self.folder} cannot be read: {error}.", checkpoint=str(self.folder)) from None
        self._compare("trained weights", weights, model.trainable)
        self._compare("optimizer state", stored, step.state)
        model.set_trainable({name: weights[name] for name in model.trainable})
        step.state = {name: stored[name].astype(old.dtype) for name, old in step.state.items()}

    def _compare(self, what: str, found: Mapping[str, mx.array], wanted: Mapping[str, mx.array]) -> None:
        shapes, needed = ({name: list(a.shape) for name, a in arrays.items()} for arrays in (found, wanted))
        if shapes == needed:
            return
        name = min(n for n in shapes.keys() | needed.keys() if shapes.get(n) != needed.get(n))
        raise self._refused(
            f"The {what} of {self.folder} do not fit: {name} has the shape {shapes.get(name, 'none')} there and"
            f" {needed.get(name, 'none')} in this run ({len(shapes)} arrays against {len(needed)}).",
            "Model, method, optimizer and the lora_ keys must be those that the checkpoint was made with.",
        )

    def _refused(self, message: str, hint: str, *changes: Change) -> ResumeRefused:
        return _refused(self.folder, message, hint, changes)


def _told(mark: DataMark | None) -> str:
    return f"{mark.examples} examples with the hash {mark.digest[:12]}" if mark else "no rows"


def _refused(folder: Path, message: str, hint: str, changes: Sequence[Change] = ()) -> ResumeRefused:
    listed = {c.key: {"from": c.old, "to": c.new, "on_resume": ON_RESUME[c.key].value} for c in changes}
    details: dict[str, Any] = {"changes": listed} if listed else {}
    return ResumeRefused(message, hint=hint, checkpoint=str(folder), **details)


def open_past(folder: Path, given: Config) -> Past:
    """Read a checkpoint and settle the config; raises ResumeRefused if it does not fit or has nothing to do."""
    saved = read_saved(folder)
    check_not_finished(given, saved, folder)
    config, changes = settle(given, saved, folder)
    return Past(folder, saved, given, config, changes)


def read_saved(folder: Path) -> Saved:
    """Read where a checkpoint stood; raises ResumeRefused if it has nothing to go on from."""
    for name, what in ((STATE_NAME, "where it stood"), (OPTIMIZER, "the optimizer's state")):
        if not (folder / name).is_file():
            raise ResumeRefused(
                f"{folder} cannot be resumed: it has no {name}, which holds {what}.",
                hint=f"Begin a new run from its weights: start_from = {str(folder)!r}.",
                checkpoint=str(folder),
            )
    raw = (folder / STATE_NAME).read_bytes()
    try:
        version = msgspec.json.decode(raw, type=dict[str, Any]).get("format")
        if version == FORMAT:
            return decode_saved(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ResumeRefused(f"{folder / STATE_NAME} cannot be read: {error}.", checkpoint=str(folder)) from None
    raise ResumeRefused(
        f"{folder} was written in checkpoint format {version}; this version of trainwire reads format {FORMAT}.",
        hint="Resume it with the version that wrote it, or begin a new run with start_from.",
        checkpoint=str(folder),
        found=version,
        expected=FORMAT,
    )


def settle(given: Config, saved: Saved, folder: Path) -> tuple[Config, list[Change]]:
    """Decide the value of every key of a resumed run, and list the changes that were accepted.

    A key that says the same in the config as when the checkpoint's run was started keeps the value it had in
    the checkpoint: the one that `set` gave it, or that was computed. A key that was changed in the config takes
    its new value if it may change (`free`) or is named in `resume_override` (`override`); otherwise, and always
    for `fixed` keys, ResumeRefused names the key and both values.
    """
    before, now = saved.given, msgspec.to_builtins(given)
    values, changes, refused = dict(saved.config), list[Change](), list[Change]()
    for key in FIELDS:
        default = msgspec.to_builtins(getattr(_DEFAULTS, key))
        if now[key] == before.get(key, default) or now[key] == saved.config.get(key, default):
            continue
        values[key] = now[key]
        change = Change(key, saved.config.get(key, default), now[key])
        if key in JUDGED_BY_CONTENT or key in OWN_KEYS:
            continue
        accepted = ON_RESUME[key] is OnResume.FREE or (
            ON_RESUME[key] is OnResume.OVERRIDE and key in given.resume_override
        )
        (changes if accepted else refused).append(change)
    if refused:
        raise _refusal(refused, folder)
    for key in (*OWN_KEYS, *JUDGED_BY_CONTENT):
        values[key] = now[key]
    return msgspec.convert({key: value for key, value in values.items() if key in FIELDS}, Config), changes


def _refusal(refused: list[Change], folder: Path) -> ResumeRefused:
    parts = [f"{c.key} was {c.old!r} in {folder.name} and is {c.new!r} in the config" for c in refused]
    overridable = [c.key for c in refused if ON_RESUME[c.key] is OnResume.OVERRIDE]
    fixed = [c.key for c in refused if ON_RESUME[c.key] is OnResume.FIXED]
    hints = []
    if fixed:
        hints.append(
            f"{' and '.join(fixed)} cannot change within a run: set it back, or begin a new run with"
            f" start_from = {str(folder)!r}."
        )
    if overridable:
        listed = ", ".join(f'"{key}"' for key in overridable)
        hints.append(f"Set it back, or accept the change with resume_override = [{listed}].")
    return _refused(
        folder, f"The run cannot be resumed with another config: {'; '.join(parts)}.", " ".join(hints), refused
    )


def check_not_finished(given: Config, saved: Saved, folder: Path) -> None:
    """Raise ResumeRefused if the run had reached its end and was given no more to do.

    A run that nobody named the final checkpoint of died before it could say that it is complete: it says so now. The
    worker, which knows the log, refuses one that has said it.
    """
    manifest = read_manifest(folder)
    if manifest is None or manifest.kind != FINAL_NAME:
        return
    worse, had = saved.state.worse_evaluations, saved.config.get("early_stopping_patience") or 0
    stopped_early, patience = 0 < had <= worse, given.early_stopping_patience
    if given.max_steps:
        more = given.max_steps > max(saved.state.step, saved.config["max_steps"] if stopped_early else 0)
    else:
        more = given.num_epochs > saved.given["num_epochs"] or bool(saved.given["max_steps"])
    if more:
        # After an early stop the patience begins anew.
        saved.state.worse_evaluations = 0
    elif stopped_early and (not patience or patience > worse):
        return
    elif folder.parent != Path(given.run_dir or ".") or given.resume == str(folder):
        raise ResumeRefused(
            f"The run is finished: {folder} was written after {saved.state.step} updates.",
            hint="Raise num_epochs or max_steps (or the early_stopping_patience that ended it) to train on, or choose"
            " another run_dir for a new run.",
            checkpoint=str(folder),
            step=saved.state.step,
        )


def model_mark(model: Model) -> ModelMark:
    """Identify a base model by its config, and by the sizes, headers and samples of its weight files."""
    digest = hashlib.sha256((model.folder / "config.json").read_bytes())
    for path in sorted(model.folder.glob("model*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for place in (0, size // 3, size // 2, max(size - _SAMPLE, 0)):
                file.seek(place)
                digest.update(file.read(_SAMPLE))
    return ModelMark(str(model.folder), str(model.model_config.get("model_type", "")), digest.hexdigest())
