"""What the worker says: the events of a run, one type for each kind of line."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from .config import MAX_INT

Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
CommandId = Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)] | Annotated[str, Meta(max_length=128)]
Phase = Literal["idle", "loading", "preparing", "running", "pausing", "paused", "stopping", "lingering", "ended"]
Activity = Literal["none", "download", "load", "tokenize", "compile", "train", "eval", "checkpoint", "generate"]
CheckpointKind = Literal["periodic", "manual", "final", "emergency", "best"]
Outcome = Literal["completed", "stopped", "failed", "interrupted"]
Level = Literal["debug", "info", "warn", "error"]
Source = Literal["stdin", "socket", "word", "signal", "detach"]


class Line(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What any line may say about itself."""

    truncated: Annotated[list[str], Meta(description="fields whose text was cut to keep the line short")] | None = None
    more: Annotated[dict[str, int], Meta(description="fields whose list was cut, with the number left out")] | None = (
        None
    )
    non_finite: (
        Annotated[
            dict[str, Literal["nan", "inf", "-inf"]],
            Meta(description="fields that are null for want of a finite number"),
        ]
        | None
    ) = None

    @property
    def type(self) -> str:
        """The name of this kind of line, as on the wire."""
        return str(self.__struct_config__.tag)


class Event(Line, kw_only=True, tag_field="type"):
    """A fact about the run. A line carries `seq` exactly if it is in the log; `ts` is in ms since the epoch."""

    seq: Annotated[int, Meta(ge=1, le=MAX_INT, description="place in the log")] | None = None
    ts: Annotated[int, Meta(ge=0, le=MAX_INT, description="milliseconds since the epoch")] = 0
    cause: Annotated[CommandId, Meta(description="id of the command that caused it")] | None = None
    replay: Annotated[bool, Meta(description="true on a line that `replay` sends again")] | None = None


class Init(Event, kw_only=True, tag="init"):
    """The run is ready to train: what is trained, on what, and for how long."""

    model: Annotated[str, Meta(description="the folder, or the Hub id")]
    config: Annotated[dict[str, Any], Meta(description="the resolved config, never cut")]
    training_type: Literal["sft"]
    run_id: Annotated[str, Meta(description="the same for every attempt")]
    run_name: str
    run_dir: str
    total_steps: Annotated[Count, Meta(description="updates of the whole run")]
    trainable_parameters: Count
    total_parameters: Count
    examples: Annotated[Count, Meta(description="rows of training data in use")]
    start_step: Annotated[int, Meta(ge=0, le=MAX_INT, description="updates done before this attempt")]
    device: Annotated[str, Meta(description="what computes, for people")]
    head: Annotated[
        Literal["chunked", "full"], Meta(description="whether the output layer is computed in chunks or whole")
    ]
    blas: Annotated[str, Meta(description="library that computes matrix products on the CPU")] | None = None


class EpochStart(Event, kw_only=True, tag="epoch_start"):
    """A pass over the data begins."""

    epoch: Annotated[int, Meta(ge=1, le=MAX_INT)]
    total_epochs: Count
    num_batches: Annotated[int, Meta(ge=0, le=MAX_INT, description="updates in the epoch")]


class Step(Event, kw_only=True, tag="step"):
    """One update, or several that `log_every` or a slow reader put together."""

    step: Annotated[int, Meta(ge=0, le=MAX_INT, description="updates done since the run began")]
    loss: Annotated[float | None, Meta(description="mean over the trained tokens of these updates, in nats")]
    total_tokens: Annotated[int, Meta(ge=0, le=MAX_INT, description="trained tokens of these updates")]
    training_time_ms: Annotated[float, Meta(description="duration of these updates, data included")]
    updates: Annotated[int, Meta(ge=1, le=MAX_INT)]
    total_steps: Annotated[Count, Meta(description="of the whole run, as it is set now")]
    epoch: Annotated[int, Meta(ge=1, le=MAX_INT)]
    epoch_progress: Annotated[float, Meta(ge=0, le=1)]
    learning_rate: float
    grad_norm: Annotated[float | None, Meta(description="of the newest update, before clipping")]
    token_accuracy: Annotated[float | None, Meta(description="share of trained tokens predicted first")]
    perplexity: float | None
    trained_tokens: Annotated[int, Meta(ge=0, le=MAX_INT, description="since the run began")]
    tokens_per_second: Annotated[float, Meta(description="trained tokens")]
    padding_fraction: Annotated[float, Meta(ge=0, le=1, description="computed positions that held no token")]
    micro_batches: Annotated[Count, Meta(description="forward and backward passes of these updates")]
    data_time_ms: Annotated[float, Meta(description="of the duration, for reading and batching")]
    active_bytes: Annotated[Count, Meta(description="device memory in use")]
    cache_bytes: Annotated[Count, Meta(description="device memory kept for reuse")]
    peak_bytes: Annotated[Count, Meta(description="highest device memory in use since the engine began")]
    eta_ms: Annotated[int, Meta(ge=0, le=MAX_INT)] | None
    skipped: Annotated[int, Meta(ge=0, le=MAX_INT, description="updates left out since they were not finite")]


