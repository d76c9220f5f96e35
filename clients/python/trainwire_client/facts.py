"""What any handle on a run, blocking or not, can say at once."""

from .core import Core
from .results import Rung


class Facts:
    """What was last heard of a run."""

    _core: Core

    @property
    def run_dir(self) -> str | None:
        """The run folder, as soon as it is known."""
        folder = self._core.tracker.run_dir or self._core.run_dir
        return None if folder is None else str(folder)

    @property
    def run_id(self) -> str | None:
        """The run's id, as soon as it is known."""
        return self._core.tracker.run_id

    @property
    def phase(self) -> str:
        """The worker's phase, as it was last heard."""
        return self._core.tracker.phase

    @property
    def activity(self) -> str:
        """What the engine was last heard to do."""
        return self._core.tracker.activity

    @property
    def step(self) -> int:
        """Updates done since the run began."""
        return self._core.tracker.step

    @property
    def last_checkpoint(self) -> str | None:
        """The folder of the checkpoint that was reported last."""
        return self._core.tracker.last_checkpoint

    @property
    def restarts(self) -> int:
        """How often supervision started the worker again."""
        return self._core.restarts

    @property
    def rungs(self) -> tuple[Rung, ...]:
        """The rungs of the shutdown ladder that were needed, with their durations."""
        return tuple(self._core.rungs)

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self._core.ended.is_set()
