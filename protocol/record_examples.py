"""Records the sessions in protocol/examples from real workers with the scripted engine.

`python protocol/record_examples.py [NAME …]`. What differs from run to run (folders, process ids, ages) is replaced
by fixed values, so that a session that is recorded again is the same byte for byte, but for `slow-reader`, where
chance decides how many lines were lost.
"""

import fcntl
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent / "examples"
HOME = "/home/ada/tuning"
"""The folder that stands in the sessions for the temporary one."""
PATIENCE = 60.0
SCRIPTED = {"clock": "scripted", "examples": 48, "step_ms": 250}
CONFIG = {
    "model": "models/base",
    "data": "data",
    "batch_size": 8,
    "num_epochs": 2,
    "save_every": 5,
    "eval_every": 5,
}
Line = dict[str, Any]


class Session:
    """One worker process: its lines as they come, and the lines that are sent to it."""

    def __init__(self, folder: Path, *arguments: str, pipe_size: int | None = None, clock: str = "scripted") -> None:
        command = [sys.executable, "-m", "trainwire_worker", *arguments, "--engine", "fake", "--clock", clock]
        environment = {key: value for key, value in os.environ.items() if key != "MLX_TUI_MODE"}
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**environment, "PYTHONSAFEPATH": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        assert self.process.stdout is not None
        if pipe_size is not None and hasattr(fcntl, "F_SETPIPE_SZ"):
            fcntl.fcntl(self.process.stdout, fcntl.F_SETPIPE_SZ, pipe_size)
        self._rest = b""
        self.raw: list[bytes] = []
        self.sent: list[bytes] = []

    def lines(self) -> Iterator[Line]:
        """Give every line until the worker closes its output."""
        assert self.process.stdout is not None
        while True:
            while b"\n" in self._rest:
                line, _, self._rest = self._rest.partition(b"\n")
                self.raw.append(line)
                yield json.loads(line)
            if not select.select([self.process.stdout], [], [], PATIENCE)[0]:
                raise TimeoutError(f"nothing came for {PATIENCE} s after {self.raw[-3:]!r}")
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                return
            self._rest += data

    def until(self, kind: str, **fields: Any) -> Line:
        """Read on to the first line of a type with these fields."""
        for line in self.lines():
            if line["type"] == kind and all(line.get(key) == value for key, value in fields.items()):
                return line
        raise EOFError(f"no {kind} {fields}; the last lines: {self.raw[-5:]!r}")

    def send(self, line: Line | str) -> None:
        """Send a command or a word."""
        assert self.process.stdin is not None
        text = line if isinstance(line, str) else json.dumps(line)
        self.sent.append(text.encode())
        os.write(self.process.stdin.fileno(), text.encode() + b"\n")

    def ask(self, id: int | str, cmd: str, **parameters: Any) -> Line:
        """Send a command and read on to its response."""
        self.send({"id": id, "cmd": cmd, **parameters})
        return self.until("response", id=id)

    def close_input(self) -> None:
        """Leave, as a front end that goes away."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def end(self) -> int:
        """Read to the end and give the exit code."""
        for _ in self.lines():
            pass
        return self.process.wait(PATIENCE)


class Workshop:
    """A folder with a config, in which workers run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write()

    def write(self, **changes: Any) -> None:
        """Write the config with these changes."""
        config = CONFIG | changes
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in config.items())
        (self.folder / "config.toml").write_text(text)

    @contextmanager
    def worker(self, *arguments: str, script: Line | None = None, **options: Any) -> Iterator[Session]:
        """Start a worker with a script; it is gone afterwards."""
        path = self.folder / "script.json"
        path.write_text(json.dumps(SCRIPTED | (script or {})))
        session = Session(self.folder, *arguments, "--script", str(path), **options)
        try:
            yield session
        finally:
            session.process.kill()
            session.process.wait()
            for stream in (session.process.stdin, session.process.stdout):
                if stream is not None:
                    stream.close()


RECORDS: dict[str, Callable[[Workshop], Session]] = {}


