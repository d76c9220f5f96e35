"""Another engine in place of one that died: from the newest checkpoint, with what clients have ordered since."""

from pathlib import Path

from trainwire_protocol.channel import Order, PauseOrder, SetOrder
from trainwire_protocol.errors import EngineDied
from trainwire_protocol.rundir import CheckpointInfo, newest_whole_checkpoint

from .beginning import Beginning
from .state import RunState

Found = tuple[CheckpointInfo | None, list[tuple[Path, str]]]


class Restarts:
    """The attempts that `--restarts` allows."""

    def __init__(self, state: RunState, beginning: Beginning) -> None:
        self._state = state
        self._beginning = beginning
        self._made = 0

    def begin(self, error: EngineDied) -> bool:
        """Tell of an engine's death and look for the checkpoint to go on from; False if no restart is left."""
        state = self._state
        if self._made >= state.options.restarts:
            return False
        self._made += 1
        message = f"{error.message} Restart {self._made} of {state.options.restarts}."
        state.log("error", message, error.code, **error.details)
        # A start that is still open is answered by the attempt that gets as far as `init`.
        state.desk.close({}, error, keep=frozenset({"start"}))
        stands = state.snapshot.phase in ("pausing", "paused")
        if stands:
            state.desk.paused()
        run_dir = Path((state.request and state.request.config.run_dir) or "")
        state.mailbox.work(lambda: newest_whole_checkpoint(run_dir), lambda found: self._go_on(found, stands=stands))
        return True

    def _go_on(self, found: Found | BaseException, *, stands: bool) -> None:
        if isinstance(found, BaseException):
            raise found
        state = self._state
        if state.ending is not None:
            state.conclude(state.ending)
            return
        checkpoint, passed_over = found
        step = checkpoint.step if checkpoint else 0
        orders: list[Order | None] = [PauseOrder(order=0) if stands else state.desk.rest_of_stretch(step)]
        if settings := state.snapshot.settings_after(step):
            orders.insert(0, SetOrder(order=0, values=settings))
        self._beginning.again(checkpoint, passed_over, [order for order in orders if order is not None])