class Generation(Event, kw_only=True, tag="generation"):
    """What the model answers to a prompt of the config."""

    index: Annotated[Count, Meta(description="number of the prompt, from 0")]
    prompt: str
    completion: str
    tokens: Annotated[Count, Meta(description="of the completion")]
    step: Count
    loss: Annotated[float, Meta(description="of the given reference, in nats a token")] | None = None


class Checkpoint(Event, kw_only=True, tag="checkpoint"):
    """A checkpoint is whole on disk, under its final name."""

    path: Annotated[str, Meta(description="its folder")]
    step: Count
    bytes: Annotated[Count, Meta(description="of its files")]
    kind: Annotated[
        CheckpointKind,
        Meta(description="`emergency`: written before an error ends the run"),
    ]


class EpochEnd(Event, kw_only=True, tag="epoch_end"):
    """A pass over the data, or the part of it before the run's end, is over."""

    epoch: Annotated[int, Meta(ge=1, le=MAX_INT)]
    avg_loss: Annotated[float | None, Meta(description="weighted by tokens, over the whole epoch")]
    epoch_time_secs: float
    updates: Count


class Complete(Event, kw_only=True, tag="complete"):
    """The run reached its end by itself."""

    total_steps: Annotated[Count, Meta(description="updates of the run")]
    total_time_secs: Annotated[float, Meta(description="over all attempts")]
    reason: Literal["finished", "early_stopping"]


class Log(Event, kw_only=True, tag="log"):
    """Something that a person should know; the run goes on."""

    level: Level
    message: str
    code: Annotated[str, Meta(description="for programs: a code of the table of log codes")] | None = None
    details: Annotated[dict[str, Any], Meta(description="by code")] | None = None


class Paused(Event, kw_only=True, tag="paused"):
    """Training stands still; written when it is true, not when it was asked for."""

    step: Count


class Resumed(Event, kw_only=True, tag="resumed"):
    """Training goes on."""

    step: Count


class Status(Event, kw_only=True, tag="status"):
    """The run entered a phase."""

    phase: Phase
    message: Annotated[str, Meta(description="for people; in `loading` the model's name")]
    activity: Annotated[Activity, Meta(description="`compile` while an update takes long for a new shape")]
    step: Count


class Attempt(Event, kw_only=True, tag="attempt"):
    """A worker process took up the run; steps above `resumed_from_step` of earlier attempts are void."""

    run_id: str
    attempt: Annotated[int, Meta(ge=1, le=MAX_INT)]
    protocol: int
    worker: Annotated[str, Meta(description="version of the worker")]
    pid: Count
    resumed_from: Annotated[str, Meta(description="path of the checkpoint; absent: from the beginning")] | None = None
    resumed_from_step: Count | None = None


class Dropped(msgspec.Struct):
    """Rows left out for one reason, with the places of the first of them."""

    count: Count
    lines: Annotated[list[str], Meta(description="file and line of the first rows")]


class Data(Event, kw_only=True, tag="data"):
    """What was read, used and left out of a split."""

    split: Literal["train", "valid"]
    rows_read: Count
    rows_used: Count
    rows_dropped: dict[str, Dropped]
    tokens: Count
    trained_tokens: Count
    length_histogram: Annotated[
        dict[str, int], Meta(description="rows by length in tokens; a key is the upper bound of its bin")
    ]
    padding_fraction: Annotated[
        float, Meta(ge=0, le=1, description="expected share of computed positions without a token")
    ]


class Progress(Event, kw_only=True, tag="progress"):
    """How far a longer piece of work is; always closed by a line with done = total."""

    id: Annotated[str, Meta(description="the same on all lines of one piece of work")]
    title: str
    done: Count
    total: Count
    unit: Annotated[str, Meta(description="what is counted, in the plural")]


class EvalEnd(Event, kw_only=True, tag="eval_end"):
    """The validation loss after an update."""

    step: Annotated[Count, Meta(description="updates done")]
    valid_loss: float | None
    perplexity: float | None
    token_accuracy: float | None
    tokens: Annotated[int, Meta(ge=0, le=MAX_INT, description="trained tokens that were evaluated")]
    ms: float
    best: Annotated[bool, Meta(description="the lowest so far, of the evaluations that the run makes by itself")]


class Change(msgspec.Struct, rename={"from_": "from"}):
    """The value of a key before and after."""

    from_: Any
    to: Any


class ConfigChanged(Event, kw_only=True, tag="config_changed"):
    """Keys have new values from an update on."""

    changes: dict[str, Change]
    effective_step: Annotated[int, Meta(ge=0, le=MAX_INT, description="first update that uses them")]


