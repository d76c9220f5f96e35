"""The other ranks, as a rank last heard of them, and what they said that it has not taken yet."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from trainwire_protocol.channel import Frames

COMPILING = 10
"""So many times longer may take what kernels are compiled in, or what happens before the first update."""
Message = list[Any]


class Inbox:
    """Messages of one rank in their order; one thread puts them in, another waits for them."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._arrived = threading.Condition()

    def put(self, message: Message) -> None:
        """Add one."""
        with self._arrived:
            self._messages.append(message)
            self._arrived.notify()

    def get(self) -> Message:
        """Wait for the next one."""
        with self._arrived:
            while not self._messages:
                self._arrived.wait()
            return self._messages.popleft()

    def holds(self, word: str) -> bool:
        """Whether a message with this word waits."""
        with self._arrived:
            return any(message[0] == word for message in self._messages)


@dataclass
class Peer:
    """The other end of a connection, as last heard.

    `ticks` counts its work, `idle` says that it waits, `patience` how many timeouts it may go on without either;
    0 is as long as it likes.
    """

    rank: int
    socket: socket.socket
    frames: Frames = field(default_factory=Frames)
    inbox: Inbox = field(default_factory=Inbox)
    heard: float = field(default_factory=time.monotonic)
    ticks: int = -1
    idle: bool = False
    patience: int = COMPILING
    sending: threading.Lock = field(default_factory=threading.Lock)
    moved: float = field(default_factory=time.monotonic)
