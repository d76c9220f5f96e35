"""Exceptions of Python, MLX and the operating system as the errors that a run ends with or an order is refused with."""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Callable
from typing import TypeVar

from trainwire_protocol.errors import DiskFull, EngineUnavailable, Internal, IoError, OutOfMemory, TrainwireError

T = TypeVar("T")

_MEMORY_WORDS = (
    "out of memory",
    "unable to allocate",
    "attempting to allocate",
    "bad_alloc",
    "insufficient memory",
    "cudaerrormemoryallocation",
    "failed to allocate",
    "maximum allowed buffer size",
)


def as_error(error: BaseException) -> TrainwireError:
    """Give the error of the wire for any exception; what nobody foresaw becomes `internal` with its traceback."""
    if isinstance(error, TrainwireError):
        return error
    if is_out_of_memory(error):
        return OutOfMemory(f"The memory does not suffice: {_first_line(error)}")
    if isinstance(error, OSError):
        return disk_error("Reading or writing failed", error)
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in ("mlx", "mlx_lm", "tokenizers"):
        return EngineUnavailable(f"The Python package {error.name} is not installed.")
    return Internal(
        f"{type(error).__name__}: {_first_line(error)}",
        traceback="".join(traceback.format_exception(error))[-4000:],
    )


def tell(error: TrainwireError | ImportError) -> int:
    """Say on stderr, to a person, why a tool ends; the exit status of its process."""
    if isinstance(error, ImportError):
        error = EngineUnavailable(str(error), hint="Install the engine: pip install 'trainwire[cpu]'")
    print("trainwire: " + " ".join(filter(None, (error.message, error.hint))), file=sys.stderr)
    return error.exit_code or 3


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception means that memory ran out: MLX raises RuntimeError, with words of its backends."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error).lower()
    return isinstance(error, RuntimeError | ValueError) and any(words in text for words in _MEMORY_WORDS)


def with_room(work: Callable[[], T], make_room: Callable[[], bool]) -> T:
    """Do work that may run out of memory; if there was memory to give back, do it once more from its beginning.

    `make_room` gives it back and tells whether there was any. Raises what the last attempt raised.
    """
    try:
        return work()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # What the attempt had made lives on in its frames.
        traceback.clear_frames(error.__traceback__)
        if not make_room():
            raise
    return work()


def disk_error(what: str, error: OSError) -> TrainwireError:
    """Give `disk_full` or `io_error` for a failed file operation, with the place."""
    place = f" ({error.filename})" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"{what}: no space is left{place}.", hint="Make room on the disk.", path=error.filename)
    return IoError(f"{what}: {error.strerror or error}{place}.", errno=error.errno, path=error.filename)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
