"""What is to be run: the config of a file and its words, or of a `start` command, checked."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import orjson

from trainwire_protocol.config import Config
from trainwire_protocol.config_load import build_config, check_size, parse_assignment, read_config_file
from trainwire_protocol.errors import ConfigInvalid, ForbiddenPath

from .options import Options, words_of_the_run

CONFIG_NAME = "config.json"
"""Copy of the config in the run folder, by which a run can be resumed without the file it came from."""


_WORDS_OF_RESUME = ("auto", "never", "latest")
_PATHS = ("model", "data", "valid_data", "run_dir", "start_from", "cache_dir", "prompts", "resume", "chat_template")


class Request(msgspec.Struct):
    """What is to be run: the checked config, and how to treat a run that the folder holds."""

    config: Config
    overwrite: bool
    linger: bool
    resume_args: list[str]


def request_from_arguments(options: Options) -> Request:
    """Read the config of `trainwire run`. Raises ConfigInvalid."""
    path = options.config
    assert path is not None
    values = _read_json(path) if path.suffix == ".json" else read_config_file(path)
    for word in options.assignments:
        key, value = parse_assignment(word)
        values[key] = value
    if options.resume is not None:
        values["resume"] = options.resume
    config = _build(values, options, path, run_name=path.stem)
    words = ["run", str(path.absolute()), *options.assignments]
    if config.resume != "auto":
        words.append("resume=auto")
    return Request(config, options.overwrite, options.linger, words + words_of_the_run(options, linger=options.linger))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ConfigInvalid(f"The config file {path} cannot be read: {error.strerror}.") from None
    except orjson.JSONDecodeError as error:
        raise ConfigInvalid(f"The config file {path} is not JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ConfigInvalid(f"The config file {path} holds no JSON object.")
    return values


def request_from_command(
    values: Mapping[str, Any], options: Options, *, resume: str | None, overwrite: bool, linger: bool
) -> Request:
    """Check the config of a `start` or `validate` command. Raises ConfigInvalid or ForbiddenPath."""
    merged = {**values, **({"resume": resume} if resume is not None else {})}
    for key in _PATHS:
        for text in _texts(merged.get(key)):
            if text == "-" or "\0" in text:
                hint = "A path is the name of a file or a folder."
                raise ForbiddenPath(f"{key} = {text[:64]!r} is no path.", hint=hint, path=text[:256])
    config = _build(merged, options, None, run_name="run")
    if options.root is not None:
        for key in _PATHS:
            for text in _texts(getattr(config, key)):
                _check_below(options.root, key, text)
    assert config.run_dir is not None
    words = ["run", str(Path(config.run_dir) / CONFIG_NAME), *words_of_the_run(options, linger=linger)]
    return Request(config, overwrite, linger, words)


def _build(values: Mapping[str, Any], options: Options, file: Path | None, *, run_name: str) -> Config:
    try:
        base = Path.cwd() if file is None else file.absolute().parent
        config = build_config(values, base, run_name=run_name)
        check_size(config, options.max_line)
    except OSError as error:
        name = f"{str(error.filename)[:256]}: " if error.filename else ""
        raise ConfigInvalid(f"A path of the config cannot be used: {name}{error.strerror or error}.") from None
    except (ValueError, RuntimeError) as error:
        raise ConfigInvalid(f"The config cannot be used: {error}.") from None
    # That view is promised a line for each update.
    return msgspec.structs.replace(config, log_every=1) if options.dialect == "mlx-tui" else config


def _texts(value: Any) -> list[str]:
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]


def _check_below(root: Path, key: str, text: str) -> None:
    """Refuse a path from stdin that leaves `root` once links are resolved; the words and Hub ids of a key are none."""
    if not Path(text).is_absolute() or (key == "resume" and text in _WORDS_OF_RESUME):
        return
    try:
        below = Path(text).resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError):
        below = False
    if not below:
        raise ForbiddenPath(f"{key} = {text[:256]} is outside {root}.", path=text[:256], root=str(root))
