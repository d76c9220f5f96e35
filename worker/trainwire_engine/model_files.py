"""Finds a model's folder, here or on the Hub, and reads what its config.json says."""

from __future__ import annotations

import json
import math
import os
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from trainwire_protocol.errors import NO_PERMISSION, ModelLoadFailed

HUB_FILES = ["*.json", "model*.safetensors", "*.py", "tokenizer.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja"]


def resolve_folder(model: str, revision: str | None) -> Path:
    """Find the folder of a model: a path as it is, a Hub id through the Hub's cache; raises ModelLoadFailed."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    looks_like_path = folder.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1
    if looks_like_path or folder.exists():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise ModelLoadFailed(
            f"The model folder {model} {what}.",
            hint="`model` is a folder with config.json and *.safetensors files, or a Hub id such as org/name.",
            path=model,
        )
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, allow_patterns=HUB_FILES))
    except Exception as error:
        raise ModelLoadFailed(
            f"The model {model} is no folder here and could not be fetched from the Hub: {first_line(error)}",
            hint="Check the name, the network and, for a gated model, HF_TOKEN; or give a local folder.",
            path=model,
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """Read the folder's config.json; raises ModelLoadFailed, also for another file of it that may not be read."""
    path = folder / "config.json"
    try:
        _check_permissions(folder)
        config = json.loads(path.read_bytes(), object_hook=_untag_floats)
    except FileNotFoundError:
        raise ModelLoadFailed(
            f"The model folder {folder} has no config.json.",
            hint="Give the folder that holds config.json, the *.safetensors files and the tokenizer.",
            path=str(folder),
        ) from None
    except (OSError, ValueError) as error:
        raise ModelLoadFailed(f"{path} cannot be read: {first_line(error)}", path=str(path)) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelLoadFailed(
            f"{path} names no model_type.",
            hint="The folder is not one of a language model in mlx-lm's or transformers' layout.",
            path=str(path),
        )
    return config


def _check_permissions(folder: Path) -> None:
    """Name a file that may not be read; libraries would say something else of it."""
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except PermissionError:
        raise _forbidden(folder) from None
    for name in names:
        needed = any(fnmatch(name, pattern) for pattern in HUB_FILES)
        if needed and not os.access(folder / name, os.R_OK) and (folder / name).exists():
            raise _forbidden(folder / name)


def _forbidden(path: Path) -> ModelLoadFailed:
    return ModelLoadFailed(f"{path} cannot be read: permission denied.", hint=NO_PERMISSION, path=str(path))


def _untag_floats(value: dict[str, Any]) -> Any:
    """Undo transformers' way of writing non-finite floats in JSON."""
    if set(value) == {"__float__"}:
        return {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}.get(value["__float__"], value)
    return value


def first_line(error: BaseException) -> str:
    """Give an exception's kind and the first line of its text."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__
