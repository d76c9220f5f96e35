"""The config of a run: the one list of its keys, types, ranges, defaults and what each of them means."""

from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MAX_INT = 2**53 - 1
"""The largest integer on the wire: JavaScript's largest exact one."""


class OnResume(StrEnum):
    """What becomes of a key whose value differs from the checkpoint's when a run is resumed."""

    FREE = "free"
    OVERRIDE = "override"
    FIXED = "fixed"


def _meta(
    description: str,
    *,
    on_resume: OnResume = OnResume.OVERRIDE,
    settable: bool = False,
    computed: str | None = None,
    **bounds: Any,
) -> Meta:
    """Describe a key. `computed` says what stands for a default that depends on other keys."""
    extra: dict[str, Any] = {"x-on-resume": on_resume.value, "x-settable": settable}
    if computed:
        extra["x-computed-default"] = computed
    return Meta(description=description, extra_json_schema=extra, **bounds)


FREE, FIXED = OnResume.FREE, OnResume.FIXED

Method = Literal["lora", "dora", "full"]
TrainOn = Literal["assistant", "last", "all"]


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a run is told. A None stands for a default that is computed; `init.config` has none left
    but where None is the value (`revision`, `start_from`, `valid_data`, `max_grad_value`, `chat_template`,
    `lora_keys`, `lora_layers`, and `train_on` where the data's files differ in it)."""

    model: Annotated[
        str,
        _meta(
            "folder of the base model (mlx-lm or transformers layout) or its Hub id",
            on_resume=FIXED,
            min_length=1,
        ),
    ]
    revision: Annotated[str | None, _meta("branch, tag or commit of a Hub model", on_resume=FIXED)] = None
    run_dir: Annotated[
        str | None,
        _meta("folder of the log, the checkpoints and the lock", on_resume=FREE, computed="runs/<run_name>"),
    ] = None
    run_name: Annotated[
        str | None, _meta("name of the run, for people", on_resume=FREE, computed="the config file's name")
    ] = None
    resume: Annotated[
        str,
        _meta(
            "auto: go on where an unfinished run stopped, start otherwise; never: start afresh; latest; or the"
            " folder of a checkpoint",
            on_resume=FREE,
            min_length=1,
        ),
    ] = "auto"
    resume_override: Annotated[list[str], _meta("keys whose change on a resume is accepted", on_resume=FREE)] = []
    start_from: Annotated[str | None, _meta("adapter or weights that a new run begins from", on_resume=FIXED)] = None

    data: Annotated[
        str | list[str],
        _meta("training data: a file, a list of files, a folder with train and valid files, or a Hub id"),
    ]
    valid_data: Annotated[
        str | list[str] | None,
        _meta("validation data; without it the `valid` file of a data folder, else evaluation is off"),
    ] = None
    train_on: Annotated[
        TrainOn | None,
        _meta(
            "which turns are trained: every assistant turn, the last one, or all tokens",
            computed="assistant for chat rows, all for text rows",
        ),
    ] = None
    chat_template: Annotated[
        str | None, _meta("a chat template, or the file that holds one, instead of the tokenizer's")
    ] = None
    chat_template_args: Annotated[
        dict[str, Any], _meta("arguments of the template, for instance {enable_thinking = false}")
    ] = {}
    max_seq_length: Annotated[int, _meta("tokens of a whole row at most", ge=2, le=2**24)] = 2048
    on_overlong: Annotated[
        Literal["drop", "truncate", "truncate_left", "error"],
        _meta("what is done with a longer row: truncate keeps its start, truncate_left its end"),
    ] = "drop"
    max_train_samples: Annotated[int, _meta("use the first that many rows; 0 uses all", ge=0, le=MAX_INT)] = 0
    shuffle: Annotated[bool, _meta("a new order of the rows in each epoch")] = True
    seed: Annotated[int, _meta("seed of the order, the adapters' start and dropout; 0 is a seed", ge=0, le=MAX_INT)] = (
        42
    )

    method: Annotated[Method, _meta("what is trained: adapters (lora, dora) or all weights", on_resume=FIXED)] = "lora"
    lora_rank: Annotated[int, _meta("rank of the adapters", on_resume=FIXED, ge=1, le=4096)] = 8
    lora_alpha: Annotated[float, _meta("adapters are scaled by lora_alpha / lora_rank", gt=0)] = 16.0
    lora_dropout: Annotated[float, _meta("dropout on the adapters' input", ge=0, lt=1)] = 0.0
    lora_layers: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        _meta("adapters on the last that many blocks only", on_resume=FIXED, computed="all blocks"),
    ] = None
    lora_keys: Annotated[
        list[str] | None,
        _meta(
            "names of the layers that get adapters, as in self_attn.q_proj",
            on_resume=FIXED,
            computed="all linear layers",
        ),
    ] = None

    batch_size: Annotated[int, _meta("examples per update", ge=1, le=2**20)] = 8
    micro_batch_tokens: Annotated[
        Annotated[int, Meta(ge=16, le=2**24)] | None,
        _meta(
            "padded tokens of one forward and backward pass",
            computed="a power of two from the model and the device's total memory",
        ),
    ] = None
    group_by_length: Annotated[bool, _meta("put rows of similar length into one update")] = False
    packing: Annotated[bool, _meta("put several examples into one row, isolated from each other")] = False

    num_epochs: Annotated[int, _meta("passes over the data", on_resume=FREE, ge=1, le=2**20)] = 1
    max_steps: Annotated[
        int,
        _meta(
            "updates of the run; above 0 it replaces num_epochs",
            on_resume=FREE,
            settable=True,
            ge=0,
            le=MAX_INT,
        ),
    ] = 0
    optimizer: Annotated[
        Literal["adamw", "adafactor", "lion", "muon", "sgd"], _meta("the optimizer", on_resume=FIXED)
    ] = "adamw"
    optimizer_args: Annotated[
        dict[str, Any], _meta("arguments of the optimizer, for instance {betas = [0.9, 0.95]}")
    ] = {}
    learning_rate: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        _meta("the schedule's peak", settable=True, computed="1e-4 for lora and dora, 1e-5 for full"),
    ] = None
    schedule: Annotated[
        Literal["constant", "linear", "cosine"], _meta("the learning rate's way down after the warm-up")
    ] = "cosine"
    warmup_steps: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_INT)] | None,
        _meta("updates from zero to the peak", computed="3 % of the run"),
    ] = None
    min_learning_rate: Annotated[float, _meta("where linear and cosine end", ge=0)] = 0.0
    weight_decay: Annotated[float, _meta("decoupled; none on norms and biases", ge=0)] = 0.0
    max_grad_norm: Annotated[
        float, _meta("gradients are scaled down to this norm; 0 does not clip", settable=True, ge=0)
    ] = 1.0
    max_grad_value: Annotated[
        Annotated[float, Meta(gt=0)] | None, _meta("each gradient entry is clipped to this size")
    ] = None
    label_smoothing: Annotated[float, _meta("share of the target given to all tokens alike", ge=0, lt=1)] = 0.0
    trainable_dtype: Annotated[
        Literal["float32", "model"],
        _meta("trained weights and optimizer state; model saves memory and loses small updates", on_resume=FIXED),
    ] = "float32"
    gradient_checkpointing: Annotated[
        bool, _meta("compute activations again in the backward pass: less memory, more time")
    ] = False
    max_consecutive_non_finite: Annotated[
        int, _meta("the run ends after so many skipped updates in a row", on_resume=FREE, ge=1, le=MAX_INT)
    ] = 5
    max_non_finite: Annotated[
        int, _meta("the run ends after so many skipped updates in all", on_resume=FREE, ge=1, le=MAX_INT)
    ] = 100

    log_every: Annotated[int, _meta("updates in one step event", on_resume=FREE, settable=True, ge=1, le=MAX_INT)] = 1
    save_every: Annotated[
        int,
        _meta("updates between checkpoints; 0 turns them off", on_resume=FREE, settable=True, ge=0, le=MAX_INT),
    ] = 200
    eval_every: Annotated[
        int,
        _meta("updates between evaluations; 0 turns them off", on_resume=FREE, settable=True, ge=0, le=MAX_INT),
    ] = 200
    generate_every: Annotated[
        int,
        _meta(
            "updates between generations from `prompts`; 0 turns them off",
            on_resume=FREE,
            settable=True,
            ge=0,
            le=MAX_INT,
        ),
    ] = 0
    max_checkpoints: Annotated[
        int, _meta("periodic checkpoints kept; 0 keeps all", on_resume=FREE, ge=0, le=MAX_INT)
    ] = 3
    keep_best: Annotated[bool, _meta("keep the checkpoint of the lowest validation loss", on_resume=FREE)] = True
    early_stopping_patience: Annotated[
        int,
        _meta(
            "end after so many evaluations without a better one; 0 never does",
            on_resume=FREE,
            ge=0,
            le=MAX_INT,
        ),
    ] = 0
    eval_batches: Annotated[
        int,
        _meta("batches of batch_size rows in an evaluation; 0 takes all", on_resume=FREE, ge=0, le=MAX_INT),
    ] = 0
    eval_at_start: Annotated[bool, _meta("evaluate before the first update", on_resume=FREE)] = False
    prompts: Annotated[
        str | list[str],
        _meta(
            "prompts of the generations: a list, or a file: one a line, or .jsonl whose lines have `prompt` or"
            " `messages` and, as the reference, `completion`",
            on_resume=FREE,
        ),
    ] = []
    generate_max_tokens: Annotated[int, _meta("tokens of a generation at most", on_resume=FREE, ge=1, le=2**20)] = 128
    sample_display: Annotated[
        Literal["all", "best_worst"],
        _meta(
            "generations shown: all, or the two whose reference has the lowest and the highest loss",
            on_resume=FREE,
            settable=True,
        ),
    ] = "all"
    cache_dir: Annotated[
        str | None, _meta("folder of tokenized data", on_resume=FREE, computed="the user's cache folder")
    ] = None


FIELDS: dict[str, msgspec.structs.FieldInfo] = {f.name: f for f in msgspec.structs.fields(Config)}
"""Every key with its type and default, in the order of the documentation."""


def key_meta(key: str) -> Meta:
    """Give the description, the resume class and the settable mark of a key."""
    meta: Meta = FIELDS[key].type.__metadata__[-1]
    return meta


def _extra(key: str) -> dict[str, Any]:
    return key_meta(key).extra_json_schema or {}


SETTABLE: tuple[str, ...] = tuple(key for key in FIELDS if _extra(key)["x-settable"])
"""The keys that `set` changes while a run trains."""

ON_RESUME: dict[str, OnResume] = {key: OnResume(_extra(key)["x-on-resume"]) for key in FIELDS}
"""What becomes of each key's change on a resume."""


def computed_default(key: str) -> str | None:
    """Say in words what stands for a default that depends on other keys."""
    words: str | None = _extra(key).get("x-computed-default")
    return words
