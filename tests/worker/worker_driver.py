"""Drives real worker processes with the scripted engine: spawns, reads lines by byte 0x0A, waits for what is said.

Every line is checked against the protocol's schema as it arrives, and a whole session against the rules that hold for
each: `hello` first, `end` last and once, rising `seq`, one response to each command, the log equal to what was said.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from jsonschema import Draft202012Validator

from trainwire_protocol.events import EVENT_TYPES
from trainwire_protocol.rundir import lock_holder

ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = 90.0
"""How long a test waits for anything before it fails: far above what a busy machine needs, so it says no speed."""
SCHEMA = json.loads((ROOT / "protocol/schema.json").read_text())
EVENTS = {str(kind.__struct_config__.tag) for kind in EVENT_TYPES}
SHORT_TIMERS = ("--parent-poll", "0.02")
"""What every worker gets, so that no test waits for a timer's usual length."""

Line = dict[str, Any]
Spawn = Callable[..., "Worker"]
_validators: dict[str, Draft202012Validator] = {}


def _definition(kind: str) -> str:
    name = "".join(part.capitalize() for part in kind.split("_"))
    return name + "Event" if kind in EVENTS else name


def check_line(raw: bytes, limit: int = 60_000) -> Line:
    """Decode a printed line, without its LF; an AssertionError says which rule of the wire it breaks."""
    assert raw.startswith(b"{"), f"a line that does not begin with a brace: {raw[:200]!r}"
    assert all(0x20 <= byte <= 0x7E for byte in raw), f"a byte that is not printable ASCII: {raw[:200]!r}"
    assert len(raw) < limit, f"a line of {len(raw)} bytes: {raw[:200]!r}"
    line: Line = json.loads(raw, parse_constant=lambda name: pytest_fail(f"{name} in {raw[:200]!r}"))
    kind = line["type"]
    if kind not in _validators:
        schema = {"$ref": f"#/$defs/{_definition(kind)}", "$defs": SCHEMA["$defs"]}
        _validators[kind] = Draft202012Validator(schema)
    error = next(_validators[kind].iter_errors(line), None)
    assert error is None, f"{error.message if error else ''} in {raw[:400]!r}"
    return line


def pytest_fail(message: str) -> Any:
    """Refuse a constant that JSON does not know."""
    raise AssertionError(message)


class LineReader:
    """Reads whole lines from a descriptor, with a deadline, and never sleeps."""

    def __init__(self, fd: int, limit: int = 60_000, check: Callable[[bytes, int], Line] = check_line) -> None:
        self.fd = fd
        self.limit = limit
        self.at_end = False
        self.lines: list[Line] = []
        self.raw: list[bytes] = []
        self._check = check
        self._rest = b""
        self._next = 0

    def read_some(self, deadline: float) -> None:
        """Take what has arrived; at least something, the end, or an AssertionError at the deadline."""
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([self.fd], [], [], left)[0]:
            raise AssertionError(f"nothing more came in time; the last lines were {self.lines[-8:]}")
        try:
            data = os.read(self.fd, 1 << 18)
        except OSError:
            data = b""
        if not data:
            self.at_end = True
            assert not self._rest, f"the output ends in half a line: {self._rest[-200:]!r}"
            return
        *whole, self._rest = (self._rest + data).split(b"\n")
        for raw in whole:
            self.raw.append(raw)
            self.lines.append(self._check(raw, self.limit))

    def wait(self, kind: str = "", *, seconds: float = DEADLINE_SECONDS, **fields: Any) -> Line:
        """Give the next line of this type with these fields, after the one that the last call gave."""
        deadline = time.monotonic() + seconds
        while True:
            while self._next < len(self.lines):
                line = self.lines[self._next]
                self._next += 1
                if matches(line, kind, fields):
                    return line
            assert not self.at_end, f"no {kind} {fields} came; the last lines were {self.lines[-8:]}"
            self.read_some(deadline)

    def answer(self, id: Any, *, seconds: float = DEADLINE_SECONDS) -> Line:
        """Give the response to a command, wherever it stands."""
        deadline = time.monotonic() + seconds
        seen = 0
        while True:
            for line in self.lines[seen:]:
                if line["type"] == "response" and line["id"] == id:
                    return line
            seen = len(self.lines)
            assert not self.at_end, f"no response to {id!r} came; the last lines were {self.lines[-8:]}"
            self.read_some(deadline)

    def rest(self, seconds: float = DEADLINE_SECONDS) -> None:
        """Read to the end."""
        deadline = time.monotonic() + seconds
        while not self.at_end:
            self.read_some(deadline)


