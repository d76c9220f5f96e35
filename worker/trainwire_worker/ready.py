"""Waits for descriptors, whatever their numbers: a parent may have left a thousand others open."""

import math
import select
import sys
from collections.abc import Iterable

_LONGEST_MS = 1 << 30


def wait_ready(
    reading: Iterable[int], writing: Iterable[int] = (), seconds: float | None = None
) -> tuple[list[int], list[int]]:
    """Give the descriptors that can be read or written without blocking, those whose other side is gone included.

    Waits for the first of them, at most so many seconds.
    """
    if sys.platform != "linux":
        # There poll does not know every kind of terminal.
        ready, writable, _ = select.select(list(reading), list(writing), [], seconds)
        return ready, writable
    wanted = dict.fromkeys(reading, select.POLLIN)
    for fd in writing:
        wanted[fd] = wanted.get(fd, 0) | select.POLLOUT
    poll = select.poll()
    for fd, mask in wanted.items():
        poll.register(fd, mask)
    found = poll.poll(None if seconds is None else min(math.ceil(seconds * 1000), _LONGEST_MS))
    ended = select.POLLHUP | select.POLLERR | select.POLLNVAL
    return (
        [fd for fd, events in found if wanted[fd] & select.POLLIN and events & (select.POLLIN | ended)],
        [fd for fd, events in found if wanted[fd] & select.POLLOUT and events & (select.POLLOUT | ended)],
    )
