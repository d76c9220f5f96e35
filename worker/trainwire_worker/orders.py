"""What a command says, as an order to the engine."""

from typing import Any

import msgspec

from trainwire_protocol import commands as c
from trainwire_protocol.channel import CheckpointOrder, EvalOrder, GenerateOrder, Order, SetOrder
from trainwire_protocol.config_load import check_settings


def order_parameters(command: c.ClientCommand) -> dict[str, Any]:
    """Give the parameters as the `command` event shows them. Raises UnknownParam or BadParams for a bad setting."""
    if isinstance(command, c.Set):
        return {"values": check_settings(command.values)}
    if isinstance(command, c.SaveCheckpoint):
        return {} if command.name is None else {"name": command.name}
    return {}


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