def matches(line: Line, kind: str, fields: Mapping[str, Any]) -> bool:
    """Say whether a line has this type and these fields."""
    return (not kind or line["type"] == kind) and all(line.get(key) == value for key, value in fields.items())


class Steering:
    """What a worker's front end and a controller on its socket have in common: lines in, commands out."""

    reader: LineReader
    sent: list[Any]

    def raw(self, data: bytes) -> None:
        """Write bytes as they are."""
        raise NotImplementedError

    def send(self, cmd: str, id: Any = None, **parameters: Any) -> Any:
        """Send a command and give its id."""
        if id is None:
            id = f"{cmd}-{len(self.sent) + 1}"
        self.sent.append(id)
        self.raw(json.dumps({"id": id, "cmd": cmd, **parameters}).encode() + b"\n")
        return id

    def ask(self, cmd: str, id: Any = None, **parameters: Any) -> Line:
        """Send a command and wait for its response."""
        return self.reader.answer(self.send(cmd, id, **parameters))

    def result(self, cmd: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, which must succeed, and give its result."""
        response = self.ask(cmd, **parameters)
        assert response["ok"], response
        result: dict[str, Any] = response["result"]
        return result

    def refusal(self, cmd: str, **parameters: Any) -> str:
        """Send a command, which must be refused, and give the code."""
        response = self.ask(cmd, **parameters)
        assert not response["ok"], response
        code: str = response["error"]["code"]
        return code

    def wait(self, kind: str = "", *, seconds: float = DEADLINE_SECONDS, **fields: Any) -> Line:
        """Wait for a line."""
        return self.reader.wait(kind, seconds=seconds, **fields)

    @property
    def lines(self) -> list[Line]:
        """Every line so far."""
        return self.reader.lines

    def of(self, *kinds: str) -> list[Line]:
        """Give the lines of these types so far."""
        return [line for line in self.lines if line["type"] in kinds]


class Controller(Steering):
    """A second front end, on the control socket."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self.reader = LineReader(self._socket.fileno())
        self.sent = []

    def raw(self, data: bytes) -> None:
        """Write bytes as they are."""
        self._socket.sendall(data)

    def close_input(self) -> None:
        """Say nothing more, and go on reading."""
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Leave."""
        self._socket.close()


class Worker(Steering):
    """A worker process with the scripted engine, its pipes held by the test."""

    def __init__(
        self,
        folder: Path,
        mode: str,
        *words: str,
        script: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        python: Sequence[str] = ("-m", "trainwire_worker"),
        engine: str = "fake",
        limit: int = 60_000,
        check: Callable[[bytes, int], Line] = check_line,
        **popen: Any,
    ) -> None:
        self.folder = folder
        self.config: dict[str, Any] = {"run_dir": str(folder / "run"), **base_config(folder), **(config or {})}
        self.run_dir = Path(self.config["run_dir"])
        command = [sys.executable, *python, mode]
        if mode == "run":
            command.append(str(write_toml(folder / "config.toml", self.config)))
        command += ["--engine", engine]
        if script is not None:
            path = folder / f"script-{len(list(folder.glob('script-*')))}.json"
            path.write_text(json.dumps(script))
            command += ["--script", str(path)]
        self.command = [*command, *SHORT_TIMERS, *words]
        self.error_file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `clean`
        settings: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": self.error_file,
            "cwd": folder,
            "bufsize": 0,
        }
        inherited = {key: value for key, value in os.environ.items() if key != "MLX_TUI_MODE"}
        environment = {**inherited, "PYTHONSAFEPATH": "1", **(popen.pop("env", None) or {})}
        self._controllers: list[Controller] = []
        self.started = time.monotonic()
        self.process = subprocess.Popen(self.command, env=environment, **{**settings, **popen})
        stdout = self.process.stdout
        self.reader = LineReader(stdout.fileno() if stdout else -1, limit, check)
        self.sent = []

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self.process.pid

    def raw(self, data: bytes) -> None:
        """Write bytes to stdin."""
        assert self.process.stdin is not None
        while data:
            data = data[os.write(self.process.stdin.fileno(), data) :]

    def close_input(self) -> None:
        """End the input."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def close_output(self) -> None:
        """Stop reading for ever."""
        assert self.process.stdout is not None
        self.process.stdout.close()

    def start(self, **parameters: Any) -> Line:
        """Send `start` and wait for its response."""
        config = {**self.config, **parameters.pop("config", {})}
        return self.ask("start", config=config, **parameters)

    def begin(self, **parameters: Any) -> Worker:
        """Send `start`, which must succeed, and wait for the first update."""
        response = self.start(**parameters)
        assert response["ok"], response
        self.wait("step")
        return self

    def signal(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def exit_code(self, seconds: float = DEADLINE_SECONDS) -> int:
        """Wait for the process to leave."""
        return self.process.wait(seconds)

    def finish(self, seconds: float = DEADLINE_SECONDS) -> Line:
        """Read to the end, check the whole session and give its last line; the exit status is in it."""
        self.reader.rest(seconds)
        code = self.exit_code(seconds)
        end = self.lines[-1]
        assert end["type"] == "end", f"{self.stderr()[-2000:]}\n{self.lines[-5:]}"
        assert end["exit_code"] == code, end
        check_session(self.lines, self.sent)
        return end

    def stderr(self) -> str:
        """Give what is on stderr so far."""
        size = os.fstat(self.error_file.fileno()).st_size
        return os.pread(self.error_file.fileno(), size, 0).decode("utf-8", "replace")

    def log(self) -> list[Line]:
        """Give the run's log."""
        return read_log(self.run_dir)

    def engine_pid(self) -> int:
        """The engine's process id, from the lock file."""
        holder = lock_holder(self.run_dir)
        assert holder is not None
        assert holder.engine_pid is not None
        return holder.engine_pid

    def hold_engine(self) -> None:
        """Keep the engine from doing anything, as in a very long step."""
        os.kill(self.engine_pid(), signal.SIGSTOP)

    def let_engine_go(self) -> None:
        """Let a held engine go on."""
        os.kill(self.engine_pid(), signal.SIGCONT)

    def controller(self) -> Controller:
        """Connect to the control socket and read the greeting."""
        holder = lock_holder(self.run_dir)
        assert holder is not None
        assert holder.socket is not None
        self._controllers.append(Controller(holder.socket))
        return self._controllers[-1]

    def clean(self) -> None:
        """Leave nothing behind."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for controller in self._controllers:
            controller.close()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self.error_file.close()


def base_config(folder: Path) -> dict[str, Any]:
    """Make what any run needs: a model folder, a data file, one checkpoint every five updates."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    (folder / "train.jsonl").write_text('{"text": "a row"}\n')
    return {"model": str(model), "data": str(folder / "train.jsonl"), "save_every": 5, "max_steps": 20}


def write_toml(path: Path, config: Mapping[str, Any]) -> Path:
    """Write a flat config file."""
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in config.items()))
    return path


