"""Finds what a split is read from: a file, a list of files, a folder with `train` and `valid` files, or the Hub."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from trainwire_engine.data.files import RowFile
from trainwire_engine.data.problems import unreadable
from trainwire_engine.data.tables import HubRows, ParquetRows, hub_splits
from trainwire_protocol.errors import DatasetInvalid

Split = Literal["train", "valid"]
Place = Path | HubRows
"""A data file, or a split of a Hub data set."""

SUFFIXES = (".jsonl.gz", ".json.gz", ".jsonl", ".json", ".parquet")

_NAMES: dict[Split, tuple[str, ...]] = {"train": ("train",), "valid": ("valid", "validation")}
_SHARD = r"(?:-(\d+)(?:-of-(\d+))?)?"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def train_places(data: str | Sequence[str]) -> list[Place]:
    """What to train on. Raises DatasetInvalid if something is missing or of an unknown kind."""
    places: list[Place] = []
    for entry in [data] if isinstance(data, str) else data:
        found = _in(entry, "train")
        if not found:
            raise DatasetInvalid(
                f"{entry} has no training data: no file train with one of the endings {', '.join(SUFFIXES)}.",
                hint="Name the training file train.jsonl, or give the file itself as data.",
                path=entry,
            )
        places += found
    if not places:
        raise DatasetInvalid("data names no file.", hint='Write for instance data = "train.jsonl".')
    return places


def valid_places(data: str | Sequence[str], valid_data: str | Sequence[str] | None) -> list[Place]:
    """What to evaluate on; nothing where there is nothing."""
    if valid_data is None:
        entries = [data] if isinstance(data, str) else data
        return [place for entry in entries if _holds_splits(entry) for place in _in(entry, "valid")]
    entries = [valid_data] if isinstance(valid_data, str) else valid_data
    return [place for entry in entries if os.path.lexists(entry) or _is_hub(entry) for place in _in(entry, "valid")]


def opened(place: Place) -> RowFile | ParquetRows | HubRows:
    """Make a place ready to be read."""
    if isinstance(place, HubRows):
        return place
    return ParquetRows(place) if place.suffix == ".parquet" else RowFile(place)


def _holds_splits(entry: str) -> bool:
    return Path(entry).is_dir() or _is_hub(entry)


def _is_hub(entry: str) -> bool:
    return not Path(entry).exists() and bool(_HUB_ID.fullmatch(entry)) and _stem(Path(entry)) is None


def _in(entry: str, split: Split) -> list[Place]:
    try:
        return _found(entry, split)
    except OSError as error:
        raise unreadable(entry, error) from None


def _found(entry: str, split: Split) -> list[Place]:
    path = Path(entry)
    if path.is_dir():
        return list(_in_folder(path, split))
    if _is_hub(entry):
        splits = hub_splits(entry)
        rows: list[Place] = [HubRows(f"{entry}[{name}]", splits[name]) for name in _NAMES[split] if name in splits]
        return rows[:1]
    return [_checked(path)]


def _in_folder(folder: Path, split: Split) -> list[Path]:
    for name in _NAMES[split]:
        pattern = re.compile(re.escape(name) + _SHARD)
        found = [(f, match) for f in folder.iterdir() if (match := pattern.fullmatch(_stem(f) or ""))]
        # By number, also where the numbers are not written equally long.
        found.sort(key=lambda item: (int(item[1][1] or -1), item[0].name))
        files = [file for file, _ in found]
        if len({f.name.removeprefix(_stem(f) or "") for f in files}) > 1:
            raise DatasetInvalid(
                f"{folder} has several files for {split}: {', '.join(f.name for f in files)}.",
                hint="Keep one of them, or list the files in the config.",
                path=str(folder),
            )
        if files:
            _check_shards(folder, files, [(match[1], match[2]) for _, match in found])
            return [_checked(file) for file in files]
    return []


def _check_shards(folder: Path, files: Sequence[Path], shards: Sequence[tuple[str | None, str | None]]) -> None:
    """Refuse shards that say how many they are, and of which one is missing, is there twice, or says another number."""
    totals = {total for _, total in shards}
    if totals == {None}:
        return
    total = max(int(total or 0) for total in totals)
    numbers = [int(number or -1) for number, _ in shards]
    if len(totals) > 1 or numbers not in ([*range(total)], [*range(1, total + 1)]):
        names = ", ".join(file.name for file in files[:20])
        raise DatasetInvalid(
            f"The shards in {folder} are not one whole set: {names}.",
            hint="Copy the missing ones, keep one set of shards, or list the files in the config.",
            path=str(folder),
        )


def _stem(path: Path) -> str | None:
    """A data file's name without its ending; None for other files."""
    for suffix in SUFFIXES:
        if path.name.endswith(suffix):
            return path.name.removesuffix(suffix)
    return None


def _checked(path: Path) -> Path:
    if path.is_symlink() and not path.exists():
        hint = "Put the file back that it names, or give the file itself."
        raise DatasetInvalid(f"{path} is a link that leads nowhere.", hint=hint, path=str(path))
    if not path.exists():
        hint = "Check the path; it is taken relative to the config file."
        raise DatasetInvalid(f"There is no data file {path}.", hint=hint, path=str(path))
    if not path.is_file():
        hint = "Write the rows into a file first."
        raise DatasetInvalid(f"{path} is no file that rows can be read from.", hint=hint, path=str(path))
    if _stem(path) is None:
        hint = f"Known are {', '.join(SUFFIXES)}."
        raise DatasetInvalid(f"{path} has an ending that is not known.", hint=hint, path=str(path))
    return path
