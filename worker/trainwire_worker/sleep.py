"""Whether the machine slept: one clock that goes on meanwhile, against one that stands still."""

import sys
import time

LEAST_SECONDS = 5.0
"""Differences of the clocks below this are none: they are not read at the same moment."""


def asleep() -> float:
    """Give the seconds that the machine has slept since it was started; always 0 where no clock tells."""
    if sys.platform == "darwin":
        return time.clock_gettime(time.CLOCK_MONOTONIC) - time.clock_gettime(time.CLOCK_UPTIME_RAW)
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
    return 0.0


class SleepWatch:
    """Notices that the machine has slept since the last look."""

    def __init__(self) -> None:
        self._before = asleep()

    def slept(self) -> float | None:
        """Give the seconds of the sleep, or None if there was none worth telling."""
        now = asleep()
        passed = now - self._before
        if passed < LEAST_SECONDS:
            return None
        self._before = now
        return passed
