"""The errors a run can end with or a command can be refused with: one class, one code, one exit code."""

from __future__ import annotations

from typing import Any, ClassVar

NO_PERMISSION = "Give the user that runs trainwire the right to read it."
"""What to do about a file or folder that the system does not let be read."""


def _sentence(text: str) -> str:
    """End a message with one full stop: the words of another program that stand at its end have none, or one."""
    text = text.rstrip()
    if text.endswith("..") and not text.endswith("..."):
        return text[:-1]
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."


class TrainwireError(Exception):
    """A failure that is told to the user: `message` is a sentence, `hint` says what to do about it.

    Without a hint of its own an error has its class's `advice`: whatever ends a run says what to do.

    `details` are machine-readable facts (JSON values). `code` is the wire's error code; `exit_code` is the
    worker's exit status when the error ends the run, and None for codes that only refuse a command.
    """

    code: ClassVar[str] = "internal"
    exit_code: ClassVar[int | None] = 1
    advice: ClassVar[str | None] = None

    def __init__(self, message: str, *, hint: str | None = None, **details: Any) -> None:
        self.message = _sentence(message)
        super().__init__(self.message)
        self.hint = hint or self.advice
        self.details = details


class Internal(TrainwireError):
    """A bug in trainwire."""

    advice = "This is a bug in trainwire: report it with the `error` line."


class ConfigInvalid(TrainwireError):
    """The config names an unknown key, or a value outside what is allowed."""

    code, exit_code = "config_invalid", 3
    advice = "`trainwire config` lists every key, what it means and its default."


class DatasetInvalid(TrainwireError):
    """The data cannot be read, fits no format, or leaves nothing to train on."""

    code, exit_code = "dataset_invalid", 3
    advice = 'A row is {"messages": […]}, {"prompt": "…", "completion": "…"} or {"text": "…"}, one a line.'


class ResumeRefused(TrainwireError):
    """The checkpoint or the run folder does not fit what the config asks for."""

    code, exit_code = "resume_refused", 3
    advice = "Choose another checkpoint with `resume`, or another run_dir for a new run."


class Busy(TrainwireError):
    """Another process holds the run folder."""

    code, exit_code = "busy", 3


class ForbiddenPath(TrainwireError):
    """A path from stdin leaves the folder that `--root` allows."""

    code, exit_code = "forbidden_path", 3
    advice = "The worker was started with --root: every path from stdin stays below it."


class Unsupported(TrainwireError):
    """This build, model or machine cannot do what was asked."""

    code, exit_code = "unsupported", 3


class ModelLoadFailed(TrainwireError):
    """The model folder is missing, broken, or of an unknown architecture."""

    code, exit_code = "model_load_failed", 4
    advice = "`model` is a folder with config.json and *.safetensors files, or a Hub id such as org/name."


class EngineUnavailable(TrainwireError):
    """The engine, or MLX beneath it, is not installed."""

    code, exit_code = "engine_unavailable", 4
    advice = "Install the engine: pip install 'trainwire[cpu]' (or [cuda12], [cuda13]; on a Mac: trainwire)."


class OutOfMemory(TrainwireError):
    """The device or the machine ran out of memory."""

    code, exit_code = "out_of_memory", 5
    advice = "Lower micro_batch_tokens or max_seq_length, or set gradient_checkpointing = true."


class NonFinite(TrainwireError):
    """The loss or the gradients stayed non-finite beyond the limits of the config."""

    code, exit_code = "non_finite", 6
    advice = "Lower learning_rate, or look at the rows that the log names."


class DiskFull(TrainwireError):
    """No space is left where the run writes."""

    code, exit_code = "disk_full", 7
    advice = "Make room on the disk and start again: the run resumes."


class IoError(TrainwireError):
    """Reading or writing failed for another reason than a full disk."""

    code, exit_code = "io_error", 7
    advice = "Look at the permissions and at the disk, then start again: the run resumes."


class LogUnavailable(TrainwireError):
    """The event log cannot be opened, repaired or written."""

    code, exit_code = "log_unavailable", 7
    advice = "Look at the permissions and at the disk of the run folder, or choose another run_dir."


class EngineDied(TrainwireError):
    """The engine process ended without a word."""

    code, exit_code = "engine_died", 9
    advice = "Start again: the run resumes from its last checkpoint; with --restarts N it does so by itself."


class CommandRefused(TrainwireError):
    """A command that is answered with an error while the run goes on."""

    exit_code = None


class BadLine(CommandRefused):
    """The line is neither a JSON object nor a command word."""

    code = "bad_line"


class BadEncoding(CommandRefused):
    """The line is not UTF-8."""

    code = "bad_encoding"


class LineTooLong(CommandRefused):
    """The line is longer than the limit."""

    code = "line_too_long"


class BadParams(CommandRefused):
    """A parameter has the wrong type, or a value outside its range."""

    code = "bad_params"


class UnknownCommand(CommandRefused):
    """No command has this name."""

    code = "unknown_command"


class UnknownParam(CommandRefused):
    """The command has no parameter of this name."""

    code = "unknown_param"


class WrongState(CommandRefused):
    """The command does not fit the phase the run is in."""

    code = "wrong_state"


class ShuttingDown(CommandRefused):
    """The run is ending and takes no more orders."""

    code = "shutting_down"


class NotFound(CommandRefused):
    """What the command names does not exist."""

    code = "not_found"


def _tree(cls: type[TrainwireError]) -> list[type[TrainwireError]]:
    return [c for sub in cls.__subclasses__() for c in (sub, *_tree(sub))]


BY_CODE: dict[str, type[TrainwireError]] = {c.code: c for c in _tree(TrainwireError) if c is not CommandRefused}
"""Every error code of the wire with its class."""


def from_code(code: str, message: str, *, hint: str | None = None, **details: Any) -> TrainwireError:
    """Rebuild an error that crossed a process boundary; an unknown code becomes `internal`."""
    return BY_CODE.get(code, Internal)(message, hint=hint, **details)
