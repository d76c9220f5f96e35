"""The script that a scripted engine acts out: its one list of keys, with their defaults and what they mean."""

import math
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from trainwire_protocol.errors import ConfigInvalid
from trainwire_protocol.events import Dropped, Level

Moment = Literal["load", "tokenize", "update", "boundary", "eval", "generate", "save", "final", "exit"]
Milliseconds = Annotated[float, Meta(ge=0, le=1e9)]
Number = float | Literal["nan", "inf", "-inf"]


class Act(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="do"):
    """Something that happens at a moment: `step` chooses the update (with `until`, a stretch of updates; without it,
    every one), `attempt` the process of the run."""

    at: Moment = "update"
    step: Annotated[int, Meta(ge=0)] | None = None
    until: Annotated[int, Meta(ge=0)] | None = None
    attempt: Annotated[int, Meta(ge=1)] | None = None

    def due(self, moment: str, step: int, attempt: int) -> bool:
        """Say whether the act belongs to this moment of this attempt."""
        if self.at != moment or self.attempt not in (None, attempt):
            return False
        return self.step is None or self.step <= step <= (self.step if self.until is None else self.until)


class MakeNonFinite(Act, tag="non_finite"):
    """The update's loss is not a number, so that it is skipped."""

    value: Literal["nan", "inf", "-inf"] = "nan"


class Sleep(Act, tag="sleep"):
    """Nothing happens for `ms`."""

    ms: Milliseconds


class Hang(Act, tag="hang"):
    """Nothing happens any more, until the process is killed, or for `orphan_ms` after its worker is gone."""

    orphan_ms: Milliseconds = 60_000


class AwaitOrder(Act, tag="await_order"):
    """Nothing happens until an order waits: sessions in which a client steers become repeatable."""


class Print(Act, tag="print"):
    """Text comes out of the process: from Python, from the C library, or from a child process."""

    text: str = "printed"
    by: Literal["python", "c", "child"] = "python"
    stream: Literal["stdout", "stderr"] = "stdout"
    repeat: Annotated[int, Meta(ge=1, le=10**7)] = 1


class Spawn(Act, tag="spawn"):
    """A child process stays behind for `ms` and holds stdout and stderr open."""

    ms: Milliseconds = 60_000.0


class Die(Act, tag="die"):
    """The process dies of a signal."""

    signal: Literal["SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE"] = "SIGKILL"


class Exit(Act, tag="exit"):
    """The process leaves at once, without a last report."""

    status: Annotated[int, Meta(ge=0, le=255)] = 1


class Fail(Act, tag="fail"):
    """What is being done fails with an error of the wire; at `save` and `final` the save, elsewhere the run."""

    code: str
    message: str = "It failed, as the script says."
    hint: str | None = None
    details: dict[str, Any] = {}


class Say(Act, tag="log"):
    """The engine reports a log event."""

    message: str
    level: Level = "info"
    code: str | None = None
    details: dict[str, Any] | None = None


class ShowProgress(Act, tag="progress"):
    """A longer piece of work reports how far it is: `total` units in `ms`."""

    title: str = "Working"
    total: Annotated[int, Meta(ge=1, le=10**6)] = 10
    unit: str = "rows"
    ms: Milliseconds = 0.0


class Flood(Act, tag="flood"):
    """Many events in a row; `per_second` 0 sends them as fast as possible."""

    events: Annotated[int, Meta(ge=1, le=10**8)]
    per_second: Annotated[float, Meta(ge=0)] = 0.0
    type: Literal["log", "progress"] = "log"


class Frame(Act, tag="frame"):
    """The channel gets bytes that are no report; after `half` of a frame the process leaves."""

    kind: Literal["garbage", "unknown_type", "missing_field", "bad_text", "half", "oversize"] = "garbage"


class CloseChannel(Act, tag="close_channel"):
    """The engine closes its end of the channel and goes on."""


AnyAct = (
    MakeNonFinite
    | Sleep
    | Hang
    | AwaitOrder
    | Print
    | Spawn
    | Die
    | Exit
    | Fail
    | Say
    | ShowProgress
    | Flood
    | Frame
    | CloseChannel
)


class Decay(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A curve: from `start` half of the way to `end` every `half_life` updates."""

    start: float = 3.0
    end: float = 0.5
    half_life: Annotated[float, Meta(gt=0)] = 8.0

    def at(self, step: int) -> float:
        """Give the value after an update, rounded so that it is the same on every machine."""
        left: float = 0.5 ** (step / self.half_life)
        return round(self.end + (self.start - self.end) * left, 6)


class Script(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a scripted run is like. Everything has a default: the empty script trains 20 updates an epoch."""

    examples: Annotated[int, Meta(ge=1, le=10**9)] | None = None
    valid_examples: Annotated[int, Meta(ge=0, le=10**9)] = 0
    epochs: Annotated[int, Meta(ge=1, le=10**6)] | None = None
    rows_dropped: dict[str, Dropped] = {}
    tokens_per_example: Annotated[int, Meta(ge=1, le=10**6)] = 32
    loss: list[Number] | Decay = Decay()
    valid_loss: list[Number] | Decay = Decay(3.1, 0.7, 8.0)

    clock: Literal["real", "scripted"] = "real"
    load_ms: Milliseconds = 0.0
    tokenize_ms: Milliseconds = 0.0
    step_ms: Milliseconds = 10.0
    eval_ms: Milliseconds = 0.0
    save_ms: Milliseconds = 0.0
    token_ms: Milliseconds = 0.0

    completion: str = "This is what the script lets the model say."
    base_completion: str = "This is what the base model says."
    completion_repeat: Annotated[int, Meta(ge=1, le=10**7)] = 1
    ignore_close: bool = False
    ignore_orders: bool = False
    acts: list[AnyAct] = []

    def loss_at(self, step: int) -> float:
        """Give the training loss of an update, from 1; a list goes on with its last value."""
        return _at(self.loss, step)

    def valid_loss_at(self, step: int) -> float:
        """Give the validation loss after an update."""
        return _at(self.valid_loss, step)


def _at(curve: list[Number] | Decay, step: int) -> float:
    if isinstance(curve, Decay):
        return curve.at(step)
    return float(curve[max(0, min(step, len(curve)) - 1)]) if curve else math.nan


def read_script(path: Path | None) -> Script:
    """Read a script from JSON, or from TOML if the file's name says so. Raises ConfigInvalid."""
    if path is None:
        return Script()
    try:
        raw = path.read_bytes()
        if path.suffix == ".toml":
            return msgspec.convert(tomllib.loads(raw.decode()), Script)
        return msgspec.json.decode(raw, type=Script)
    except OSError as error:
        raise ConfigInvalid(f"The script {path} cannot be read: {error.strerror}.") from None
    except (msgspec.DecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"The script {path} is wrong: {error}.", hint="See docs/scripted-engine.md.") from None
