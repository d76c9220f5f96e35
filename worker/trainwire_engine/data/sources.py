"""Finds the files of a split: a file, a list of files, or a folder with `train` and `valid` files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from trainwire_engine.data.files import SUFFIXES
from trainwire_protocol.errors import DatasetInvalid

Split = Literal["train", "valid"]

_NAMES: dict[Split, tuple[str, ...]] = {"train": ("train",), "valid": ("valid", "validation")}
_SHARD = r"(-\d+(-of-\d+)?)?"


def train_files(data: str | Sequence[str]) -> list[Path]:
    """The files to train on. Raises DatasetInvalid if one is missing or of an unknown kind."""
    files: list[Path] = []
    for entry in [data] if isinstance(data, str) else data:
        path = Path(entry)
        if not path.is_dir():
            files.append(_checked(path))
            continue
        found = _in_folder(path, "train")
        if not found:
            raise DatasetInvalid(
                f"{path} has no file named train with one of the endings {', '.join(SUFFIXES)}.",
                hint="Name the training file train.jsonl, or give the file itself as data.",
                path=str(path),
            )
        files += found
    if not files:
        raise DatasetInvalid("data names no file.", hint='Write for instance data = "train.jsonl".')
    return files


def valid_files(data: str | Sequence[str], valid_data: str | Sequence[str] | None) -> list[Path]:
    """The files to evaluate on; none where there are none."""
    if valid_data is None:
        entries = [data] if isinstance(data, str) else data
        return [file for entry in entries if Path(entry).is_dir() for file in _in_folder(Path(entry), "valid")]
    files: list[Path] = []
    for entry in [valid_data] if isinstance(valid_data, str) else valid_data:
        path = Path(entry)
        if path.is_dir():
            files += _in_folder(path, "valid")
        elif path.exists():
            files.append(_checked(path))
    return files


def _in_folder(folder: Path, split: Split) -> list[Path]:
    for name in _NAMES[split]:
        pattern = re.compile(re.escape(name) + _SHARD)
        files = [f for f in sorted(folder.iterdir()) if (stem := _stem(f)) is not None and pattern.fullmatch(stem)]
        if len({f.name.removeprefix(_stem(f) or "") for f in files}) > 1 or len({_stem(f) for f in files}) < len(files):
            names = ", ".join(f.name for f in files)
            raise DatasetInvalid(
                f"{folder} has several files for {split}: {names}.",
                hint="Keep one of them, or list the files in the config.",
                path=str(folder),
            )
        if files:
            return files
    return []


def _stem(path: Path) -> str | None:
    """A data file's name without its ending; None for other files."""
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if path.name.endswith(suffix):
            return path.name.removesuffix(suffix)
    return None


def _checked(path: Path) -> Path:
    if not path.exists():
        raise DatasetInvalid(
            f"There is no data file {path}.",
            hint="Check the path; it is taken relative to the config file.",
            path=str(path),
        )
    if not path.is_file():
        raise DatasetInvalid(f"{path} is no file that can be read as rows.", path=str(path))
    if _stem(path) is None:
        raise DatasetInvalid(
            f"{path} has an ending that is not known.", hint=f"Known are {', '.join(SUFFIXES)}.", path=str(path)
        )
    return path
