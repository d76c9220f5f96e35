"""What is known of a run, and who waits for which answer: fed by the thread that reads, asked by any other."""

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from trainwire_protocol.events import End, Gap, Heartbeat, Hello, Response
from trainwire_protocol.rundir import LOG_NAME

from .channel import Channel, Received
from .delivery import Delivery, Item, seq_of
from .errors import ClientError, RunEnded, WorkerDied
from .log import read_range
from .requests import Requests, Send, is_replay
from .results import Result, Rung
from .tracker import Tracker

MAX_SEQ = 2**53 - 1


class Core:
    """The state of one run as a client sees it, over all processes that train it."""

    def __init__(self, max_queue: int) -> None:
        self.tracker = Tracker()
        self.delivery = Delivery(max_queue, self._refill)
        self.ended = threading.Event()
        """Set once nothing more will come: everything that came is in the delivery by then."""
        self.failure: ClientError | None = None
        """Why the run is over, if not by an `end` line; set before `ended`."""
        self.run_dir: Path | None = None
        self.restarts = 0
        self.rungs: list[Rung] = []
        self.describe: Callable[[], str] = lambda: "The worker"
        self.requests = Requests(self.over, self.doing)
        self._last_seq = 0
        self._restarted = False

    def over(self) -> ClientError:
        """Make the error for what comes after the end."""
        if self.failure is not None:
            return self.failure.with_traceback(None)
        end, error = self.tracker.end, self.tracker.error
        outcome = end.outcome if end else "interrupted"
        why = f": {error.message}" if error is not None and outcome == "failed" else f" ({end.reason})." if end else "."
        return RunEnded(f"The run has ended as {outcome}{why}", outcome=outcome)

    def doing(self) -> str:
        """Say what the worker was doing."""
        return f"{self.describe()} was in {self.tracker.doing()}."

    def receive(self, received: list[Received]) -> None:
        """Take in what was read, in order: an event is there to be taken before an answer to it is given."""
        items: list[tuple[Item, int]] = []
        for line in received:
            message = line.message
            if isinstance(message, Response):
                if items:
                    self.delivery.put(items)
                    items = []
                self.requests.answer(message)
            elif isinstance(message, Heartbeat):
                self.tracker.note_heartbeat(message)
            elif isinstance(message, Gap):
                if items:
                    self.delivery.put(items)
                    items = []
                self.delivery.put_hole(message.from_seq, message.to_seq, message)
                self._last_seq = max(self._last_seq, message.to_seq)
            elif not isinstance(message, Hello):
                self._take_in(_known_end(message), line.size, items)
        if items:
            self.delivery.put(items)

    def receive_answers(self, received: list[Received]) -> None:
        """Take in the answers only: the events of a run that is followed come from its log."""
        for line in received:
            message = line.message
            if isinstance(message, Response):
                self.requests.answer(message)
            elif isinstance(message, Heartbeat):
                self.tracker.note_heartbeat(message)
            elif not isinstance(message, Hello | Gap) and is_replay(message):
                self.requests.collect(message)

    def take_from_log(self, items: list[tuple[Item, int]], from_seq: int) -> None:
        """Take in events of the log; those before `from_seq` are noted, but not delivered."""
        wanted: list[tuple[Item, int]] = []
        for item, size in items:
            if not isinstance(item, dict | Gap):
                self.tracker.note_event(item)
            if (seq_of(item) or 0) >= from_seq:
                wanted.append((item, size))
        if wanted:
            self.delivery.put(wanted)

    def _take_in(self, item: Item, size: int, items: list[tuple[Item, int]]) -> None:
        seq = seq_of(item)
        if seq is not None:
            if is_replay(item):
                self.requests.collect(item)
                return
            if seq <= self._last_seq:
                return
            if self._restarted:
                self._restarted = False
                if seq > self._last_seq + 1:
                    self.delivery.put(items)
                    items.clear()
                    self.delivery.put_hole(self._last_seq + 1, seq - 1, None)
            self._last_seq = seq
        if not isinstance(item, dict | Gap):
            self.tracker.note_event(item)
        items.append((item, size))

    @property
    def begun(self) -> bool:
        """Whether the log's events have begun to come."""
        return self._last_seq > 0

    def catch_up(self) -> None:
        """Take from the log what a dead worker had logged but not delivered.

        Before the first event it is not known whether the folder's log is this run's.
        """
        events = self._refill(self._last_seq + 1, MAX_SEQ) if self.begun else None
        if events is not None:
            items: list[tuple[Item, int]] = []
            for event in events:
                self._take_in(event, 512, items)
            self.delivery.put(items)

    def _refill(self, first: int, last: int) -> Any:
        folder = self.tracker.run_dir or self.run_dir
        return None if folder is None else read_range(Path(folder) / LOG_NAME, first, last)

    def lose(self, error: ClientError, channel: Channel, send: Send | None) -> None:
        """Go on with another process: open commands fail, what is sent from now on goes to `send`."""
        self.tracker.renew()
        self._restarted = self.begun
        self.requests.lose(error, channel, send)

    def finish(self, failure: ClientError | None = None) -> None:
        """Say that nothing more will come: with an `end` line, or for the reason given."""
        self.failure = failure
        self.ended.set()
        # A consumer that has seen the end finds commands closed.
        self.requests.close()
        self.delivery.close()

    def result(self) -> Result:
        """Give the result of a run that has ended; raises why there is none."""
        end = self.tracker.end
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        assert end is not None
        folder = self.tracker.run_dir or self.run_dir
        return Result(
            outcome=end.outcome,
            reason=end.reason,
            step=end.step,
            checkpoint=end.checkpoint,
            exit_code=end.exit_code,
            resumable=end.resumable,
            resume_args=end.resume_args,
            run_dir=None if folder is None else str(folder),
            metrics=self.tracker.metrics(),
            error=self.tracker.error,
            restarts=self.restarts,
            shutdown=tuple(self.rungs),
        )

    def wait_unless_saving(self, seconds: float, save_seconds: float) -> bool:
        """Wait up to `seconds` for the end, not counting the time of a save; say whether it came."""
        deadline = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            saving = self.tracker.saving_since
            if saving is not None and now < saving + save_seconds:
                deadline = now + seconds
            if now >= deadline:
                return self.ended.is_set()
            if self.ended.wait(min(deadline - now, 0.1)):
                return True


