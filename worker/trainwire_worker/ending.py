"""Why a run ends."""

from dataclasses import dataclass

from trainwire_protocol.errors import TrainwireError
from trainwire_protocol.events import Outcome


@dataclass(frozen=True)
class Ending:
    """Why the run ends; the first cause decides."""

    outcome: Outcome
    reason: str
    exit_code: int
    error: TrainwireError | None = None


def failure(error: TrainwireError) -> Ending:
    """Make the ending of a run that cannot go on."""
    return Ending("failed", error.code, error.exit_code or 1, error)