class Command(Event, kw_only=True, tag="command"):
    """An order that changes the run was accepted."""

    cmd: str
    parameters: Annotated[dict[str, Any], Meta(description="as they were taken, without the config")]
    source: Source


class Error(Event, kw_only=True, tag="error"):
    """Why the run cannot go on; comes before `end`."""

    code: str
    message: str
    details: Annotated[dict[str, Any], Meta(description="by code")] | None = None
    hint: Annotated[str, Meta(description="what to do about it")] | None = None


class End(Event, kw_only=True, tag="end"):
    """The worker's last line, also without a run."""

    outcome: Outcome
    reason: Annotated[str, Meta(description="for people; after an error its code")]
    step: Count
    checkpoint: Annotated[str | None, Meta(description="path of the newest whole checkpoint that a resume can use")]
    resumable: Annotated[bool, Meta(description="the run is not complete, and its folder can be resumed")]
    resume_args: Annotated[list[str], Meta(description="arguments of `trainwire` that go on with the run")]
    exit_code: Annotated[int, Meta(ge=0, le=255)]


class WorkerInfo(msgspec.Struct):
    """Name and version of the worker."""

    name: str
    version: str


class Limits(msgspec.Struct):
    """What the worker takes and gives: bytes of a line, open commands, bytes of unread responses and of backlog."""

    max_line_in: Count
    max_line_out: Count
    max_open_commands: Count
    max_response_backlog: Count
    max_backlog: Count


class Transport(Line, kw_only=True, tag_field="type"):
    """A line about the connection, not about the run: it carries no `seq` and is in no log."""


class Hello(Transport, kw_only=True, tag="hello"):
    """The first line of every worker."""

    protocol: Annotated[int, Meta(description="major version")]
    minor: Annotated[int, Meta(description="minor version")]
    worker: WorkerInfo
    pid: Count
    dialect: Annotated[str, Meta(description="`native`")]
    features: list[str]
    limits: Limits


class ErrorBody(msgspec.Struct, omit_defaults=True):
    """Why a command was refused or failed."""

    code: str
    message: str
    details: Annotated[dict[str, Any], Meta(description="by code")] | None = None
    hint: Annotated[str, Meta(description="what to do about it")] | None = None


class Response(Transport, kw_only=True, tag="response"):
    """The one answer to a command, when it has taken effect."""

    id: Annotated[CommandId | None, Meta(description="of the command; null if it had none, or none that could be read")]
    cmd: Annotated[str | None, Meta(description="null if it could not be read")]
    ok: bool
    result: Annotated[dict[str, Any], Meta(description="if `ok`")] | None = None
    error: Annotated[ErrorBody, Meta(description="if not `ok`")] | None = None
    at_seq: Annotated[int, Meta(ge=1, le=MAX_INT, description="the event that carried the effect")] | None = None


class Queue(msgspec.Struct):
    """What waits to be read on stdout: lines and bytes."""

    lines: Count
    bytes: Count


class Heartbeat(Transport, kw_only=True, tag="heartbeat"):
    """A sign of life while nothing else is printed."""

    ts: Count
    phase: Phase
    activity: Activity
    step: Count
    last_seq: Annotated[Count, Meta(description="of the newest event; 0 without one")]
    up_ms: Annotated[Count, Meta(description="since the worker began")]
    loop_age_ms: Annotated[int, Meta(ge=0, le=MAX_INT, description="since the engine's last sign of life")]
    queue: Queue


class Gap(Transport, kw_only=True, tag="gap"):
    """Lines that a slow reader did not get; the log has them."""

    from_seq: Annotated[Count, Meta(description="first event that is missing")]
    to_seq: Annotated[Count, Meta(description="last event that is missing")]
    counts: Annotated[dict[str, int], Meta(description="lines left out, by type")]
    reason: Literal["slow_reader"]


RunEvent = (
    Init
    | EpochStart
    | Step
    | Generation
    | Checkpoint
    | EpochEnd
    | Complete
    | Log
    | Paused
    | Resumed
    | Status
    | Attempt
    | Data
    | Progress
    | EvalEnd
    | ConfigChanged
    | Command
    | Error
    | End
)
"""Every event of a run."""

TransportLine = Hello | Response | Heartbeat | Gap
"""Every line about the connection."""

Message = RunEvent | TransportLine
"""Every line that a worker prints."""

EVENT_TYPES: tuple[type[Event], ...] = tuple(sorted(Event.__subclasses__(), key=lambda t: str(t.__struct_config__.tag)))
TRANSPORT_TYPES: tuple[type[Transport], ...] = tuple(Transport.__subclasses__())


def type_name(kind: type[Event] | type[Transport]) -> str:
    """Give the name of a message type on the wire."""
    return str(kind.__struct_config__.tag)
