"""The pump: bytes reach the other side of a socket also after that side has said its last word."""

from __future__ import annotations

import socket
import threading

from trainwire_client.pump import Pump


def test_a_side_that_says_no_more_still_gets_what_is_sent() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        send_after_the_last_word(ours, theirs)


def send_after_the_last_word(ours: socket.socket, theirs: socket.socket) -> None:
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    heard_all, closed = threading.Event(), threading.Event()
    read = b""

    def over(is_open: bool) -> bool:
        if not is_open:
            heard_all.set()
        return False

    fd = ours.detach()
    pump = Pump(read_fd=fd, write_fd=fd, over=over, on_data=lambda data: None, on_closed=closed.set)
    pump.start()
    theirs.shutdown(socket.SHUT_WR)
    assert heard_all.wait(90)
    sent = bytes(range(256)) * 8192
    pump.send(sent)
    theirs.settimeout(90)
    while len(read) < len(sent):
        read += theirs.recv(1 << 16)
    assert read == sent
    pump.stop()
    assert closed.wait(90)
    pump.join(90)
