"""The time of a scripted run: the real one, or one that passes only as the script says."""

import time


class RealClock:
    """Waits really take their time and durations are measured."""

    def now_ms(self) -> float:
        """Give milliseconds since some fixed moment."""
        return time.monotonic() * 1000.0

    def epoch_ms(self) -> int:
        """Give milliseconds since 1970."""
        return time.time_ns() // 1_000_000

    def wait(self, ms: float) -> None:
        """Let that many milliseconds pass."""
        if ms > 0:
            time.sleep(ms / 1000.0)


class FakeClock:
    """Waits take no time and are counted: durations are exactly those of the script."""

    def __init__(self) -> None:
        self._now = 0.0

    def now_ms(self) -> float:
        """Give the milliseconds waited so far."""
        return self._now

    def epoch_ms(self) -> int:
        """Give the same, as a whole number."""
        return int(self._now)

    def wait(self, ms: float) -> None:
        """Count that many milliseconds."""
        self._now += ms


Clock = RealClock | FakeClock