def read_log(run_dir: Path) -> list[Line]:
    """Read a run's log; every line must be whole, and numbered without a hole."""
    raw = (run_dir / "events.jsonl").read_bytes()
    assert raw.endswith(b"\n")
    lines = [check_line(line) for line in raw.splitlines()]
    assert [line["seq"] for line in lines] == list(range(1, len(lines) + 1))
    return lines


def check_session(lines: Sequence[Line], sent: Sequence[Any] = ()) -> None:
    """Check the rules that hold for the lines of every whole session."""
    assert lines[0]["type"] == "hello"
    ends = [index for index, line in enumerate(lines) if line["type"] == "end" and not line.get("replay")]
    assert ends == [len(lines) - 1], "there is one `end`, the last line"
    live = [line["seq"] for line in lines if "seq" in line and not line.get("replay")]
    assert live == sorted(set(live)), "seq rises strictly on the live stream"
    answered = [line["id"] for line in lines if line["type"] == "response" and line["id"] is not None]
    assert sorted(map(repr, answered)) == sorted(map(repr, sent)), "every command is answered exactly once"
    said = {line["seq"]: index for index, line in enumerate(lines) if "seq" in line and not line.get("replay")}
    for index, line in enumerate(lines):
        at_seq = line.get("at_seq")
        assert at_seq is None or said.get(at_seq, -1) < index, f"{line} comes before what it names"
        if line["type"] in ("paused", "resumed"):
            before = [other for other in lines[:index] if other["type"] == "status"]
            phase = {"paused": "paused", "resumed": "running"}[line["type"]]
            assert before[-1]["phase"] in (phase, "stopping"), f"no status before {line}"


def wait_until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> Any:
    """Wait for something that no descriptor tells of; looks every few milliseconds."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not in time: {what}"
        select.select([], [], [], 0.005)
    return value


def is_gone(pid: int) -> bool:
    """Say whether a process is dead, waited for or not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except (ProcessLookupError, FileNotFoundError):
        return True


def resident_bytes(pid: int) -> int:
    """Give a process's resident memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def children_of(pid: int) -> list[int]:
    """Give a process's children."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def killed_at_the_end(pid: Callable[[], int]) -> Iterator[None]:
    """Kill a process that a test leaves on purpose."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError, AssertionError):
            os.kill(pid(), signal.SIGKILL)


def encode(value: Any) -> bytes:
    """Encode JSON."""
    return msgspec.json.encode(value)
