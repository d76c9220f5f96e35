"""What a client says: the commands with their parameters, and the words that people type."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from .config import MAX_INT
from .events import CommandId

ConfigObject = Annotated[
    dict[str, Any], Meta(description="keys of the config; relative paths start at the worker's working folder")
]
# `$` alone would let a line feed at the end pass.
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$(?!\n)")]


class ClientCommand(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="cmd"):
    """An order or a question. `id` comes back in the response."""

    id: CommandId | None = None


class Validate(ClientCommand, tag="validate"):
    """Check a config and its data, and estimate memory and time, without training."""

    config: ConfigObject


class Start(ClientCommand, tag="start"):
    """Begin the run; answered when `init` is out."""

    config: ConfigObject
    resume: (
        Annotated[
            str, Meta(description="`auto`, `never`, `latest` or a checkpoint's folder; wins over the config's `resume`")
        ]
        | None
    ) = None
    overwrite: Annotated[
        bool, Meta(description="with `never`: remove the run that the folder holds, instead of refusing")
    ] = False
    linger: Annotated[bool, Meta(description="keep the model after completion, for `eval` and `generate`")] = False


class Pause(ClientCommand, tag="pause"):
    """Stand still at the next update boundary."""


class Resume(ClientCommand, tag="resume"):
    """Go on; with `steps`, for that many updates."""

    steps: Annotated[int, Meta(ge=1, le=MAX_INT, description="updates to run before the next pause")] | None = None


class SaveCheckpoint(ClientCommand, tag="checkpoint"):
    """Write a checkpoint now."""

    name: (
        Annotated[Name, Meta(description="of its folder, none that the run itself uses; else that of its step")] | None
    ) = None


class Stop(ClientCommand, tag="stop"):
    """End the run gracefully."""

    save: Annotated[bool, Meta(description="write a checkpoint first")] = True


class Set(ClientCommand, tag="set"):
    """Change keys while the run trains: all or nothing."""

    values: Annotated[dict[str, Any], Meta(description="at least one key that can be changed, with its new value")]


class Eval(ClientCommand, tag="eval"):
    """Evaluate now."""

    max_batches: (
        Annotated[
            int, Meta(ge=1, le=MAX_INT, description="batches of `batch_size` rows; else the config's `eval_batches`")
        ]
        | None
    ) = None


class ChatMessage(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: str
    content: str


class Generate(ClientCommand, tag="generate"):
    """Let the model answer; `adapter` false asks the base model."""

    messages: (
        Annotated[
            list[ChatMessage], Meta(min_length=1, description="a conversation; this or `prompt` is needed, not both")
        ]
        | None
    ) = None
    prompt: (
        Annotated[
            str, Meta(description="a user's turn where the model has a chat template, else the text to go on with")
        ]
        | None
    ) = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**20)] = 128
    temperature: Annotated[float, Meta(ge=0, le=100, description="0: always the likeliest token")] = 0.0
    seed: Annotated[int, Meta(ge=0, le=MAX_INT, description="the same seed draws the same tokens")] = 0
    adapter: Annotated[bool, Meta(description="false: the base model, without what was trained")] = True


class GetStatus(ClientCommand, tag="status"):
    """Give one snapshot of the run."""


class Replay(ClientCommand, tag="replay"):
    """Send lines of the log again."""

    from_seq: Annotated[int, Meta(ge=1, le=MAX_INT)] = 1
    to_seq: (
        Annotated[int, Meta(ge=1, le=MAX_INT, description="the last one; else the newest when the command came")] | None
    ) = None
    types: (
        Annotated[list[str], Meta(description="only events of these types; an unknown one is refused, `not_found`")]
        | None
    ) = None


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