def _known_end(item: Item) -> Item:
    """Make an `end` of a line whose outcome this client does not know: it is the end of the run all the same."""
    if isinstance(item, dict) and item["type"] == "end":
        fields = {f.name: item[f.name] for f in msgspec.structs.fields(End) if f.name in item}
        with contextlib.suppress(TypeError):
            return End(**fields)
    return item


def death(core: Core, status: tuple[int | None, str | None], stderr: str, junk: bytes) -> WorkerDied:
    """Make the error that tells how a worker died."""
    code, signal_name = status
    how = f"was ended by {signal_name}" if signal_name else f"left with exit code {code}"
    if signal_name is None and code is None:
        how = "is gone"
    checkpoint = core.tracker.last_checkpoint
    parts = [f"{core.describe()} {how} without an end line, in {core.tracker.doing()}."]
    if core.restarts:
        parts.append(f"Restarts by supervision before: {core.restarts}.")
    parts.append(f"The last checkpoint is {checkpoint}." if checkpoint else "It reported no checkpoint.")
    last_words = (stderr or junk.decode("utf-8", "replace")).strip().splitlines()[-8:]
    if last_words:
        parts.append("Its last words:\n" + "\n".join(f"  {line[:300]}" for line in last_words))
    return WorkerDied(
        " ".join(parts),
        exit_code=code,
        signal=signal_name,
        stderr=stderr,
        last_checkpoint=checkpoint,
        restarts=core.restarts,
    )
