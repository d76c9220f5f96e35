"""Acts out what a script wants to happen at a moment."""

import ctypes
import os
import signal
import struct
import subprocess
import sys
import time

import msgspec

from trainwire_protocol import errors
from trainwire_protocol.channel import encode
from trainwire_protocol.events import Log, Progress

from . import script as s
from .clock import Clock
from .inbox import Inbox

FLOOD_BYTES = 8 << 10


class Acts:
    """The acts of a script, performed when their moment comes."""

    def __init__(self, script: s.Script, inbox: Inbox, clock: Clock) -> None:
        self._acts = script.acts
        self._inbox = inbox
        self._clock = clock
        self._parent = os.getppid()
        self.attempt = 1

    def perform(self, moment: s.Moment, step: int) -> str | None:
        """Do what is due. Gives the non-finite value that the script puts in place of a loss.

        Raises TrainwireError where the script says `fail`.
        """
        value = None
        for act in self._acts:
            if not act.due(moment, step, self.attempt):
                continue
            if isinstance(act, s.MakeNonFinite):
                value = act.value
            elif isinstance(act, s.Fail):
                raise errors.from_code(act.code, act.message, hint=act.hint, **act.details)
            else:
                self._do(act, step)
        return value

    def _do(self, act: s.Act, step: int) -> None:
        match act:
            case s.Sleep():
                self._clock.wait(act.ms)
            case s.Hang():
                self._hang(act.orphan_ms / 1000)
            case s.AwaitOrder():
                self._inbox.await_order()
            case s.Print():
                _print(act)
            case s.Spawn():
                code = f"import time; time.sleep({act.ms / 1000.0}); print('the child leaves')"
                subprocess.Popen([sys.executable, "-c", code])
            case s.Die():
                _die(act.signal)
            case s.Exit():
                os._exit(act.status)
            case s.Say():
                self._inbox.emit(Log(level=act.level, message=act.message, code=act.code, details=act.details))
            case s.ShowProgress():
                self._show_progress(act, step)
            case s.Flood():
                self._flood(act)
            case s.Frame():
                self._inbox.raw(_frame(act.kind))
                if act.kind == "half":
                    os._exit(1)
            case s.CloseChannel():
                self._inbox.close()

    def _hang(self, orphan_seconds: float) -> None:
        deadline = None
        while deadline is None or time.monotonic() < deadline:
            time.sleep(min(0.25, orphan_seconds))
            if deadline is None and os.getppid() != self._parent:
                deadline = time.monotonic() + orphan_seconds
        os._exit(1)

    def _show_progress(self, act: s.ShowProgress, step: int) -> None:
        for done in range(act.total + 1):
            self._inbox.emit(Progress(id=f"script-{step}", title=act.title, done=done, total=act.total, unit=act.unit))
            if done < act.total:
                self._clock.wait(act.ms / act.total)

    def _flood(self, act: s.Flood) -> None:
        started = time.monotonic()
        self._inbox.flush()
        waiting = bytearray()
        for number in range(1, act.events + 1):
            waiting += encode(_flood_event(act, number))
            ahead = started + number / act.per_second - time.monotonic() if act.per_second else 0.0
            # Without a pace, many events go out at once: one at a time is slower than a worker that is to be tried.
            if act.per_second or len(waiting) > FLOOD_BYTES or number == act.events:
                self._inbox.raw(bytes(waiting))
                waiting.clear()
            if ahead > 0.001:
                time.sleep(ahead)


def _flood_event(act: s.Flood, number: int) -> Log | Progress:
    if act.type == "log":
        return Log(level="debug", message=f"event {number} of {act.events}", code="flood")
    return Progress(id="flood", title="Flood", done=number, total=act.events, unit="events")


def _print(act: s.Print) -> None:
    text = (act.text + "\n") * act.repeat
    descriptor = 1 if act.stream == "stdout" else 2
    if act.by == "python":
        stream = sys.stdout if act.stream == "stdout" else sys.stderr
        stream.write(text)
        stream.flush()
    elif act.by == "c":
        libc = ctypes.CDLL(None)
        libc.dprintf(descriptor, b"%s", text.encode())
    else:
        code = f"import os; os.write({descriptor}, {act.text!r}.encode() + b'\\n')\n" * min(act.repeat, 1000)
        subprocess.run([sys.executable, "-c", code], check=False)


def _die(name: str) -> None:
    number = signal.Signals[name]
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    while True:
        time.sleep(3600)


def _frame(kind: str) -> bytes:
    """Make bytes that a worker cannot take for a report."""
    whole = encode(Log(level="info", message="half of this arrives"))
    body = {
        "garbage": b"\xc1\xff\x00garbage",
        "unknown_type": msgspec.msgpack.encode({"type": "from_the_future", "value": 1}),
        "missing_field": msgspec.msgpack.encode({"type": "log", "level": "info"}),
        "bad_text": b"\x83\xa4type\xa3log\xa5level\xa4info\xa7message\xa4\xff\xfe\xfd\xfc",
    }.get(kind)
    if body is not None:
        return struct.pack(">I", len(body)) + body
    return whole[: len(whole) // 2] if kind == "half" else struct.pack(">I", 0xFFFFFFFF) + b"\x00" * 64
