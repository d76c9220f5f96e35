"""What comes in on stdin: words, garbage, limits, line ends; and that nothing of it ends a run."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
from worker_driver import Spawn, Worker

from trainwire_protocol.codec import encode_line
from trainwire_worker.connection import Connection

LONG = {"max_steps": 100_000}
LIMIT = 1 << 20


def code_of_next(worker: Worker) -> str:
    """Wait for the next refusal and give its code."""
    code: str = worker.wait("response", ok=False)["error"]["code"]
    return code


GARBAGE: dict[str, tuple[bytes, str]] = {
    "text": (b"hello", "bad_line"),
    "lower case word": (b"pause", "bad_line"),
    "word with more": (b"PAUSE now", "bad_line"),
    "unknown word": (b"EXPLODE", "bad_line"),
    "array": (b'[{"cmd":"ping"}]', "bad_line"),
    "number": (b"7", "bad_line"),
    "string": (b'"PAUSE"', "bad_line"),
    "null": (b"null", "bad_line"),
    "half an object": (b'{"cmd":"ping"', "bad_line"),
    "two objects": (b'{"cmd":"ping"}{"cmd":"ping"}', "bad_line"),
    "single quotes": (b"{'cmd':'ping'}", "bad_line"),
    "trailing comma": (b'{"cmd":"ping",}', "bad_line"),
    "nan": (b'{"cmd":"set","values":{"learning_rate":NaN}}', "bad_line"),
    "infinity": (b'{"cmd":"set","values":{"learning_rate":1e999}}', "bad_line"),
    "lone surrogate": (b'{"cmd":"ping","id":"\\ud800"}', "bad_line"),
    "no cmd": (b"{}", "bad_params"),
    "cmd that is a number": (b'{"cmd":1}', "bad_params"),
    "empty cmd": (b'{"cmd":""}', "unknown_command"),
    "upper case cmd": (b'{"cmd":"PAUSE"}', "unknown_command"),
    "broken utf-8": (b'{"cmd":"ping","id":"\xff"}', "bad_encoding"),
    "latin-1": (b"PAUS\xc9", "bad_encoding"),
    "utf-16": ('{"cmd":"ping"}'.encode("utf-16-le"), "bad_line"),
    "nul bytes": (b"\0\0\0", "bad_line"),
    "escape sequence": (b"\x1b[A", "bad_line"),
    "nested": (b'{"cmd":"validate","config":' + b'{"a":' * 500 + b"1" + b"}" * 501, "wrong_state"),
    "very deeply nested": (b"{" + b'"a":{' * 100_000, "bad_line"),
    "nested array": (b'{"cmd":"set","values":{"save_every":' + b"[" * 900 + b"]" * 900 + b"}}", "bad_params"),
    "set without a value": (b"SET save_every", "bad_line"),
    "set without a key": (b"SET =3", "bad_line"),
    "set of nothing": (b"SET", "bad_line"),
    "huge number": (b'{"cmd":"resume","steps":1' + b"0" * 400 + b"}", "bad_line"),
    "beyond 2^53": (b'{"cmd":"replay","from_seq":9007199254740993}', "bad_params"),
    "vertical tab": (b"PAUSE\x0bPAUSE", "bad_line"),
    "carriage return inside": (b"PAUSE\rPAUSE", "bad_line"),
}


def test_garbage_gets_one_error_each_and_the_run_goes_on(serve: Spawn) -> None:
    worker = serve(config=LONG)
    worker.begin()
    for name, (line, code) in GARBAGE.items():
        before = len(worker.of("response"))
        worker.raw(line + b"\n")
        worker.result("ping")
        new = worker.of("response")[before:]
        assert len(new) == 2, (name, new)
        assert not new[0]["ok"], name
        assert new[0]["error"]["code"] == code, (name, new[0])
    status = worker.result("status")
    assert status["phase"] == "running"
    assert not worker.of("paused", "error")
    worker.send("stop")
    assert worker.finish()["outcome"] == "stopped"


def test_an_error_names_id_and_command_as_far_as_they_could_be_read(serve: Spawn) -> None:
    worker = serve()
    worker.raw(b'{"id":5,"cmd":"nothing"}\n{"id":6}\n{"id":7,"cmd":"ping","x":1}\n{"id":8,\n')
    answers = [worker.wait("response") for _ in range(4)]
    assert [(line["id"], line["cmd"]) for line in answers] == [(5, "nothing"), (6, None), (7, "ping"), (None, None)]
    worker.raw(b'{"cmd":"stop"}\n')
    worker.reader.rest()


def test_words_do_what_their_commands_do_and_are_answered_in_order_without_an_id(serve: Spawn) -> None:
    worker = serve(config=LONG)
    worker.begin()
    worker.raw(b"  PAUSE  \nSET save_every=7\nSET sample_display=best_worst\nSAVE_CHECKPOINT\nRESUME\n")
    cmds = []
    for _ in range(5):
        response = worker.wait("response", ok=True)
        assert response["id"] is None
        cmds.append(response["cmd"])
    assert cmds == ["pause", "set", "set", "checkpoint", "resume"]
    worker.raw(b"SET batch_size=3\nSET save_every=yes\n")
    assert [code_of_next(worker), code_of_next(worker)] == ["unknown_param", "bad_params"]
    worker.raw(b"STOP\n")
    assert worker.finish()["outcome"] == "stopped"
    assert worker.of("response")[-1]["cmd"] == "stop"


def test_line_ends_blank_lines_and_a_byte_order_mark_are_tolerated(serve: Spawn) -> None:
    worker = serve()
    worker.raw(
        b'\xef\xbb\xbf{"cmd":"ping","id":1}\r\n\n\r\n   \n\t\n{"cmd":"ping","id":2}\n \t{"cmd":"ping","id":3} \r\n'
    )
    for id in (1, 2, 3):
        assert worker.reader.answer(id)["ok"]
    worker.raw(b'\xef\xbb\xbf{"cmd":"ping","id":4}\n')
    assert code_of_next(worker) == "bad_line", "a mark is tolerated once, at the beginning"
    worker.raw(b"{\n")
    assert code_of_next(worker) == "bad_line"
    assert len(worker.of("response")) == 5
    worker.raw(b'{"cmd":"stop"}\n')
    worker.reader.rest()


def test_lines_arrive_in_any_pieces(serve: Spawn) -> None:
    worker = serve()
    for byte in b'{"cmd":"ping","id":"\xc3\xa4"}\nPAUSE\n':
        worker.raw(bytes([byte]))
    assert worker.reader.answer("ä")["ok"]
    assert code_of_next(worker) == "wrong_state"
    worker.raw(b'{"cmd":"ping","id":1}\n' * 3000)
    while len(worker.of("response")) < 3002:
        worker.wait("response")
    worker.raw(b'{"cmd":"stop"}\n')
    worker.reader.rest()


def pair_of(kind: str) -> tuple[int, int]:
    """Give an input of a kind, and where to write what comes from it."""
    if kind == "pipe":
        return os.pipe()
    if kind == "terminal":
        writes, reads = os.openpty()
        return reads, writes
    ours, theirs = socket.socketpair()
    return ours.detach(), theirs.detach()


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", ["pipe", "socket", "terminal"])
def test_an_input_that_another_reader_has_emptied_holds_nobody_up(kind: str) -> None:
    reads, writes = pair_of(kind)
    connection = Connection(reads, -1, encode_line, source="stdin")
    os.write(writes, b"PAUSE\n")
    assert os.read(reads, 100) == b"PAUSE\n"
    assert list(connection.receive()) == []
    assert connection.input_open
    assert os.get_blocking(reads), "the flags that others share are theirs"
    os.write(writes, b"STOP\n")
    assert list(connection.receive()) == [b"STOP"]
    connection.close()
    os.close(writes)


def test_a_line_of_a_mebibyte_is_taken_and_a_longer_one_costs_one_error(serve: Spawn) -> None:
    worker = serve()

    def line(length: int, id: int) -> bytes:
        head = b'{"cmd":"ping","id":' + str(id).encode()
        return head + b" " * (length - len(head) - 1) + b"}"

    worker.raw(line(LIMIT, 1) + b"\n")
    assert worker.reader.answer(1)["ok"]
    worker.raw(line(LIMIT, 2) + b"\r\n")
    assert worker.reader.answer(2)["ok"]
    worker.raw(line(LIMIT + 1, 3) + b"\n" + line(100, 4) + b"\n")
    assert worker.reader.answer(4)["ok"]
    worker.raw(b"x" * (3 * LIMIT) + b"\n" + line(100, 5) + b"\n")
    assert worker.reader.answer(5)["ok"]
    refused = [line["error"]["code"] for line in worker.of("response") if not line["ok"]]
    assert refused == ["line_too_long", "line_too_long"]
    worker.raw(b'{"cmd":"stop"}\n')
    worker.reader.rest()


@pytest.mark.parametrize("rest", [b"STOP", b'{"cmd":"stop"}', b'{"cmd":"st', b"\xff"])
def test_a_last_line_without_a_line_feed_is_answered_and_not_executed(run: Spawn, rest: bytes) -> None:
    worker = run(config=LONG)
    worker.wait("step")
    worker.raw(rest)
    worker.close_input()
    assert code_of_next(worker) == "bad_line"
    worker.wait("step")
    worker.process.terminate()
    assert worker.finish()["reason"] == "signal SIGTERM"


@pytest.mark.parametrize("rest", [b"", b"\n", b"  \r\n", b" "])
def test_an_input_that_ends_in_blanks_is_no_error(run: Spawn, rest: bytes) -> None:
    worker = run(config=LONG)
    worker.raw(rest)
    worker.close_input()
    worker.wait("step")
    worker.process.terminate()
    worker.finish()
    assert not worker.of("response")


def test_a_line_that_is_too_long_at_the_end_of_input_is_answered_once(run: Spawn) -> None:
    worker = run(config=LONG)
    worker.raw(b"y" * (LIMIT + 10))
    worker.close_input()
    worker.wait("response")
    worker.process.terminate()
    worker.finish()
    assert [line["error"]["code"] for line in worker.of("response")] == ["line_too_long"]


@pytest.mark.parametrize("value", ['"a"', "true", "0.5", "1e-3", "null"])
def test_a_word_s_value_is_json_or_else_text(serve: Spawn, value: Any) -> None:
    worker = serve(config=LONG)
    worker.begin()
    worker.raw(f"SET learning_rate={value}\n".encode())
    response = worker.wait("response", cmd="set")
    assert response["ok"] is (value in ("0.5", "1e-3")), response
    worker.raw(b"STOP\n")
    worker.finish()
