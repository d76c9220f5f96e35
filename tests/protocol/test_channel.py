"""The private channel: frames survive any chunking, floats keep their nan, a worker that is gone is noticed."""

import math
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from trainwire_protocol import channel as ch
from trainwire_protocol.events import EVENT_TYPES, EvalEnd, Log, Paused

ORDERS = list(ch.Order.__subclasses__())


@given(data=st.data())
@settings(
    derandomize=True,
    deadline=None,
    max_examples=150,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_messages_come_whole_and_in_order_out_of_any_chunks(data: st.DataObject) -> None:
    messages = [Log(level="info", message="x" * n) for n in data.draw(st.lists(st.integers(0, 300), max_size=8))]
    stream = b"".join(ch.encode(message) for message in messages)
    frames, found, rest = ch.Frames(), [], stream
    while rest:
        size = data.draw(st.integers(1, 64))
        found += [ch.decode_report(frame) for frame in frames.feed(rest[:size])]
        rest = rest[size:]
    assert found == messages


@pytest.mark.parametrize("kind", ORDERS, ids=lambda kind: kind.__name__)
def test_an_order_survives_the_channel(kind: type[Any], made: Any) -> None:
    @given(order=made([kind]))
    @settings(derandomize=True, deadline=None, max_examples=30, phases=[Phase.generate])
    def survives(order: Any) -> None:
        try:
            frame = ch.encode(order)
        except (UnicodeEncodeError, OverflowError):
            return
        if "nan" not in repr(order):
            assert ch.decode_order(frame[4:]) == order

    survives()


def test_every_event_is_a_report() -> None:
    assert all(kind in ch.AnyReport.__args__ for kind in EVENT_TYPES)


def test_floats_keep_nan_and_infinities() -> None:
    event = EvalEnd(step=1, valid_loss=math.nan, perplexity=math.inf, token_accuracy=None, tokens=1, ms=1.0, best=False)
    back = ch.decode_report(ch.encode(event)[4:])
    assert isinstance(back, EvalEnd)
    assert math.isnan(back.valid_loss or 0.0)
    assert back.perplexity == math.inf


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"type": "new"}), b"\x93\x01\x02\x03"])
def test_a_frame_that_is_no_report_is_a_decode_error(frame: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        ch.decode_report(frame)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, ch.EngineChannel]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, ch.EngineChannel(theirs)


def test_orders_wait_until_they_are_taken(pair: Any) -> None:
    ours, engine = pair
    assert not engine.pending()
    ours.sendall(ch.encode(ch.PauseOrder(order=1)) + ch.encode(ch.StopOrder(order=2))[:5])
    assert engine.pending()
    assert engine.peek() == (ch.PauseOrder(order=1),)
    ours.sendall(ch.encode(ch.StopOrder(order=2))[5:])
    assert engine.next(block=True) == ch.PauseOrder(order=1)
    assert engine.next(block=True) == ch.StopOrder(order=2)
    assert engine.next(block=False) is None


def test_a_worker_that_is_gone_is_noticed_and_orders_before_that_are_kept(pair: Any) -> None:
    ours, engine = pair
    ours.sendall(ch.encode(ch.PauseOrder(order=1)))
    ours.close()
    assert engine.next(block=True) == ch.PauseOrder(order=1)
    assert engine.next(block=True) is None
    assert engine.closed
    engine.send(Paused(step=1))
