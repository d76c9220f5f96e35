"""What a client says: the commands with their parameters, and the words that people type."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from .config import MAX_INT
from .events import CommandId

# `$` alone would let a line feed at the end pass.
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$(?!\n)")]


class ClientCommand(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="cmd"):
    """An order or a question. `id` comes back in the response."""

    id: CommandId | None = None


class Validate(ClientCommand, tag="validate"):
    """Check a config and its data, and estimate memory and time, without training."""

    config: dict[str, Any]


class Start(ClientCommand, tag="start"):
    """Begin the run; answered when `init` is out."""

    config: dict[str, Any]
    resume: str | None = None
    overwrite: bool = False
    linger: bool = False


class Pause(ClientCommand, tag="pause"):
    """Stand still at the next update boundary."""


class Resume(ClientCommand, tag="resume"):
    """Go on; with `steps`, for that many updates."""

    steps: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None


class SaveCheckpoint(ClientCommand, tag="checkpoint"):
    """Write a checkpoint now."""

    name: Name | None = None


class Stop(ClientCommand, tag="stop"):
    """End the run gracefully."""

    save: bool = True


class Set(ClientCommand, tag="set"):
    """Change keys while the run trains: all or nothing."""

    values: dict[str, Any]


class Eval(ClientCommand, tag="eval"):
    """Evaluate now."""

    max_batches: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None


class ChatMessage(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: str
    content: str


class Generate(ClientCommand, tag="generate"):
    """Let the model answer; `adapter` false asks the base model."""

    messages: list[ChatMessage] | None = None
    prompt: str | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**20)] = 128
    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    seed: Annotated[int, Meta(ge=0, le=MAX_INT)] = 0
    adapter: bool = True


class GetStatus(ClientCommand, tag="status"):
    """Give one snapshot of the run."""


class Replay(ClientCommand, tag="replay"):
    """Send lines of the log again."""

    from_seq: Annotated[int, Meta(ge=1, le=MAX_INT)] = 1
    to_seq: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    types: list[str] | None = None


class Detach(ClientCommand, tag="detach"):
    """Let the run go on when this front end leaves, whatever `--on-eof` and `--on-detach` say."""


class Ping(ClientCommand, tag="ping"):
    """Ask for a sign of life."""


COMMANDS: dict[str, type[ClientCommand]] = {str(c.__struct_config__.tag): c for c in ClientCommand.__subclasses__()}
"""Every command by its name on the wire."""

WORDS: dict[str, str] = {
    "PAUSE": "pause",
    "RESUME": "resume",
    "SAVE_CHECKPOINT": "checkpoint",
    "STOP": "stop",
    "SET": "set",
}
"""The words that people type, each with the command it stands for."""

ORDERS: tuple[str, ...] = ("start", "pause", "resume", "checkpoint", "stop", "set")
"""The commands that change the run: each is recorded as a `command` event once it is accepted."""
