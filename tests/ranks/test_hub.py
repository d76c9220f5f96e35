"""Who is there and who is not, told from what comes over the connections alone."""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from trainwire_engine import hub as hub_module
from trainwire_engine.hub import NOTICED, Hub
from trainwire_engine.peers import COMPILING
from trainwire_protocol.channel import Frames
from trainwire_protocol.errors import OutOfMemory, TrainwireError

SHORT = 0.3


class Other:
    """The far end of a connection, in the test's hand."""

    def __init__(self) -> None:
        self.socket, self.theirs = socket.socketpair()
        self._beating = threading.Event()

    def send(self, *message: Any) -> None:
        body = msgspec.msgpack.encode(message)
        self.socket.sendall(struct.pack(">I", len(body)) + body)

    def beat(self, ticks: int, *, idle: bool, patience: int = 1) -> None:
        """Give signs of life from now on that never change."""

        def go_on() -> None:
            while not self._beating.wait(SHORT / 10):
                try:
                    self.send("beat", ticks, idle, patience)
                except OSError:
                    return

        threading.Thread(target=go_on, daemon=True).start()

    def wait_until_it_waits(self) -> None:
        """Take signs of life until one says that the main thread there waits."""
        frames = Frames()
        while True:
            for frame in frames.feed(self.socket.recv(4096)):
                if msgspec.msgpack.decode(frame)[2]:
                    return

    def close(self) -> None:
        self._beating.set()
        self.socket.close()


@pytest.fixture
def other() -> Iterator[Other]:
    end = Other()
    yield end
    end.close()


def lost(hub: Hub, *, waits: bool = True, then: Callable[[], None] = lambda: None) -> TrainwireError:
    """Let the hub's main thread wait for the others, do something, and give what the watch finds."""
    found: queue.Queue[TrainwireError] = queue.Queue()
    hub.on_lost = found.put

    def wait() -> None:
        # Where the loss comes first, the wait itself tells it.
        try:
            hub.take(1)
        except TrainwireError as error:
            found.put(error)

    if waits:
        threading.Thread(target=wait, daemon=True).start()
    then()
    return found.get(timeout=90)


def test_a_closed_connection_is_a_death(other: Other) -> None:
    def close() -> None:
        other.wait_until_it_waits()
        other.socket.shutdown(socket.SHUT_RDWR)

    error = lost(Hub(0, {1: other.theirs}, 5), then=close)
    assert (error.message, error.details) == ("Rank 1 died.", {"rank": 1})


def test_silence_is_noticed_after_the_timeout(other: Other) -> None:
    error = lost(Hub(0, {1: other.theirs}, SHORT))
    assert error.message == f"Rank 1 has given no sign of life for {SHORT * NOTICED:g} s."


