"""What worker and engine say to each other over their private channel: orders down, reports up.

Messages are msgpack, each behind its length as four bytes, big endian. Reports are the run's events, without
`seq` and `ts`, which the worker gives, and a few that never reach the wire. On an event and on an answer,
`cause` and `order` name the order by the number that the worker gave it.
"""

import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from .events import Activity, Event, Outcome, RunEvent, Step

_HEAD = struct.Struct(">I")
MAX_FRAME = 64 << 20
"""Bytes of a message, far above what either side sends."""
CHANNEL_FD_VARIABLE = "TRAINWIRE_CHANNEL_FD"
"""Environment variable that names the engine's end of the channel, an inherited socket."""
LEADER_LOST = 9
"""Exit status of a rank that left because rank 0 was gone or gave no sign of life."""
LEADER_HANGS = 10
"""Exit status of a rank that left because it waited in vain for rank 0, which lives."""


class Order(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="order_type"):
    """Something that the engine is to do; `order` is its number."""

    order: int


class Begin(Order, tag="begin"):
    """Load, prepare and train. `resume_from` is a checkpoint folder that the worker has verified.

    With `hold_on_failed_save` a final save that fails pauses the run instead of ending it. `blas` is `auto`, `none` or
    a library's path. The first `profile` updates after the first are taken apart and timed.
    """

    config: dict[str, Any]
    run_id: str
    attempt: int
    resume_from: str | None = None
    linger: bool = False
    offline: bool = False
    trust_remote_code: bool = False
    hold_on_failed_save: bool = False
    blas: str = "auto"
    profile: int = 0


class Check(Order, tag="check"):
    """Check the data and estimate memory and time, then leave."""

    config: dict[str, Any]
    offline: bool = False
    trust_remote_code: bool = False
    blas: str = "auto"


class PauseOrder(Order, tag="pause"):
    """Stand still at the next update boundary."""


class ResumeOrder(Order, tag="resume"):
    """Go on; with `steps`, for that many updates."""

    steps: int | None = None


class CheckpointOrder(Order, tag="checkpoint"):
    """Write a checkpoint at the next update boundary."""

    name: str | None = None


class StopOrder(Order, tag="stop"):
    """Leave at the next update boundary; with `save`, after a checkpoint."""

    save: bool = True


class SetOrder(Order, tag="set"):
    """Change settings at the next update boundary; the values are checked already."""

    values: dict[str, Any]


class EvalOrder(Order, tag="eval"):
    """Evaluate at the next update boundary."""

    max_batches: int | None = None


class GenerateOrder(Order, tag="generate"):
    """Generate at the next update boundary."""

    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    adapter: bool = True


AnyOrder = Begin | Check | PauseOrder | ResumeOrder | CheckpointOrder | StopOrder | SetOrder | EvalOrder | GenerateOrder


class Report(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="type"):
    """A report that never reaches the wire."""


class Answer(Report, tag="_answer"):
    """An order has taken effect, or failed with `code` and `message`."""

    order: int
    result: dict[str, Any] | None = None
    code: str | None = None
    message: str | None = None
    details: dict[str, Any] | None = None
    hint: str | None = None


class Alive(Report, tag="_alive"):
    """A sign of life between events: what the engine does now."""

    activity: Activity
    step: int


class StepHistory(Report, tag="_step_history"):
    """The update reports that the checkpoint carries: those since the one before it, for a log that lacks them."""

    steps: list[Step]


class Failed(Report, tag="_failed"):
    """The engine cannot go on and leaves; `checkpoint` is the newest whole one it wrote."""

    code: str
    message: str
    details: dict[str, Any] | None = None
    hint: str | None = None
    checkpoint: str | None = None


class Finished(Report, tag="_finished"):
    """The engine's last report before it leaves by itself."""

    outcome: Outcome
    step: int
    checkpoint: str | None = None


AnyReport = RunEvent | Answer | Alive | StepHistory | Failed | Finished

_encoder = msgspec.msgpack.Encoder()
_order_decoder = msgspec.msgpack.Decoder(AnyOrder)
_report_decoder = msgspec.msgpack.Decoder(AnyReport)


def encode(message: Order | Report | Event) -> bytes:
    """Frame a message for the channel. Floats keep nan and infinities."""
    body = _encoder.encode(message)
    return _HEAD.pack(len(body)) + body


class Frames:
    """Cuts a byte stream into the channel's messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add what was read, and give every message that is whole by now. Raises ValueError at one that is too long."""
        buffer = self._buffer
        buffer += data
        start, end = 0, len(buffer)
        while end - start >= 4:
            (size,) = _HEAD.unpack_from(buffer, start)
            if size > MAX_FRAME:
                raise ValueError(f"a message of {size} bytes")
            if end - start - 4 < size:
                break
            yield bytes(buffer[start + 4 : start + 4 + size])
            start += 4 + size
        del buffer[:start]


def decode_order(frame: bytes) -> AnyOrder:
    """Read one order."""
    return _order_decoder.decode(frame)


def decode_report(frame: bytes) -> AnyReport:
    """Read one report."""
    return _report_decoder.decode(frame)


class EngineChannel:
    """The engine's end: reports go out at once, orders are taken when the engine asks for them."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._frames = Frames()
        self._waiting: list[AnyOrder] = []
        self.closed = False
        """True once the worker is gone."""

    def send(self, report: Report | Event) -> None:
        """Report to the worker; without a worker nothing happens but that `closed` becomes true."""
        if self.closed:
            return
        try:
            self._socket.sendall(encode(report))
        except OSError:
            self.closed = True

    def _read(self, *, block: bool) -> bool:
        try:
            data = self._socket.recv(1 << 16, 0 if block else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.closed = True
            return False
        self._waiting.extend(decode_order(frame) for frame in self._frames.feed(data))
        return True

    def pending(self) -> bool:
        """Say whether an order waits, or the worker is gone, without blocking."""
        while not self.closed and self._read(block=False):
            pass
        return self.closed or bool(self._waiting)

    def peek(self) -> tuple[AnyOrder, ...]:
        """Give the orders that have arrived, without taking them."""
        self.pending()
        return tuple(self._waiting)

    def next(self, *, block: bool) -> AnyOrder | None:
        """Take the next order; None if there is none, or, when blocking, once the worker is gone."""
        self.pending()
        while not self._waiting:
            if self.closed or not block:
                return None
            self._read(block=True)
        return self._waiting.pop(0)
