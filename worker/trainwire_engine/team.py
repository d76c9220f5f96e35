"""A rank among several: its share of the work, sums over all ranks, and what rank 0 tells the others.

Every rank has the whole state and makes the same update. Gradients are sums over trained tokens; they are added up
over the ranks in one collective, with the counts and the control word in its tail, and divided once. What the
control word calls for, and everything else that is not part of an update, goes over the hub.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import mlx.core as mx
import msgspec
import numpy as np

from trainwire_engine.batches import MicroBatch, share
from trainwire_engine.hub import Hub
from trainwire_engine.peers import Message
from trainwire_engine.ranks import Alone, Counts, Sums
from trainwire_protocol.errors import TrainwireError

BUCKET = 64 << 20
"""Entries that are added up in one collective; more of them would double the memory of the gradients."""


class Team(Alone):
    """A rank among several."""

    def __init__(self, group: mx.distributed.Group, hub: Hub) -> None:
        self._group = group
        self.hub = hub
        self.rank, self.size = group.rank(), group.size()
        self.leads = self.rank == 0
        self._wants: Callable[[], bool] = lambda: False
        self.handle: Callable[[Message], None] = lambda message: None
        """Does on another rank what rank 0 tells."""
        self._counts: Counts = (0, 0, 0)

    def share(self, dataset: Any, rows: list[int], config: Any) -> list[int]:
        return share(dataset, rows, self.size, config.micro_batch_tokens or 0, packing=config.packing)[self.rank]

    def take_turns(self) -> Callable[[int], bool]:
        loads = [0] * self.size

        def mine(cost: int) -> bool:
            rank = loads.index(min(loads))
            loads[rank] += cost
            return rank == self.rank

        return mine

    def reduce(self, totals: Any, params: Any, micro_batches: Sequence[MicroBatch]) -> tuple[Any, int]:
        if totals is None:
            totals = (mx.zeros(()), mx.zeros(())), {name: mx.zeros_like(value) for name, value in params.items()}
        (loss, correct), grads = totals
        own = super().counts(micro_batches)
        tokens = sum(int(batch.weights.sum()) for batch in micro_batches)
        word = self.leads and self._wants()
        tail = mx.stack([loss, correct, *(mx.array(float(value)) for value in (tokens, *own, word))])
        buckets: list[list[str]] = [[]]
        room = BUCKET
        for name, grad in grads.items():
            if grad.size > room and buckets[-1]:
                buckets.append([])
                room = BUCKET
            buckets[-1].append(name)
            room -= grad.size
        parts = [[grads[name].reshape(-1).astype(mx.float32) for name in names] for names in buckets]
        parts[-1].append(tail)
        flat = [mx.concatenate(part) for part in parts]
        mx.eval(flat)
        with self.hub.waiting():
            summed = [mx.distributed.all_sum(part, group=self._group) for part in flat]
            mx.eval(summed)
        added: dict[str, mx.array] = {}
        for names, part in zip(buckets, summed):
            at = 0
            for name in names:
                size = grads[name].size
                added[name] = part[at : at + size].reshape(grads[name].shape)
                at += size
        end = summed[-1][-tail.size :]
        figures = [round(float(value)) for value in np.array(end[2:])]
        self._counts = (figures[1], figures[2], figures[3])
        self.agreed = figures[4] > 0
        # Not end[0]: MLX takes a single number with a gather, which costs CUDA's compiler three seconds.
        return ((end[:1].reshape(()), end[1:2].reshape(())), added), figures[0]

    def counts(self, micro_batches: Sequence[MicroBatch]) -> Counts:
        return self._counts

    def merge(self, sums: Sums) -> Sums | None:
        if self.leads:
            self.hub.send("gather")
            parts = [sums, *(self.hub.take(rank)[1] for rank in range(1, self.size))]
            merged = sorted((tuple(entry) for part in parts for entry in part), key=lambda entry: entry[0])
            self.hub.send("merged", merged)
            return merged
        if self.follow("gather", "abandon")[0] == "abandon":
            return None
        self.hub.send("sums", sums)
        return [tuple(entry) for entry in self.hub.take(0)[1]]

    def follow(self, *until: str) -> Message:
        """Do what rank 0 tells until it says one of these words."""
        while True:
            message = self.hub.take(0)
            if message[0] in until:
                return message
            self.handle(message)

    def stay(self) -> NoReturn:
        """Do what rank 0 asks for after the end of the training; the watching thread ends the process."""
        while True:
            self.follow("go")

    def fail(self, error: TrainwireError) -> None:
        """Tell rank 0 what this rank cannot go on for."""
        details = msgspec.to_builtins(error.details)
        self.hub.send("failed", error.code, error.message, details, error.hint)

    def given_up(self) -> bool:
        """Whether rank 0 has given up an evaluation that this rank still has a part in."""
        return 0 in self.hub.peers and self.hub.peers[0].inbox.holds("abandon")

    def call(self) -> None:
        self.agreed = True

    def tell(self, *message: Any) -> None:
        if self.leads:
            self.hub.send(*message)

    def waiting(self) -> AbstractContextManager[Any]:
        return self.hub.waiting(for_others=False)

    def updating(self, *, compiles: bool) -> AbstractContextManager[Any]:
        return self.hub.expected(compiles=compiles)

    def check(self) -> None:
        self.hub.check()

    def tick(self) -> None:
        self.hub.ticks += 1

    def least(self, value: int) -> int:
        if not self.leads:
            self.hub.send("value", value)
            return int(self.follow("least")[1])
        least = min(value, *(self.hub.take(rank)[1] for rank in range(1, self.size)))
        self.hub.send("least", least)
        return least

    def agree(self, mark: str, different: TrainwireError) -> None:
        if not self.leads:
            self.hub.send("mark", mark)
            self.follow("agreed")
            return
        for rank in range(1, self.size):
            other = self.hub.take(rank)[1]
            if other != mark:
                different.message = f"Rank {rank}: {different.message}"
                different.details |= {"rank": rank}
                raise different
        self.hub.send("agreed")

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        machine = platform.node()
        if self.leads:
            self.hub.send("machine", machine)
            with _more_cores():
                yield
            self.hub.send("your turn")
        else:
            same = self.hub.take(0)[1] == machine
            if same:
                self.follow("your turn")
            yield
            if not same:
                self.follow("your turn")

    def ask(self, wants: Callable[[], bool]) -> None:
        self._wants = wants

    def on_lost(self, end: Callable[[TrainwireError], None]) -> None:
        self.hub.on_lost = end

    def verdict(self, error: Exception) -> Exception:
        return self.hub.verdict(error)

    def leave(self) -> None:
        self.hub.close()


@contextmanager
def _more_cores() -> Iterator[None]:
    """Use the launcher's cores, not only those of this rank: the other ranks on this machine wait meanwhile."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
