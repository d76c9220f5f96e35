"""What a run asks of its ranks, as a process answers it that is alone; `team.Team` does for one among several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from trainwire_engine.batches import MicroBatch
from trainwire_protocol.errors import TrainwireError

Counts = tuple[int, int, int]
Sums = list[tuple[int, float, float, int]]


class Alone:
    """A group of one: a run on a single process, which pays nothing for the possibility of more."""

    rank, size = 0, 1
    leads = True
    agreed = True
    """Whether the orders that wait may be carried out at this boundary."""

    def share(self, dataset: Any, rows: list[int], config: Any) -> list[int]:
        """Choose this rank's rows of an update."""
        return rows

    def take_turns(self) -> Callable[[int], bool]:
        """Give a function that says, batch after batch by its cost, whether it is this rank's."""
        return lambda cost: True

    def reduce(self, totals: Any, params: Any, micro_batches: Sequence[MicroBatch]) -> tuple[Any, int]:
        """Add up an update's ((loss, correct), gradients) over all ranks; gives them with their trained tokens."""
        return totals, sum(int(batch.weights.sum()) for batch in micro_batches)

    def counts(self, micro_batches: Sequence[MicroBatch]) -> Counts:
        """Give the last update's micro-batches, padded and real tokens, on all ranks."""
        computed = sum(batch.tokens.size for batch in micro_batches)
        return len(micro_batches), computed, sum(batch.real_tokens for batch in micro_batches)

    def merge(self, sums: Sums) -> Sums | None:
        """Bring the sums of an evaluation's batches together, in their order; None if it was given up."""
        return sums

    def call(self) -> None:
        """Let orders be carried out at this boundary."""

    def tell(self, *message: Any) -> None:
        """Tell the other ranks what rank 0 does."""

    def waiting(self) -> AbstractContextManager[Any]:
        """Mark a wait for an order."""
        return nullcontext()

    def updating(self, *, compiles: bool) -> AbstractContextManager[Any]:
        """Mark an update, in which the others may expect this rank soon, or later where kernels are compiled."""
        return nullcontext()

    def check(self) -> None:
        """Raise the error of a rank that was lost."""

    def tick(self) -> None:
        """Give a sign of progress."""

    def least(self, value: int) -> int:
        """Give the smallest of all ranks' values."""
        return value

    def agree(self, mark: str, different: TrainwireError) -> None:
        """Wait for each other, and compare what must be the same on all ranks; raises `different` if it is not."""

    def in_turn(self) -> AbstractContextManager[Any]:
        """Let rank 0 go first through a block that fills a cache which others on its machine then read."""
        return nullcontext()

    def ask(self, wants: Callable[[], bool]) -> None:
        """Set what rank 0 asks in every update: is there anything that all ranks have to stand still for?"""

    def on_lost(self, end: Callable[[TrainwireError], None]) -> None:
        """Set what ends this process when another rank is lost while this one waits for it."""

    def verdict(self, error: Exception) -> Exception:
        """Give the cause of an error that came out of a collective."""
        return error

    def leave(self) -> None:
        """Let the other ranks leave."""
