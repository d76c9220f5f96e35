"""When checkpoints of the running state are written, announced and answered; how they get to disk is checkpoint.py."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from trainwire_engine import memory
from trainwire_engine.checkpoint import Done, Saver, Target
from trainwire_engine.failures import as_error, disk_error
from trainwire_engine.reports import Reports
from trainwire_engine.room import Room
from trainwire_engine.schedule import Course
from trainwire_engine.snapshot import Contents, Snapshot
from trainwire_engine.state import Saved, Stopwatch, TrainState, encode_saved
from trainwire_engine.step import UpdateStep
from trainwire_protocol.channel import CheckpointOrder
from trainwire_protocol.config import Config
from trainwire_protocol.errors import BadParams
from trainwire_protocol.rundir import ABANDONED_NAME, BEST_NAME, FINAL_NAME, checkpoint_name, read_manifest

_RESERVED = (BEST_NAME, FINAL_NAME, ABANDONED_NAME)
Mark = tuple[TrainState, Config]


class Saves:
    """Saves the running state; `passport` is what checkpoints say about the run besides state and settings.

    `resumed` is the checkpoint that the run goes on from, if it is in its own folder and nothing was changed.
    """

    def __init__(
        self,
        course: Course,
        step: UpdateStep,
        contents: Contents,
        saver: Saver,
        reports: Reports,
        stopwatch: Stopwatch,
        passport: Saved,
        resumed: Path | None,
        room: Room,
    ) -> None:
        self._course = course
        self._step = step
        self._contents = contents
        self._saver = saver
        self._reports = reports
        self._stopwatch = stopwatch
        self._passport = passport
        self._start_step = course.state.step
        self._room = room
        self._whole: tuple[Path, Mark] | None = (resumed, course.mark()) if resumed else None
        self._taken: Mark | None = None
        self._told_blocking = False
        self._newest_step = self._start_step
        self.newest: Path | None = resumed
        """The checkpoint that was whole last."""

    def due(self, *, best: bool) -> None:
        """Write the periodic checkpoint if it is due, and the best one if this state is."""
        step, targets = self._course.state.step, []
        if self._course.due.save and step > self._start_step:
            targets.append(Target(checkpoint_name(step), "periodic"))
        if best:
            targets.append(Target(BEST_NAME, "best"))
        if targets:
            self._behind(targets)

    def ordered(self, order: CheckpointOrder) -> None:
        """Write a checkpoint by order, under its own name if it has one; the same state is not written twice.

        A checkpoint that the run would remove or replace some day gets links, and a manifest that keeps it.
        """
        self.settle()
        step = self._course.state.step
        if order.name in _RESERVED:
            raise BadParams(f"{order.name} is a name that the run gives itself.", name=order.name)
        whole = self.whole()
        path = self._saver.run_dir / (order.name or checkpoint_name(step))
        if whole is not None and order.name in (None, whole.name) and not _passes(whole):
            self._answer(order.order, whole, step, _size(whole), changed=False)
        elif order.name is not None and path.exists() and path != whole:
            raise BadParams(f"There is a checkpoint {order.name} already.", name=order.name)
        else:
            self._behind([Target(path.name, "manual", order.order)])

    def now(self, target: Target) -> Path:
        """Write this state and wait until it is whole; raises OSError. A stop's state is not written twice."""
        self.settle()
        whole = self.whole()
        if whole is not None and target.kind == "periodic" and whole.name != BEST_NAME:
            return whole
        with self._reports.activity("checkpoint"):
            if whole is None or not self._saver.link(whole, self._course.state.step, [target]):
                self._saver.start(self._take(), [target], background=False)
        for done in self._saver.collect():
            if done.error is not None:
                raise done.error
            self._announce(done)
        return self._saver.run_dir / target.name

    def last(self, target: Target, *, wait: bool) -> None:
        """Write this state before the process leaves, unless another rank has written it, or a later one.

        Without `wait` it is not written while another one is at it. Raises OSError.
        """
        with self._saver.alone(wait=wait) as mine:
            if mine and (found := self._saver.of_another(self._course.state.step)) is not None:
                self.newest = found
            elif mine:
                self.now(target)

    def whole(self) -> Path | None:
        """Give the checkpoint that already holds this very state, if there is one."""
        if self._whole is not None and self._whole[1] == self._course.mark() and self._whole[0].is_dir():
            return self._whole[0]
        return None

    def collect(self) -> None:
        """Announce the checkpoints that were finished meanwhile, and answer the orders that asked for them."""
        for done in self._saver.collect():
            if done.error is None:
                self._announce(done)
            else:
                self._tell_failure(done, done.error)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written now."""
        return self._saver.busy

    def settle(self) -> None:
        """Wait for what is being written, and announce it."""
        self._saver.wait()
        self.collect()

    def _behind(self, targets: Sequence[Target]) -> None:
        """Write this state in the background if memory allows; by links if a checkpoint holds it already."""
        self.settle()
        with self._reports.activity("checkpoint"):
            whole = self.whole()
            if whole is None or not self._saver.link(whole, self._course.state.step, targets):
                snapshot = self._take()
                self._saver.start(snapshot, targets, background=self._has_room(snapshot))
        self.collect()

    def _take(self) -> Snapshot:
        self._stopwatch.lap()
        saved = msgspec.structs.replace(
            self._passport,
            created_ms=time.time_ns() // 1_000_000,
            state=self._course.state,
            config=msgspec.to_builtins(self._course.config),
            steps=self._reports.history(),
        )
        self._taken = self._course.mark()
        step, state = self._course.state.step, encode_saved(saved)
        return self._room.have("A snapshot", lambda: self._contents.take(step, self._step.state, state))

    def _has_room(self, snapshot: Snapshot) -> bool:
        """Whether the arrays of a snapshot may live on beside those of the updates that are made meanwhile."""
        enough = memory.available() > snapshot.size + snapshot.size // 2
        if not enough and not self._told_blocking:
            self._told_blocking = True
            self._reports.log(
                "info",
                "save_blocks",
                f"There is no room in memory for a snapshot of {snapshot.size} bytes: training waits for saves.",
                {"bytes": snapshot.size},
            )
        return enough

    def _announce(self, done: Done) -> None:
        target = done.target
        # A better one takes the name `best` away: a state that has another name is known by that.
        if target.kind != "best" or done.step != self._newest_step:
            self.newest, self._newest_step = done.path, done.step
            if self._taken is not None and self._taken[0].step == done.step:
                self._whole = (done.path, self._taken)
        self._reports.saved(str(done.path), done.step, done.bytes, target.kind, target.order)
        if target.kind == "periodic":
            self._reports.forget(done.step)
        if target.order is not None:
            self._answer(target.order, done.path, done.step, done.bytes, changed=True)

    def _answer(self, order: int, path: Path, step: int, size: int, *, changed: bool) -> None:
        self._reports.answer(order, {"path": str(path), "step": step, "bytes": size, "changed": changed})

    def _tell_failure(self, done: Done, error: Exception) -> None:
        what = f"{done.target.name} could not be saved"
        known = disk_error(what, error) if isinstance(error, OSError) else as_error(error)
        if done.target.order is not None:
            self._reports.refuse(done.target.order, known)
            return
        self._reports.log(
            "error",
            "save_failed",
            f"{known.message} The checkpoints before are intact.",
            {"path": str(done.path), "step": done.step, "code": known.code},
        )


def _passes(folder: Path) -> bool:
    """Whether the run removes or replaces a checkpoint by itself some day."""
    manifest = read_manifest(folder)
    return manifest is None or manifest.kind in ("periodic", "best")


def _size(folder: Path) -> int:
    manifest = read_manifest(folder)
    return sum(entry.size for entry in manifest.files.values()) if manifest else 0