def test_time_in_which_this_rank_itself_stood_still_does_not_count(
    other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, slept = time.monotonic, 0.0
    monkeypatch.setattr(hub_module, "time", SimpleNamespace(monotonic=lambda: real() + slept))
    hub = Hub(0, {1: other.theirs}, 30)
    threading.Thread(target=lambda: hub.take(1), daemon=True).start()
    other.wait_until_it_waits()
    slept = 1000.0
    frames, beats = Frames(), 0
    other.socket.settimeout(90)
    # Each sign of life is given before the others are judged, so the second one shows that they were.
    while beats < 2:
        beats += len(list(frames.feed(other.socket.recv(4096))))
    assert hub.lost is None


def test_a_rank_that_lives_but_does_not_come_hangs(other: Other) -> None:
    other.beat(7, idle=False)
    hub = Hub(0, {1: other.theirs}, SHORT)
    error = lost(hub)
    assert error.message.startswith("Rank 1 hangs")
    assert error.details["hangs"]


def test_rank_0_is_missed_within_an_update_and_waited_for_without_limit_between_two(other: Other) -> None:
    hub = Hub(1, {0: other.theirs}, 5)
    found: queue.Queue[TrainwireError] = queue.Queue()
    hub.on_lost = found.put

    def wait() -> None:
        with hub.waiting():
            threading.Event().wait()

    threading.Thread(target=wait, daemon=True).start()
    other.wait_until_it_waits()
    for patience in (0, 1):
        assert hub.lost is None
        other.send("beat", 7, False, patience)
        while hub.peers[0].patience != patience:
            pass
        hub.peers[0].heard = time.monotonic() + 1000
        hub._judge(time.monotonic() + 999)
    assert hub.lost is not None
    assert hub.lost.message.startswith("Rank 0 hangs")


def test_an_update_that_compiles_is_given_more_time(other: Other) -> None:
    hub = Hub(0, {1: other.theirs}, 30)
    with hub.expected(compiles=True):
        assert hub.patience == COMPILING
    with hub.expected(compiles=False):
        assert hub.patience == 1
    assert hub.patience == 0, "rank 0 may take between two updates as long as it likes"


def test_signs_of_life_go_on_while_a_lost_rank_is_dealt_with(other: Other) -> None:
    hub = Hub(0, {1: other.theirs}, SHORT)
    handled, frames, beats = threading.Event(), Frames(), 0
    hub.on_lost = lambda error: (handled.wait(90), None)[1]
    other.send("failed", "out_of_memory", "The memory does not suffice.", {}, None)
    while hub.lost is None:
        pass
    while beats < 3:
        beats += len(list(frames.feed(other.socket.recv(4096))))
    handled.set()


def test_a_message_that_a_stopped_rank_does_not_take_holds_up_no_sign_of_life(other: Other) -> None:
    near, far = socket.socketpair()
    hub = Hub(0, {1: other.theirs, 2: near}, 30)
    threading.Thread(target=lambda: hub.send("merged", "x" * (16 << 20), to=2), daemon=True).start()
    frames, beats = Frames(), 0
    while beats < 3:
        beats += len(list(frames.feed(other.socket.recv(4096))))
    far.close()
    while hub.lost is None:
        pass
    near.close()


def test_ranks_that_all_wait_are_not_connected_any_more(other: Other) -> None:
    other.beat(7, idle=True)
    hub = Hub(0, {1: other.theirs}, SHORT)
    assert lost(hub).message.startswith("The ranks have waited for each other")


def test_an_error_of_another_rank_keeps_its_code(other: Other) -> None:
    def fail() -> None:
        other.wait_until_it_waits()
        other.send("failed", "out_of_memory", "The memory does not suffice.", {"bytes": 1}, "Lower it.")

    error = lost(Hub(0, {1: other.theirs}, 5), then=fail)
    assert isinstance(error, OutOfMemory)
    assert (error.message, error.hint) == ("Rank 1: The memory does not suffice.", "Lower it.")
    assert error.details == {"bytes": 1, "rank": 1}


def test_a_main_thread_at_work_ends_the_run_itself_at_its_next_wait(other: Other) -> None:
    hub = Hub(0, {1: other.theirs}, 5)
    called: list[TrainwireError] = []
    hub.on_lost = called.append
    other.socket.shutdown(socket.SHUT_RDWR)
    while hub.lost is None:
        pass
    with pytest.raises(TrainwireError, match=r"Rank 1 died\."):
        hub.take(1)
    assert called == []


def test_a_main_thread_that_never_comes_is_not_waited_for(other: Other) -> None:
    hub = Hub(0, {1: other.theirs}, SHORT)
    other.socket.shutdown(socket.SHUT_RDWR)
    assert lost(hub, waits=False).message == "Rank 1 died."


def test_messages_arrive_in_their_order_and_an_abandoned_one_is_seen_ahead(other: Other) -> None:
    hub = Hub(1, {0: other.theirs}, 5)
    other.send("set", {"eval_every": 3})
    other.send("abandon")
    assert hub.take(0) == ["set", {"eval_every": 3}]
    assert hub.take(0) == ["abandon"]
    assert not hub.peers[0].inbox.holds("abandon")


def test_signs_of_life_go_out_while_the_main_thread_does_something_else(other: Other) -> None:
    Hub(0, {1: other.theirs}, SHORT)
    frames, beats = Frames(), 0
    while beats < 3:
        for frame in frames.feed(other.socket.recv(4096)):
            assert msgspec.msgpack.decode(frame) == ["beat", 0, False, 0]
            beats += 1
