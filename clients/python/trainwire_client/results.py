"""What comes back: the answers of commands, and the result of a run."""

from typing import Any

import msgspec

from trainwire_protocol.events import Error, Outcome

from .errors import RunFailed


class Answer(msgspec.Struct, kw_only=True):
    """What every answer says: `at_seq` is the event that carried the effect, if there was one."""

    at_seq: int | None = None


class Started(Answer, kw_only=True):
    """The run is ready to train. `resumed_from` is the checkpoint it goes on from."""

    run_id: str = ""
    run_dir: str = ""
    total_steps: int = 0
    resumed_from: str | None = None


class Moved(Answer, kw_only=True):
    """Answer of `pause` and `resume`: at which step, and whether anything changed."""

    step: int
    changed: bool


class Saved(Answer, kw_only=True):
    """Answer of `checkpoint`: its folder, step and bytes; `changed` is false if it was there already."""

    path: str
    step: int
    bytes: int
    changed: bool


class Stopped(Answer, kw_only=True):
    """Answer of `stop`: how the run ended, and the checkpoint that holds its state."""

    outcome: str
    step: int
    checkpoint: str | None = None


class Applied(Answer, kw_only=True):
    """Answer of `set`: the new and the previous values, and the first update that uses them."""

    applied: dict[str, Any]
    previous: dict[str, Any]
    effective_step: int


class Evaluated(Answer, kw_only=True):
    """Answer of `eval`: the mean loss in nats over `tokens` trained tokens."""

    valid_loss: float | None
    tokens: int
    ms: float


class Generated(Answer, kw_only=True):
    """Answer of `generate`: the text and its length in tokens."""

    text: str
    tokens: int
    ms: float


class Snapshot(Answer, kw_only=True):
    """Answer of `status`. `fields` holds everything that the worker said, by its names on the wire."""

    phase: str
    activity: str
    step: int
    last_seq: int = 0
    fields: dict[str, Any] = {}


class Pong(Answer, kw_only=True):
    """Answer of `ping`: the worker's clock in ms since the epoch."""

    ts: int


class Rung(msgspec.Struct, frozen=True):
    """One rung of the shutdown ladder that was needed (`stop`, `stdin`, `terminate`, `kill`), and how long it took."""

    name: str
    seconds: float


class Result(msgspec.Struct, kw_only=True, frozen=True):
    """How a run ended.

    `outcome` is `completed`, `stopped`, `failed` or `interrupted`, `reason` says why in a word. `checkpoint` is the
    folder that a resume or an export takes. `metrics` holds the newest `step`, `loss` (nats) and the other numbers
    of the last step event, and `valid_loss`. `error` is the `error` event of a failed run. `restarts` counts what
    supervision did, `shutdown` what the client needed to end the worker.
    """

    outcome: Outcome
    reason: str
    step: int
    checkpoint: str | None
    exit_code: int
    resumable: bool
    resume_args: list[str]
    run_dir: str | None
    metrics: dict[str, float | None]
    error: Error | None = None
    restarts: int = 0
    shutdown: tuple[Rung, ...] = ()

    def check(self) -> "Result":
        """Give the result itself, or raise RunFailed if the run failed."""
        if self.outcome != "failed":
            return self
        code = self.error.code if self.error else self.reason
        hint = self.error.hint if self.error else None
        message = self.error.message if self.error else f"The run failed: {self.reason}."
        raise RunFailed(message, code=code, hint=hint, exit_code=self.exit_code)


ANSWERS: dict[str, type[Answer]] = {
    "start": Started,
    "pause": Moved,
    "resume": Moved,
    "checkpoint": Saved,
    "stop": Stopped,
    "set": Applied,
    "eval": Evaluated,
    "generate": Generated,
    "status": Snapshot,
    "ping": Pong,
}
"""The type of each command's answer; the others answer with the plain object."""


def read_answer(cmd: str, result: dict[str, Any], at_seq: int | None) -> Any:
    """Turn a response's result into its type; fields that this client does not know are left out."""
    kind = ANSWERS.get(cmd)
    if kind is None:
        return result
    fields = {**result, "at_seq": at_seq}
    if kind is Snapshot:
        fields["fields"] = result
    return msgspec.convert(fields, kind)
