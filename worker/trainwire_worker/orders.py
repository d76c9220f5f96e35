"""What a command says, as an order to the engine."""

import os
import re
from pathlib import Path
from typing import Any

import msgspec

from trainwire_protocol import commands as c
from trainwire_protocol.channel import CheckpointOrder, EvalOrder, GenerateOrder, Order, SetOrder
from trainwire_protocol.config_load import check_settings
from trainwire_protocol.errors import BadParams, Unsupported
from trainwire_protocol.rundir import ABANDONED_NAME, BEST_NAME, FINAL_NAME, LOCK_NAME, LOG_NAME, read_manifest

from .request import CONFIG_NAME

_RESERVED = frozenset((LOG_NAME, LOCK_NAME, CONFIG_NAME, FINAL_NAME, BEST_NAME, ABANDONED_NAME))
_OF_THE_RUN = re.compile(r"(emergency-)?checkpoint-\d+")


def order_parameters(command: c.ClientCommand, run_dir: str | None, fixed: frozenset[str]) -> dict[str, Any]:
    """Give the parameters as the `command` event shows them; keys that are `fixed` stay as they are.

    Raises UnknownParam, BadParams or Unsupported for a setting or a name that cannot be.
    """
    if isinstance(command, c.Set):
        values = check_settings(command.values)
        for key in fixed.intersection(values):
            raise Unsupported(f"{key} stays as it is: the dialect promises a line for each update.", key=key)
        return {"values": values}
    if isinstance(command, c.SaveCheckpoint):
        if command.name is None:
            return {}
        _check_name(command.name, Path(run_dir or ""))
        return {"name": command.name}
    return {}


def _check_name(name: str, run_dir: Path) -> None:
    """Keep a checkpoint from taking a place in the run folder that is another's."""
    if name in _RESERVED or _OF_THE_RUN.fullmatch(name):
        raise BadParams(f"The name {name} is one that the run itself uses.", name=name)
    if os.path.lexists(run_dir / name) and read_manifest(run_dir / name) is None:
        raise BadParams(f"{run_dir / name} is there already and is no checkpoint.", name=name)


def make_order(command: c.ClientCommand, number: int, parameters: dict[str, Any]) -> Order:
    """Make the order for a command that takes effect at an update boundary and leaves the phase as it is."""
    if isinstance(command, c.Set):
        return SetOrder(order=number, values=parameters["values"])
    if isinstance(command, c.SaveCheckpoint):
        return CheckpointOrder(order=number, name=command.name)
    if isinstance(command, c.Eval):
        return EvalOrder(order=number, max_batches=command.max_batches)
    assert isinstance(command, c.Generate)
    return GenerateOrder(
        order=number,
        messages=None if command.messages is None else [msgspec.to_builtins(m) for m in command.messages],
        prompt=command.prompt,
        max_tokens=command.max_tokens,
        temperature=command.temperature,
        seed=command.seed,
        adapter=command.adapter,
    )