def records(function: Callable[[Workshop], Session]) -> Callable[[Workshop], Session]:
    """Register a session under the function's name."""
    RECORDS[function.__name__.replace("_", "-")] = function
    return function


@records
def finished(shop: Workshop) -> Session:
    """A run from its first to its last line, with evaluations, generations and the best checkpoint."""
    shop.write(prompts=["What is a loss?"], generate_every=6)
    script = {"valid_examples": 16, "rows_dropped": {"no_trained_token": {"count": 1, "lines": ["train.jsonl:7"]}}}
    with shop.worker("run", "config.toml", script=script) as session:
        session.end()
        return session


@records
def steered(shop: Workshop) -> Session:
    """A front end validates, starts, pauses, changes settings, saves, evaluates, asks the model, and goes on."""
    waits = [{"do": "await_order", "at": "boundary", "step": 3}, {"do": "await_order", "at": "boundary", "step": 9}]
    with shop.worker("serve", script={"valid_examples": 16, "acts": waits}) as session:
        session.ask(1, "validate", config={**CONFIG, "batchsize": 4})
        session.ask(2, "validate", config=CONFIG)
        session.ask("start", "start", config={**CONFIG, "run_dir": "runs/steered"})
        session.until("step", step=3)
        session.ask(3, "pause")
        session.ask(4, "pause")
        session.ask(5, "set", values={"learning_rate": 2e-5, "save_every": 0})
        session.ask(6, "set", values={"batch_size": 2})
        session.ask(7, "checkpoint", name="before-the-change")
        session.ask(8, "eval", max_batches=1)
        session.ask(9, "generate", prompt="What is a loss?", max_tokens=5)
        session.ask(10, "generate", messages=[{"role": "user", "content": "And before?"}], adapter=False)
        session.ask(11, "status")
        session.ask(12, "ping")
        session.ask(13, "replay", from_seq=2, to_seq=5, types=["status"])
        session.ask(14, "resume", steps=2)
        session.until("paused", step=5)
        session.ask(15, "detach")
        session.ask(16, "dance")
        session.send("this is no command")
        session.until("response", id=None)
        session.send("RESUME")
        session.until("step", step=9)
        session.ask(17, "stop")
        session.end()
        return session


@records
def stopped(shop: Workshop) -> Session:
    """A person stops the run with a word."""
    with shop.worker("run", "config.toml", script={"acts": [{"do": "await_order", "at": "boundary", "step": 4}]}) as s:
        s.until("step", step=4)
        s.send("STOP")
        s.end()
        return s


@records
def resumed(shop: Workshop) -> Session:
    """The second process of a run that was stopped."""
    stopped(shop)
    with shop.worker("run", "config.toml") as session:
        session.end()
        return session


@records
def data_refused(shop: Workshop) -> Session:
    """The data cannot be used."""
    refused = {
        "do": "fail",
        "at": "tokenize",
        "code": "dataset_invalid",
        "message": "data/train.jsonl:3: the row has neither messages, prompt and completion, nor text.",
        "hint": "Every row is a JSON object of one of these formats.",
        "details": {"path": "data/train.jsonl", "line": 3},
    }
    with shop.worker("run", "config.toml", script={"acts": [refused]}) as session:
        session.end()
        return session


@records
def config_refused(shop: Workshop) -> Session:
    """The config names keys of another trainer: no engine is started and nothing is written."""
    with shop.worker("run", "config.toml", "iters=100", "batchsize=4") as session:
        session.end()
        return session


@records
def non_finite(shop: Workshop) -> Session:
    """Two updates are skipped; later five in a row end the run with a checkpoint."""
    acts = [{"do": "non_finite", "step": 2}, {"do": "non_finite", "step": 4, "value": "inf"}]
    acts.append({"do": "non_finite", "step": 7, "until": 12})
    with shop.worker("run", "config.toml", script={"acts": acts}) as session:
        session.end()
        return session


@records
def engine_died(shop: Workshop) -> Session:
    """The engine is killed; the worker starts it again from the last checkpoint."""
    acts = [{"do": "die", "step": 8, "attempt": 1}]
    with shop.worker("run", "config.toml", "--restarts", "1", script={"acts": acts}) as session:
        session.end()
        return session


