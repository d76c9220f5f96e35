"""The commands of a run, awaited."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from .commands import PATIENT, QUICK
from .delivery import Item
from .errors import ClientError
from .requests import OpenCommand
from .results import Applied, Evaluated, Generated, Moved, Pong, Saved, Snapshot, Stopped


class AsyncCommands(ABC):
    """The commands of a run, for asyncio; they raise what those of Commands raise."""

    @abstractmethod
    def _begin(self, cmd: str, parameters: Mapping[str, Any]) -> OpenCommand:
        """Send a command; may block."""

    async def _ask(self, cmd: str, timeout: float | None, **parameters: Any) -> Any:
        # Begun in a thread: an attached run connects to its socket then.
        command = await asyncio.to_thread(self._begin, cmd, parameters)
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(command.future)), timeout)
        except TimeoutError as error:
            if isinstance(error, ClientError):
                raise
            raise command.timed_out(timeout or 0.0) from None

    async def pause(self, *, timeout: float | None = PATIENT) -> Moved:
        """Stand still at the next update boundary."""
        moved: Moved = await self._ask("pause", timeout)
        return moved

    async def resume(self, steps: int | None = None, *, timeout: float | None = PATIENT) -> Moved:
        """Go on; with `steps`, for that many updates, then stand still again."""
        moved: Moved = await self._ask("resume", timeout, steps=steps)
        return moved

    async def checkpoint(self, name: str | None = None, *, timeout: float | None = PATIENT) -> Saved:
        """Write a checkpoint; `name` is the folder's name within the run folder."""
        saved: Saved = await self._ask("checkpoint", timeout, name=name)
        return saved

    async def stop(self, *, save: bool = True, timeout: float | None = PATIENT) -> Stopped:
        """End the run gracefully, with a checkpoint unless `save` is false."""
        stopped: Stopped = await self._ask("stop", timeout, save=save)
        return stopped

    async def set(
        self, values: Mapping[str, Any] | None = None, /, *, timeout: float | None = PATIENT, **keys: Any
    ) -> Applied:
        """Change keys of the config while the run trains, all or none: `await run.set(learning_rate=5e-5)`."""
        applied: Applied = await self._ask("set", timeout, values={**(values or {}), **keys})
        return applied

    async def eval(self, max_batches: int | None = None, *, timeout: float | None = PATIENT) -> Evaluated:
        """Evaluate on the validation data, or on the first `max_batches` batches of it."""
        evaluated: Evaluated = await self._ask("eval", timeout, max_batches=max_batches)
        return evaluated

    async def generate(
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
        """Let the model answer a prompt or a conversation; with `adapter=False` the base model does."""
        generated: Generated = await self._ask(
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

    async def status(self, *, timeout: float | None = QUICK) -> Snapshot:
        """Ask for one snapshot of the run; the worker answers at once, whatever the engine does."""
        snapshot: Snapshot = await self._ask("status", timeout)
        return snapshot

    async def replay(
        self,
        from_seq: int | None = None,
        to_seq: int | None = None,
        types: Sequence[str] | None = None,
        *,
        timeout: float | None = PATIENT,
    ) -> list[Item]:
        """Give stored events again, as a list; they do not come among the live ones."""
        kinds = None if types is None else list(types)
        events: list[Item] = await self._ask("replay", timeout, from_seq=from_seq, to_seq=to_seq, types=kinds)
        return events

    async def ping(self, *, timeout: float | None = QUICK) -> Pong:
        """Ask for a sign of life."""
        pong: Pong = await self._ask("ping", timeout)
        return pong
