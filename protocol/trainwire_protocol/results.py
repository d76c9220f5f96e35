"""What the response to each command holds when the command took effect."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from .config import MAX_INT
from .config_load import Issue
from .events import Activity, CommandId, Count, Data, Dropped, Outcome, Phase, Queue, Step


class DataReport(msgspec.Struct):
    """What was read, used and left out of a split, as the `data` event tells it."""

    split: Literal["train", "valid"]
    rows_read: Count
    rows_used: Count
    rows_dropped: dict[str, Dropped]
    tokens: Count
    trained_tokens: Count
    length_histogram: dict[str, int]
    padding_fraction: float


def data_report(event: Data) -> dict[str, Any]:
    """Make what `validate` says of a split from its `data` event."""
    told = msgspec.to_builtins(event)
    return {name: told[name] for name in DataReport.__struct_fields__}


class Estimate(msgspec.Struct):
    """What a run would take, from trials of its largest micro-batches, and of its largest update where harmless."""

    peak_bytes: Annotated[int, Meta(ge=0, le=MAX_INT, description="highest memory in use, as `step` events report it")]
    available_bytes: Annotated[int, Meta(ge=0, le=MAX_INT, description="memory that the run can have now")]
    update_seconds: Annotated[float, Meta(description="a mean update after the first one")]
    total_seconds: Annotated[float, Meta(description="all updates and evaluations")]
    largest_micro_batch_tokens: Annotated[
        int | None,
        Meta(description="the largest whose own grouping of the rows fits; null if not even the longest row does"),
    ]


class Segment(msgspec.Struct):
    """A piece of a row as the model reads it, all of it trained or none."""

    text: str
    trained: bool


class Sample(msgspec.Struct):
    """A row as it is trained; of a long one the middle of its pieces is left out."""

    row: Annotated[str, Meta(description="file and line")]
    tokens: Count
    trained_tokens: Count
    segments: list[Segment]


class ValidateResult(msgspec.Struct, omit_defaults=True):
    """Whether the config, the model and the data can be trained; all but the issues only if they can."""

    valid: bool
    issues: Annotated[list[Issue], Meta(description="what is wrong, and, of a valid config, what is noticed")]
    config: Annotated[dict[str, Any], Meta(description="the resolved config")] | None = None
    data: list[DataReport] | None = None
    total_steps: Count | None = None
    trainable_parameters: Count | None = None
    total_parameters: Count | None = None
    estimate: Estimate | None = None
    samples: Annotated[list[Sample], Meta(description="a few rows of the training data")] | None = None


class StartResult(msgspec.Struct):
    """The run has begun."""

    run_id: str
    run_dir: str
    total_steps: Count
    resumed_from: Annotated[str | None, Meta(description="path of the checkpoint; null: from the beginning")]


class PauseResult(msgspec.Struct):
    """Where the run stands still; `changed` is false if it already did."""

    step: Count
    changed: bool


class ResumeResult(msgspec.Struct):
    """Where the run goes on; `changed` is false if it already ran."""

    step: Count
    changed: bool


class CheckpointResult(msgspec.Struct):
    """The checkpoint of this step; `changed` is false if it was written before."""

    path: str
    step: Count
    bytes: Annotated[Count, Meta(description="of its files")]
    changed: bool


class StopResult(msgspec.Struct):
    """How the run ended, and the checkpoint from which it can go on."""

    outcome: Outcome
    step: Count
    checkpoint: str | None


class SetResult(msgspec.Struct):
    """The keys that have new values, those before, and the first update that uses the new ones."""

    applied: dict[str, Any]
    previous: dict[str, Any]
    effective_step: Count


class EvalResult(msgspec.Struct):
    """The validation loss now."""

    valid_loss: float | None
    tokens: Annotated[int, Meta(ge=0, le=MAX_INT, description="trained tokens that were evaluated")]
    ms: float


class GenerateResult(msgspec.Struct):
    """What the model answered."""

    text: str
    tokens: Count
    ms: float


class Memory(msgspec.Struct):
    """Memory of the device as the newest update reported it."""

    active_bytes: Count
    cache_bytes: Count
    peak_bytes: Count
    as_of_step: Count


class StatusResult(msgspec.Struct):
    """One snapshot of the worker."""

    phase: Phase
    activity: Annotated[Activity, Meta(description="what the engine does")]
    step: Annotated[Count, Meta(description="updates done, also those that no `step` event has told yet")]
    total_steps: Count
    epoch: Count
    run_id: str | None
    run_dir: str | None
    attempt: Annotated[Count, Meta(description="0 without a run")]
    metrics: Annotated[Step, Meta(description="the newest step event")] | None
    valid_loss: Annotated[float | None, Meta(description="of the newest evaluation")]
    checkpoint: Annotated[str, Meta(description="path of the newest checkpoint that a resume can use")] | None
    memory: Memory | None
    last_seq: Annotated[Count, Meta(description="of the newest event; 0 without one")]
    queue: Queue
    open_ids: Annotated[list[CommandId | None], Meta(description="commands that are not answered yet")]
    loop_age_ms: Annotated[int, Meta(ge=0, le=MAX_INT, description="since the engine's last sign of life")]
    engine_pid: int | None


class DetachResult(msgspec.Struct):
    """The run outlives its front end; `changed` is false if it would have done so already."""

    changed: bool


class ReplayResult(msgspec.Struct):
    """How many lines were sent again."""

    count: Count


class PingResult(msgspec.Struct):
    """The worker's time."""

    ts: Annotated[int, Meta(ge=0, le=MAX_INT, description="milliseconds since the epoch")]


RESULTS: dict[str, type[msgspec.Struct]] = {
    "validate": ValidateResult,
    "start": StartResult,
    "pause": PauseResult,
    "resume": ResumeResult,
    "checkpoint": CheckpointResult,
    "stop": StopResult,
    "set": SetResult,
    "eval": EvalResult,
    "generate": GenerateResult,
    "status": StatusResult,
    "replay": ReplayResult,
    "detach": DetachResult,
    "ping": PingResult,
}
"""The result of each command, by the command's name."""
