"""What the wire promises of every printed line, and what it answers to every control line."""

import json
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from trainwire_protocol import commands, events
from trainwire_protocol.codec import Refusal, decode_command, decode_message, encode_line
from trainwire_protocol.commands import COMMANDS, WORDS
from trainwire_protocol.events import EVENT_TYPES, TRANSPORT_TYPES, Log, Response
from trainwire_protocol.limits import MAX_LINE_OUT, MIN_LINE_OUT

MESSAGES = [*EVENT_TYPES, *TRANSPORT_TYPES]
FAST = settings(
    derandomize=True,
    deadline=None,
    max_examples=300,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
Made = Callable[[list[type[Any]]], st.SearchStrategy[Any]]


def integers_in(value: Any) -> list[int]:
    if isinstance(value, bool):
        return []
    if isinstance(value, int):
        return [value]
    if isinstance(value, dict):
        return [n for v in value.values() for n in integers_in(v)]
    return [n for v in value for n in integers_in(v)] if isinstance(value, list) else []


@given(data=st.data())
@FAST
def test_every_line_is_ascii_bounded_and_one_line(data: st.DataObject, made: Made) -> None:
    message = data.draw(made(MESSAGES))
    line = encode_line(message, MIN_LINE_OUT)
    assert line.startswith(b"{")
    assert line.endswith(b"}\n")
    assert all(0x20 <= byte <= 0x7E for byte in line[:-1])
    assert len(line) <= MIN_LINE_OUT or isinstance(message, events.Init)
    value = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert all(abs(number) < 2**53 for number in integers_in(value))
    assert json.dumps(value, ensure_ascii=False).encode("utf-8"), "a lone surrogate would not encode"


@given(data=st.data())
@FAST
def test_a_message_survives_the_wire(data: st.DataObject, made: Made, finite: Callable[[Any], bool]) -> None:
    message = data.draw(made(MESSAGES))
    built = msgspec.to_builtins(message)
    decoded = decode_message(encode_line(message, 1 << 24))
    assert type(decoded) is type(message)
    if finite(built) and all(abs(number) < 2**53 for number in integers_in(built)):
        assert decoded == message


def test_a_number_that_is_not_finite_is_null_and_named() -> None:
    details = {"a": math.nan, "b": [1.0, -math.inf]}
    value = json.loads(encode_line(Log(level="info", message="m", details=details)))
    assert value["details"] == {"a": None, "b": [1.0, None]}
    assert value["non_finite"] == {"details.a": "nan", "details.b.1": "-inf"}


def test_an_integer_beyond_the_exact_range_of_javascript_is_not_written_as_an_integer() -> None:
    line = encode_line(Log(level="info", message="m", details={"big": 2**60, "small": 2**53 - 1}))
    assert json.loads(line)["details"] == {"big": float(2**60), "small": 2**53 - 1}
    assert b"1152921504606846976," not in line.replace(b"}", b",")


def test_a_lone_surrogate_becomes_the_replacement_character() -> None:
    line = encode_line(Log(level="info", message="a\ud83db"))
    assert json.loads(line)["message"] == "a\ufffdb"


def test_a_surrogate_pair_in_two_halves_becomes_its_character() -> None:
    assert json.loads(encode_line(Log(level="info", message="\ud83d\ude00")))["message"] == "\U0001f600"


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x7f", "\x00", "\r", "\n", "ü", "\U0001f600"])
def test_a_character_that_breaks_line_readers_is_escaped(character: str) -> None:
    line = encode_line(Log(level="info", message=f"a{character}b"))
    assert all(0x20 <= byte <= 0x7E for byte in line[:-1])
    assert line.count(b"\n") == 1
    assert json.loads(line)["message"] == f"a{character}b"


def test_a_long_text_is_cut_and_named() -> None:
    line = encode_line(Log(level="info", message="x" * 200_000))
    value = json.loads(line)
    assert len(line) <= MAX_LINE_OUT
    assert value["truncated"] == ["message"]
    assert value["message"] == "x" * len(value["message"])
    assert len(value["message"]) > 1000


def test_a_long_list_is_cut_and_says_how_much_more_there_was() -> None:
    value = json.loads(encode_line(Log(level="info", message="m", details={"rows": list(range(100_000))})))
    rows = value["details"]["rows"]
    assert rows == list(range(len(rows)))
    assert value["more"] == {"details.rows": 100_000 - len(rows)}


def test_a_key_that_is_too_long_does_not_make_the_line_too_long() -> None:
    line = encode_line(Log(level="info", message="m", details={"k" * 100_000: 1, "deep": [[["x" * 9_000]]] * 99}))
    assert len(line) <= MAX_LINE_OUT


def test_the_resolved_config_is_never_cut() -> None:
    prompts = ["p" * 1000] * 100
    init = events.Init(
        model="m",
        config={"prompts": prompts},
        training_type="sft",
        run_id="r",
        run_name="n",
        run_dir="/r",
        total_steps=1,
        trainable_parameters=1,
        total_parameters=1,
        examples=1,
        start_step=0,
        device="cpu",
        head="full",
    )
    assert json.loads(encode_line(init))["config"]["prompts"] == prompts


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b"3", b'{"a":1}', b'{"type":3}', b"\xff{}", b"null"])
def test_a_line_that_is_no_message_is_a_value_error(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_message(line)


def test_a_message_of_an_unknown_type_is_kept_as_an_object() -> None:
    assert decode_message(b'{"type":"from_the_future","x":1}') == {"type": "from_the_future", "x": 1}


def test_a_field_that_a_reader_does_not_know_is_ignored() -> None:
    assert decode_message(b'{"type":"paused","seq":1,"ts":2,"step":3,"x_new":{"a":1}}') == events.Paused(
        seq=1, ts=2, step=3
    )


@given(data=st.data())
@FAST
def test_a_command_survives_the_wire(data: st.DataObject, made: Made, finite: Callable[[Any], bool]) -> None:
    command = data.draw(made(list(COMMANDS.values())))
    built = msgspec.to_builtins(command)
    both = isinstance(command, commands.Generate) and (command.prompt is None) == (command.messages is None)
    if finite(built) and not both:
        line = json.dumps(built).encode()
        assert decode_command(line) == (command, False)


BAD_LINES = [
    (b"\xff", "bad_encoding", None, None),
    (b'{"cmd":"ping"', "bad_line", None, None),
    (b"hello", "bad_line", None, None),
    (b"pause", "bad_line", None, None),
    (b"PAUSE now", "bad_line", None, "pause"),
    (b"SET", "bad_line", None, "set"),
    (b"SET =1", "bad_line", None, "set"),
    (b"[1]", "bad_line", None, None),
    (b'{"id":7}', "bad_params", 7, None),
    (b'{"id":7,"cmd":3}', "bad_params", 7, None),
    (b'{"id":1.5,"cmd":"ping"}', "bad_params", None, None),
    (b'{"id":true,"cmd":"ping"}', "bad_params", None, None),
    (b'{"id":9007199254740992,"cmd":"ping"}', "bad_params", None, None),
    (b'{"id":"' + b"x" * 129 + b'","cmd":"ping"}', "bad_params", None, None),
    (b'{"id":"a","cmd":"pong"}', "unknown_command", "a", "pong"),
    (b'{"id":7,"cmd":"ping","loud":true}', "unknown_param", 7, "ping"),
    (b'{"id":7,"cmd":"resume","steps":0}', "bad_params", 7, "resume"),
    (b'{"id":7,"cmd":"resume","steps":"3"}', "bad_params", 7, "resume"),
    (b'{"id":7,"cmd":"resume","steps":1e400}', "bad_line", None, None),
    (b'{"id":7,"cmd":"checkpoint","name":"../x"}', "bad_params", 7, "checkpoint"),
    (b'{"id":7,"cmd":"checkpoint","name":"a\\u0000"}', "bad_params", 7, "checkpoint"),
    (b'{"id":7,"cmd":"checkpoint","name":"a\\n"}', "bad_params", 7, "checkpoint"),
    (b'{"id":7,"cmd":"generate"}', "bad_params", 7, "generate"),
    (b'{"id":7,"cmd":"generate","prompt":"a","messages":[]}', "bad_params", 7, "generate"),
    (b'{"id":7,"cmd":"generate","prompt":"a","temperature":-1}', "bad_params", 7, "generate"),
    (b'{"id":7,"cmd":"stop","save":1}', "bad_params", 7, "stop"),
    (b'{"id":7,"cmd":"set"}', "bad_params", 7, "set"),
    (b'{"id":7,"cmd":"start"}', "bad_params", 7, "start"),
    (b'{"cmd":"ping","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "bad_line", None, None),
]


@pytest.mark.parametrize(("line", "code", "id", "cmd"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_each_fault_of_a_control_line_has_its_code(line: bytes, code: str, id: Any, cmd: Any) -> None:
    with pytest.raises(Refusal) as caught:
        decode_command(line)
    refusal = caught.value
    assert (refusal.error.code, refusal.id, refusal.cmd) == (code, id, cmd)
    assert refusal.error.message.endswith(".")
    assert len(refusal.error.message) < 1000


@pytest.mark.parametrize(
    ("line", "command"),
    [
        (b"PAUSE", commands.Pause()),
        (b"  RESUME \r", commands.Resume()),
        (b"SAVE_CHECKPOINT", commands.SaveCheckpoint()),
        (b"STOP", commands.Stop()),
        (b"SET learning_rate=1e-5", commands.Set(values={"learning_rate": 1e-5})),
        (b"SET sample_display = best_worst", commands.Set(values={"sample_display": "best_worst"})),
        (b'SET sample_display="all"', commands.Set(values={"sample_display": "all"})),
    ],
)
def test_a_word_is_a_command(line: bytes, command: Any) -> None:
    assert decode_command(line) == (command, True)


def test_every_word_stands_for_a_command_that_exists() -> None:
    assert set(WORDS.values()) <= set(COMMANDS)


@pytest.mark.parametrize("line", [b"", b" \t", b"\r"])
def test_a_blank_line_is_ignored(line: bytes) -> None:
    assert decode_command(line) is None


def test_a_command_may_have_an_id_that_is_null_or_absent() -> None:
    assert decode_command(b'{"cmd":"ping","id":null}') == (commands.Ping(), False)
    assert decode_command(b'{"cmd":"ping"}') == (commands.Ping(), False)


@given(line=st.binary(max_size=80) | st.text(max_size=80).map(lambda t: ("{" + t).encode("utf-8", "surrogatepass")))
@settings(derandomize=True, deadline=None, max_examples=500)
def test_any_bytes_are_a_command_a_blank_line_or_a_refusal(line: bytes) -> None:
    try:
        decode_command(line)
    except Refusal as refusal:
        encode_line(Response(id=refusal.id, cmd=refusal.cmd, ok=False))
