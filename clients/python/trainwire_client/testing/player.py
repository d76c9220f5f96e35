"""A worker without an engine: plays a script, or a recorded session, on stdin and stdout.

It needs the standard library only and is started by its path. `clients/cases/README.md` describes the scripts.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PARENT = os.getppid()
TRANSPORT = ("hello", "response", "heartbeat", "gap")
MISMATCH, NO_MORE_INPUT = 97, 98
"""Exit codes: a command was not as the script says; stdin ended while a command was awaited."""


class Leave(Exception):
    """The script is over; `code` is the exit code."""

    def __init__(self, code: int) -> None:
        self.code = code


def matches(pattern: Any, value: Any) -> bool:
    """Say whether `value` has everything that `pattern` asks for."""
    if isinstance(pattern, dict):
        return isinstance(value, dict) and all(matches(p, value.get(key)) for key, p in pattern.items())
    if isinstance(pattern, list):
        return isinstance(value, list) and len(value) == len(pattern) and all(map(matches, pattern, value))
    return bool(pattern == value)


class Wire:
    """stdin and stdout as bytes, without buffers of their own."""

    def __init__(self) -> None:
        self.chunk = 0
        self._rest = b""
        self._ended = False
        self.commands: list[dict[str, Any]] = []

    def write(self, data: bytes) -> None:
        size = self.chunk or len(data)
        for start in range(0, len(data), size or 1):
            part = data[start : start + size]
            while part:
                part = part[os.write(1, part) :]

    def next_command(self, name: str) -> dict[str, Any] | None:
        """Wait for a command of this name; None at the end of stdin."""
        while True:
            for command in self.commands:
                if name in (command.get("cmd"), "any"):
                    self.commands.remove(command)
                    return command
            if self._ended:
                return None
            data = os.read(0, 1 << 16)
            if not data:
                self._ended = True
                continue
            *lines, self._rest = (self._rest + data).split(b"\n")
            self.commands += [json.loads(line) for line in lines if line.strip()]


class FakeWorker:
    """Plays one script. `attempt` is the number of this process, from 1."""

    def __init__(self, script: Any, attempt: int, samples: dict[str, Any], folder: str = "") -> None:
        attempts = script.get("attempts") or [script.get("worker", [])]
        self.actions = attempts[min(attempt, len(attempts)) - 1]
        self.attempt, self.samples, self.folder = attempt, samples, folder
        self.wire = Wire()
        self.awaited: dict[str, dict[str, Any]] = {}
        self.last_id: Any = None
        self.ids: dict[int | str, Any] = {}
        """The ids of a recorded session, each with this client's for the same command."""
        self.seq, self.step = 0, 0
        self.log: int | None = None

    def fill(self, value: Any) -> Any:
        """Put in the run folder, the last command's id and repeated texts."""
        if isinstance(value, dict):
            if set(value) == {"$repeat"}:
                text, count = value["$repeat"]
                return text * count
            return {key: self.fill(v) for key, v in value.items() if v != "$drop"}
        if isinstance(value, list):
            return [self.fill(v) for v in value]
        if value == "$id":
            return self.last_id
        return value.replace("$dir", self.folder) if isinstance(value, str) else value

    def line(self, message: dict[str, Any]) -> Any:
        """Complete a line from the sample of its type, and count it."""
        kind = message["type"]
        whole = {**self.samples.get(kind, {}), **message}
        if kind not in TRANSPORT:
            whole.setdefault("seq", self.seq + 1)
            if isinstance(whole["seq"], int):
                self.seq = whole["seq"]
            whole.setdefault("ts", 1700000000000 + self.seq)
        if kind == "step":
            self.step = whole["step"]
        head = {key: whole.pop(key) for key in ("type", "seq", "ts") if key in whole}
        return self.fill({**head, **whole})

    def send(self, message: dict[str, Any], to: str = "both") -> None:
        self.put(self.line(message), to)

    def put(self, line: dict[str, Any], to: str = "both") -> None:
        data = json.dumps(line, separators=(",", ":")).encode("ascii") + b"\n"
        if self.log is not None and "seq" in line and to != "wire":
            os.write(self.log, data)
        if to != "log":
            self.wire.write(data)

    def open_log(self, run_dir: str) -> None:
        path = Path(run_dir) / "events.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        old = path.read_bytes() if path.exists() else b""
        old = old[: old.rfind(b"\n") + 1]
        if old:
            self.seq = json.loads(old.splitlines()[-1])["seq"]
        self.log = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.ftruncate(self.log, len(old))

    def await_(self, name: str, pattern: Any) -> None:
        command = self.wire.next_command(name)
        if name == "eof":
            return
        if command is None:
            print(f"fake worker: stdin ended before {name}", file=sys.stderr)
            raise Leave(NO_MORE_INPUT)
        if not matches(self.fill(pattern or {}), command):
            print(f"fake worker: {command} does not match {pattern}", file=sys.stderr)
            raise Leave(MISMATCH)
        self.awaited[command["cmd"]] = command
        self.last_id = command.get("id")
        config = command.get("config") or {}
        self.folder = self.folder or config.get("run_dir", "")
        if command["cmd"] == "start" and self.log is None and config.get("run_dir"):
            self.open_log(config["run_dir"])

    def answer(self, cmd: str, result: Any, error: Any, at_seq: Any) -> None:
        response = {"type": "response", "id": self.awaited[cmd].get("id"), "cmd": cmd, "ok": error is None}
        response |= {"result": result or {}} if error is None else {"error": error}
        if at_seq is not None:
            response["at_seq"] = self.seq if at_seq is True else at_seq
        self.send(response)

    def play(self, actions: Any) -> None:
        for action in actions:
            self.act(action)

    def act(self, action: Any) -> None:
        match action:
            case {"hello": fields}:
                self.send({"type": "hello", "pid": os.getpid(), **fields})
            case {"send": message}:
                self.send(message, action.get("to", "both"))
            case {"verbatim": message}:
                key = "id" if message["type"] == "response" else "cause"
                name = message.get(key)
                self.put({**message, key: self.ids[name]} if name in self.ids else message)
            case {"steps": count}:
                self.step = action["from"] - 1 if "from" in action else self.step
                for _ in range(count):
                    self.send({"type": "step", "step": self.step + 1, **action.get("fields", {})})
            case {"raw": text}:
                self.wire.write(self.fill(text).encode("utf-8", "surrogatepass"))
            case {"hex": digits}:
                self.wire.write(bytes.fromhex(digits))
            case {"chunks": size}:
                self.wire.chunk = size
            case {"log_raw": text}:
                assert self.log is not None
                os.write(self.log, text.encode())
            case {"stderr": text}:
                os.write(2, text.encode())
            case {"await": name}:
                self.await_(name, action.get("with"))
                if "as" in action:
                    self.ids[action["as"]] = self.last_id
            case {"answer": cmd}:
                self.answer(cmd, action.get("result"), action.get("error"), action.get("at_seq"))
            case {"start": fields}:
                self.await_("start", {})
                self.send({"type": "attempt", "attempt": self.attempt, "pid": os.getpid(), **fields})
                self.send({"type": "init"})
                result = {"run_id": "r1", "run_dir": self.folder, "total_steps": 10, "resumed_from": None}
                self.answer("start", result, None, True)
            case {"finish": fields}:
                if fields.get("outcome", "completed") == "completed":
                    self.send({"type": "complete"})
                self.send({"type": "end", **fields})
                raise Leave(fields.get("exit_code", 0))
            case {"repeat": count, "do": actions}:
                for _ in range(count):
                    self.play(actions)
            case {"exit": code}:
                raise Leave(code)
            case _:
                self.act_on_process(action)

    def act_on_process(self, action: Any) -> None:
        match action:
            case {"ignore": name}:
                signal.signal(signal.Signals[name], signal.SIG_IGN)
            case {"close": name}:
                os.close({"stdin": 0, "stdout": 1}[name])
            case {"grandchild": seconds}:
                subprocess.Popen([sys.executable, "-I", "-S", "-c", f"import time; time.sleep({seconds})"])
            case {"sleep_ms": milliseconds}:
                time.sleep(milliseconds / 1000)
            case {"hang": True}:
                while os.getppid() == PARENT:
                    time.sleep(0.25)
                raise Leave(1)
            case {"die": name}:
                os.kill(os.getpid(), signal.Signals[name])
            case _:
                raise ValueError(f"unknown action: {action}")


