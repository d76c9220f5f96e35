"""The commands of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from .core import Core
from .delivery import Item
from .requests import OpenCommand
from .results import Applied, Evaluated, Generated, Moved, Pong, Saved, Snapshot, Stopped

QUICK = 10.0
"""Seconds for what the worker answers by itself."""
PATIENT = 300.0
"""Seconds for what takes effect at an update boundary."""


class Commands:
    """The commands of a run. Each blocks until the worker answers that it has taken effect.

    They raise CommandFailed if the worker refuses, CommandTimeout after `timeout` seconds, WorkerDied or RunEnded
    if there is nobody to carry them out. They may be called from any thread.
    """

    _core: Core

    def _begin(self, cmd: str, parameters: Mapping[str, Any]) -> OpenCommand:
        return self._core.requests.begin(cmd, parameters)

    def _ask(self, cmd: str, timeout: float | None, **parameters: Any) -> Any:
        return self._begin(cmd, parameters).result(timeout)

    def pause(self, *, timeout: float | None = PATIENT) -> Moved:
        """Stand still at the next update boundary."""
        moved: Moved = self._ask("pause", timeout)
        return moved

    def resume(self, steps: int | None = None, *, timeout: float | None = PATIENT) -> Moved:
        """Go on; with `steps`, for that many updates, then stand still again."""
        moved: Moved = self._ask("resume", timeout, steps=steps)
        return moved

    def checkpoint(self, name: str | None = None, *, timeout: float | None = PATIENT) -> Saved:
        """Write a checkpoint; `name` is the folder's name within the run folder."""
        saved: Saved = self._ask("checkpoint", timeout, name=name)
        return saved

    def stop(self, *, save: bool = True, timeout: float | None = PATIENT) -> Stopped:
        """End the run gracefully, with a checkpoint unless `save` is false."""
        stopped: Stopped = self._ask("stop", timeout, save=save)
        return stopped

    def set(
        self, values: Mapping[str, Any] | None = None, /, *, timeout: float | None = PATIENT, **keys: Any
    ) -> Applied:
        """Change keys of the config while the run trains, all or none: `run.set(learning_rate=5e-5)`."""
        applied: Applied = self._ask("set", timeout, values={**(values or {}), **keys})
        return applied

    def eval(self, max_batches: int | None = None, *, timeout: float | None = PATIENT) -> Evaluated:
        """Evaluate on the validation data, or on the first `max_batches` batches of it."""
        evaluated: Evaluated = self._ask("eval", timeout, max_batches=max_batches)
        return evaluated

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
        adapter: bool | None = None,
        timeout: float | None = PATIENT,
    ) -> Generated:
        """Let the model answer a prompt or a conversation; with `adapter=False` the base model does.

        The defaults are the worker's: 128 tokens, temperature 0, seed 0.
        """
        generated: Generated = self._ask(
            "generate",
            timeout,
            prompt=prompt,
            messages=None if messages is None else [dict(m) for m in messages],
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            adapter=adapter,
        )
        return generated

    def status(self, *, timeout: float | None = QUICK) -> Snapshot:
        """Ask for one snapshot of the run; the worker answers at once, whatever the engine does."""
        snapshot: Snapshot = self._ask("status", timeout)
        return snapshot

    def replay(
        self,
        from_seq: int | None = None,
        to_seq: int | None = None,
        types: Sequence[str] | None = None,
        *,
        timeout: float | None = PATIENT,
    ) -> list[Item]:
        """Give stored events again, as a list; they do not come among the live ones."""
        kinds = None if types is None else list(types)
        events: list[Item] = self._ask("replay", timeout, from_seq=from_seq, to_seq=to_seq, types=kinds)
        return events

    def ping(self, *, timeout: float | None = QUICK) -> Pong:
        """Ask for a sign of life."""
        pong: Pong = self._ask("ping", timeout)
        return pong
