"""What is to be run: the config of a file and its words, or of a `start` command, checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from trainwire_protocol.config import Config
from trainwire_protocol.config_load import build_config, parse_assignment, read_config_file
from trainwire_protocol.errors import ConfigInvalid, ForbiddenPath

from .options import Options

CONFIG_NAME = "config.json"
"""Copy of the config in the run folder, by which a run can be resumed without the file it came from."""


@dataclass
class Request:
    """What is to be run: the checked config, and how to treat a run that the folder holds."""

    config: Config
    overwrite: bool
    linger: bool
    resume_args: list[str]
    remark: str | None = None


def request_from_arguments(options: Options) -> Request:
    """Read the config of `trainwire run`. Raises ConfigInvalid."""
    path = options.config
    assert path is not None
    if path.suffix == ".json":
        values = _read_json(path)
    else:
        values = read_config_file(path)
    for word in options.assignments:
        key, value = parse_assignment(word)
        values[key] = value
    if options.resume is not None:
        values["resume"] = options.resume
    config = build_config(values, path.absolute().parent, run_name=path.stem)
    arguments = ["run", str(path.absolute()), *options.assignments]
    return Request(config, options.overwrite, options.linger, arguments)


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
    config = build_config(merged, Path.cwd())
    paths = [config.model, config.run_dir, config.start_from, config.cache_dir]
    for data in (config.data, config.valid_data):
        paths += data if isinstance(data, list) else [data]
    if isinstance(config.prompts, str):
        paths.append(config.prompts)
    if config.resume not in ("auto", "never", "latest"):
        paths.append(config.resume)
    if config.chat_template and "{" not in config.chat_template:
        paths.append(config.chat_template)
    check_paths([path for path in paths if path is not None], options.root)
    assert config.run_dir is not None
    return Request(config, overwrite, linger, ["run", str(Path(config.run_dir) / CONFIG_NAME)])


def check_paths(paths: list[str], root: Path | None) -> None:
    """Refuse paths from stdin that are `-`, hold a NUL, or leave `root` once links are resolved."""
    for text in paths:
        if text == "-" or "\0" in text or not text:
            raise ConfigInvalid(f"{text!r} is no path.")
        if root is not None and not Path(text).resolve().is_relative_to(root.resolve()):
            raise ForbiddenPath(f"{text} is outside {root}.", path=text, root=str(root))
