"""Why a run ends."""

import errno

import msgspec

from trainwire_protocol.errors import DiskFull, Internal, IoError, TrainwireError
from trainwire_protocol.events import End, Error, Event, Outcome


class Ending(msgspec.Struct, frozen=True):
    """Why the run ends; the first cause decides."""

    outcome: Outcome
    reason: str
    exit_code: int
    error: TrainwireError | None = None


def failure(error: TrainwireError) -> Ending:
    """Make the ending of a run that cannot go on."""
    return Ending("failed", error.code, error.exit_code or 1, error)


def from_os_error(error: OSError) -> TrainwireError:
    """Make the error of the protocol for a file that cannot be read or written."""
    name = f"{error.filename}: " if error.filename else ""
    return disk_error(f"{name}{error.strerror or error}.", error)


def disk_error(message: str, error: OSError) -> TrainwireError:
    """Make the error of the protocol for something that cannot be written, told by a message of one's own."""
    return (DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else IoError)(message)


def last_words(bug: BaseException, now_ms: int) -> list[Event]:
    """Make the last two lines of a worker whose bug keeps it from telling more."""
    error = Internal(f"{type(bug).__name__}: {bug}")
    end = End(
        ts=now_ms,
        outcome="failed",
        reason=error.code,
        step=0,
        checkpoint=None,
        resumable=False,
        resume_args=[],
        exit_code=1,
    )
    return [Error(ts=now_ms, code=error.code, message=error.message), end]