@records
def out_of_memory(shop: Workshop) -> Session:
    """The memory does not suffice."""
    acts = [{"do": "fail", "step": 3, "code": "out_of_memory", "message": "The memory does not suffice."}]
    with shop.worker("run", "config.toml", script={"acts": acts}) as session:
        session.end()
        return session


@records
def detached(shop: Workshop) -> Session:
    """The front end goes away: the run stops with a checkpoint."""
    waits = {"acts": [{"do": "await_order", "at": "boundary", "step": 3}]}
    with shop.worker("serve", script=waits) as session:
        session.ask("start", "start", config={**CONFIG, "run_dir": "runs/detached"})
        session.until("step", step=3)
        session.close_input()
        session.end()
        return session


@records
def interrupted(shop: Workshop) -> Session:
    """Somebody presses Ctrl-C."""
    waits = {"acts": [{"do": "await_order", "at": "boundary", "step": 3}]}
    with shop.worker("run", "config.toml", script=waits) as session:
        session.until("step", step=3)
        session.process.send_signal(signal.SIGINT)
        session.end()
        return session


@records
def lingering(shop: Workshop) -> Session:
    """The run has completed and its model still answers."""
    with shop.worker("run", "config.toml", "--linger") as session:
        session.until("complete")
        session.ask("a", "generate", prompt="What is a loss?")
        session.ask("b", "pause")
        session.send("STOP")
        session.end()
        return session


@records
def idle(shop: Workshop) -> Session:
    """A worker that waits for a run, gives signs of life, and is dismissed."""
    with shop.worker("serve", "--heartbeat", "1") as session:
        session.until("heartbeat")
        session.ask(1, "pause")
        session.send('{"id": 2, "cmd": "stop"')
        session.until("response", id=None)
        session.ask(3, "stop")
        session.end()
        return session


@records
def slow_reader(shop: Workshop) -> Session:
    """A reader that did not read for a while learns what it missed, and asks for a part of it."""
    acts = [{"do": "flood", "at": "boundary", "step": 3, "events": 77_500}]
    acts.append({"do": "await_order", "at": "boundary", "step": 8})
    with shop.worker("run", "config.toml", script={"acts": acts}, pipe_size=4096) as session:
        session.until("step", step=1)
        log = shop.folder / "runs" / "config" / "events.jsonl"
        deadline = time.monotonic() + PATIENCE
        while not log.exists() or b'"step":8,' not in log.read_bytes()[-1000:]:
            if time.monotonic() > deadline:
                raise TimeoutError("the run does not go on")
            time.sleep(0.05)
        first = session.until("gap")["from_seq"]
        session.ask(1, "replay", from_seq=first, to_seq=first + 2)
        session.ask(2, "stop")
        session.end()
        return session


def settled(raw: list[bytes], folder: Path) -> bytes:
    """Put fixed values in the place of what differs from run to run."""
    text = b"".join(line + b"\n" for line in raw).replace(str(folder).encode(), HOME.encode())
    text = text.replace(sys.executable.encode(), b"python3")
    text = re.sub(rb'"(pid|engine_pid)":\d+', rb'"\1":1', text)
    return re.sub(rb'"(up_ms|loop_age_ms)":\d+', rb'"\1":200', text)


def record(name: str) -> tuple[bytes, bytes]:
    """Record a session: the worker's lines, and the lines that it was sent."""
    # The length of the path decides some numbers of bytes, so it is always the same.
    folder = Path(tempfile.mkdtemp(prefix="trainwire-", dir="/tmp"))
    try:
        session = RECORDS[name](Workshop(folder))
        return settled(session.raw, folder), settled(session.sent, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Record all sessions, or those that are named."""
    (EXAMPLES / "commands").mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or RECORDS:
        lines, sent = record(name)
        (EXAMPLES / f"{name}.jsonl").write_bytes(lines)
        if sent:
            (EXAMPLES / "commands" / f"{name}.txt").write_bytes(sent)
        print(f"{name}: {len(lines.splitlines())} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
