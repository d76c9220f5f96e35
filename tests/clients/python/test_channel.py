"""The channel without a process: chunks of bytes in, messages out."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwire_client.channel import MAX_LINE, Channel
from trainwire_client.delivery import Delivery
from trainwire_client.errors import ProtocolMismatch
from trainwire_client.testing import LINES
from trainwire_protocol.coalesce import merge_steps
from trainwire_protocol.codec import decode_command, decode_message
from trainwire_protocol.commands import GetStatus, SaveCheckpoint
from trainwire_protocol.events import EVENT_TYPES, TRANSPORT_TYPES, Gap, Hello, Progress, Step, type_name


def line(kind: str, **fields: Any) -> bytes:
    return json.dumps({**LINES[kind], **fields}, ensure_ascii=False).encode() + b"\n"


STREAM = b"".join(
    (
        b"Loading modules\n",
        line("hello"),
        line("log", message="\u2028 \u2029 é 世 😀 \x85"),
        b"\xff\xfe junk\n\n",
        line("step", seq=7),
        line("sparkle", type="sparkle") if "sparkle" in LINES else b'{"type":"sparkle"}\n',
        line("paused").replace(b"\n", b"\r\n"),
        b'{"type":"half',
    )
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=40).map(sorted))
@settings(max_examples=60, deadline=None)
def test_any_cutting_of_the_bytes_gives_the_same_messages(cuts: list[int]) -> None:
    channel = Channel()
    pieces = [STREAM[a:b] for a, b in zip([0, *cuts], [*cuts, len(STREAM)], strict=True)]
    received = [r.message for piece in pieces for r in channel.feed(piece)]
    whole = Channel()
    assert received == [r.message for r in whole.feed(STREAM)]
    assert [m["type"] if isinstance(m, dict) else type(m).__name__ for m in received] == [
        "Hello",
        "Log",
        "Step",
        "sparkle",
        "Paused",
    ]
    assert channel.junk == whole.junk == 2


@given(st.binary(max_size=400))
@settings(max_examples=100, deadline=None)
def test_no_bytes_break_the_channel(noise: bytes) -> None:
    channel = Channel()
    channel.feed(noise + b"\n")
    assert isinstance(channel.feed(line("hello"))[-1].message, Hello)


def test_a_line_that_never_ends_is_not_kept() -> None:
    channel = Channel()
    for _ in range(3 * MAX_LINE // (1 << 20)):
        channel.feed(b"z" * (1 << 20))
        assert channel._held <= MAX_LINE + (1 << 20)
    (received,) = channel.feed(b"zz\n" + line("hello"))
    assert isinstance(received.message, Hello)
    assert channel.junk == 1


@pytest.mark.parametrize(
    "hello", [{"protocol": 2}, {"protocol": "two"}, {"protocol": 2, "limits": "$drop", "pid": None}]
)
def test_another_major_is_refused_even_if_its_hello_has_another_shape(hello: dict[str, Any]) -> None:
    fields = {key: value for key, value in {**LINES["hello"], **hello}.items() if value != "$drop"}
    with pytest.raises(ProtocolMismatch, match="protocol 1") as caught:
        Channel().feed(json.dumps(fields).encode() + b"\n")
    assert str(hello["protocol"]) in str(caught.value)
    assert (caught.value.theirs, caught.value.ours) == (hello["protocol"], 1)


def test_commands_are_numbered_and_carry_no_parameter_that_is_none() -> None:
    channel = Channel()
    first, status = channel.command("status", {})
    second, save = channel.command("checkpoint", {"name": None})
    assert (first, second) == (1, 2)
    assert decode_command(status) == (GetStatus(id=1), False)
    assert decode_command(save) == (SaveCheckpoint(id=2), False)


def step(number: int, **fields: Any) -> Step:
    message = decode_message(line("step", step=number, seq=number, **fields))
    assert isinstance(message, Step)
    return message


def nothing(first: int, last: int) -> None:
    return None


def test_a_consumer_that_keeps_up_gets_every_event_as_it_was() -> None:
    delivery = Delivery(4, nothing)
    taken: list[Any] = []
    for number in range(1, 100):
        delivery.put([(step(number), 100)])
        taken += delivery.take(0)
    assert [event.step for event in taken] == list(range(1, 100))


def test_a_lagging_consumer_gets_sums_and_weighted_means() -> None:
    delivery = Delivery(2, nothing)
    events = [step(n, loss=float(n), total_tokens=10 * n) for n in range(1, 7)]
    delivery.put([(event, 100) for event in events])
    taken = delivery.take(0)
    expected = events[1]
    for event in events[2:]:
        expected = merge_steps(expected, event)
    assert taken == [events[0], expected]


def test_progress_of_one_piece_of_work_is_replaced_and_of_two_is_not() -> None:
    def progress(name: str, done: int) -> Progress:
        message = decode_message(line("progress", id=name, done=done, total=9))
        assert isinstance(message, Progress)
        return message

    delivery = Delivery(1, nothing)
    delivery.put([(progress(name, done), 50) for name, done in (("a", 1), ("a", 2), ("b", 1), ("a", 3), ("a", 4))])
    assert [(e.id, e.done) for e in delivery.take(0) if isinstance(e, Progress)] == [("a", 2), ("b", 1), ("a", 4)]


def test_a_backlog_beyond_its_bytes_is_one_gap_without_a_log_and_whole_with_one() -> None:
    events = [decode_message(line("log", seq=n)) for n in range(1, 11)]
    for refill, expected in ((nothing, "gap"), (lambda first, last: iter(events[first - 1 : last]), "log")):
        delivery = Delivery(4, refill)  # type: ignore[arg-type]
        delivery.put([(event, 1 << 20) for event in events[:5]])  # type: ignore[misc]
        assert [e.seq for e in delivery.take(0)] == [1, 2, 3, 4, 5]  # type: ignore[union-attr]
        delivery.put([(event, 4 << 20) for event in events[5:]])  # type: ignore[misc]
        taken = delivery.take(0)
        if expected == "gap":
            assert taken == [Gap(from_seq=6, to_seq=10, counts={"log": 5}, reason="slow_reader")]
        else:
            assert taken == events[5:]


def test_the_end_wakes_a_waiting_consumer() -> None:
    delivery = Delivery(4, nothing)
    taken: list[list[Any]] = []
    consumer = threading.Thread(target=lambda: taken.append(delivery.take(None)))
    consumer.start()
    delivery.close()
    consumer.join(90)
    assert taken == [[]]
    assert delivery.finished


def test_waiting_for_an_event_ends_with_the_time() -> None:
    assert Delivery(4, nothing).take(0.01) == []


def test_the_kit_s_sample_lines_are_those_of_the_cases_and_whole_messages() -> None:
    shared = Path(__file__).parents[3] / "clients" / "cases" / "lines.json"
    assert json.loads(shared.read_text()) == LINES
    assert set(LINES) == {type_name(kind) for kind in (*EVENT_TYPES, *TRANSPORT_TYPES)}
    for kind in LINES:
        message = decode_message(line(kind))
        assert not isinstance(message, dict)
        assert message.type == kind