def session_script(text: str) -> dict[str, Any]:
    """Turn a recorded session into a script that plays its lines as they stand.

    Before the first line that names a command's id (an event's `cause`, a response's `id`), the command of the same
    `cmd` is awaited, and its id is put in from there on. `hello` gets this process's pid.
    """
    lines: list[dict[str, Any]] = [json.loads(line) for line in filter(str.strip, text.splitlines())]
    commands = {line["id"]: line["cmd"] for line in lines if line["type"] == "response" and line["id"] is not None}
    actions: list[dict[str, Any]] = []
    named = set()
    for line in lines:
        name = line.get("id") if line["type"] == "response" else line.get("cause")
        if name in commands and name not in named:
            named.add(name)
            actions.append({"await": commands[name], "as": name})
        if line["type"] == "hello":
            actions.append({"hello": {key: value for key, value in line.items() if key != "pid"}})
        else:
            actions.append({"verbatim": line})
        if line["type"] == "end":
            actions.append({"exit": line["exit_code"]})
    return {"worker": actions}


def number_of_process(counter: str | None) -> int:
    """Count the processes of one script in a file."""
    if counter is None:
        return 1
    path = Path(counter)
    number = int(path.read_text() or 0) + 1 if path.exists() else 1
    path.write_text(str(number))
    return number


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--script", help="a JSON file with `worker` or `attempts`, or a recorded session (.jsonl)")
    parser.add_argument("--counter", help="a file that counts the processes of this script")
    parser.add_argument("--dir", default="", help="what $dir stands for; by default the run_dir of the start command")
    options, _ = parser.parse_known_args(arguments)
    path = Path(options.script)
    text = path.read_text(encoding="utf-8")
    script = session_script(text) if path.suffix == ".jsonl" else json.loads(text)
    samples = json.loads(Path(__file__).with_name("lines.json").read_text(encoding="utf-8"))
    worker = FakeWorker(script, number_of_process(options.counter), samples, options.dir)
    try:
        worker.play(worker.actions)
    except Leave as leave:
        return leave.code
    except BrokenPipeError:
        return 0
    return 0


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
