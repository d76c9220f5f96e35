"""Plays the scripted cases that both clients share: `clients/cases/README.md` describes their format."""

import asyncio
import functools
import inspect
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import trainwire_client as tw
from trainwire_client import aio
from trainwire_client.testing import LINES, fake_worker
from trainwire_client.testing.player import FakeWorker, matches
from trainwire_protocol.events import EVENT_TYPES, type_name

CASES = Path(__file__).parents[3] / "clients" / "cases"
NAMES = sorted(path.stem for path in CASES.glob("*.json") if path.stem != "lines")
WAIT_SECONDS = 90.0


def plain(value: Any) -> Any:
    """Turn results, events and errors into JSON values."""
    if isinstance(value, Exception):
        return {**vars(value), "signal": getattr(value, "signal", None)}
    return msgspec.to_builtins(value)


class OverAsyncio:
    """Calls the asyncio client from a thread without a loop, so that it plays the same cases."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.handle: Any = None

    def do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(WAIT_SECONDS)

    def open(self, name: str, *arguments: Any, **options: Any) -> "OverAsyncio":
        async def opened() -> Any:
            return await getattr(aio, name)(*arguments, **options)

        self.handle = self.do(opened())
        return self

    def __iter__(self) -> "OverAsyncio":
        return self

    def __next__(self) -> Any:
        async def take() -> Any:
            return await anext(self.handle, None)

        event = self.do(take())
        if event is None:
            raise StopIteration
        return event

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.handle, name, None)
        if inspect.iscoroutinefunction(value):
            return lambda *arguments, **options: self.do(value(*arguments, **options))
        return getattr(self.handle._handle, name) if value is None else value

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


class Player:
    """Does what a case's client does, by the client of one of both kinds."""

    def __init__(self, case: dict[str, Any], folder: Path, kind: str) -> None:
        self.case = case
        self.twin = OverAsyncio() if kind == "asyncio" else None
        self.folder = folder / "run"
        self.folder.mkdir()
        self.kit = folder / "kit"
        self.kit.mkdir()
        self.run: Any = None
        self.read: list[Any] = []
        self.unknown: list[dict[str, Any]] = []
        self.begun: dict[str, tuple[threading.Thread, list[Any]]] = {}
        self.filler = FakeWorker({}, 1, LINES, str(self.folder))
        self.write_files()

    def write_files(self) -> None:
        for name, lines in self.case.get("files", {}).items():
            with (self.folder / name).open("w") as file:
                for line in lines:
                    file.write(
                        line
                        if isinstance(line, str)
                        else json.dumps(self.filler.line(line), separators=(",", ":")) + "\n"
                    )

    def play(self) -> None:
        try:
            for action in self.case["client"]:
                began = time.monotonic()
                self.act(self.filler.fill(action))
                assert time.monotonic() - began < action.get("within", WAIT_SECONDS)
        finally:
            if self.run is not None:
                self.run.close()
            for thread, _ in self.begun.values():
                thread.join(WAIT_SECONDS)
            if self.twin is not None:
                self.twin.end()

    def act(self, action: dict[str, Any]) -> None:
        match action:
            case {"launch": options}:
                self.check(action, lambda: self.launch(**options))
            case {"attach": options}:
                self.check(action, lambda: self.open("attach", self.folder, **options))
            case {"history": arguments}:
                self.check(action, lambda: tw.history(self.folder, **arguments))
            case {"read": "all"}:
                self.check(action, lambda: self.read.extend(self.each()))
            case {"read": count}:
                self.read.extend(next(self.run) for _ in range(count))
            case {"read_until": name}:
                while not self.read or type_name(type(self.read[-1])) != name:
                    self.read.append(next(self.run))
            case {"begin": label, "call": name}:
                self.begin(label, name, action.get("args", {}))
            case {"finish": label}:
                thread, outcome = self.begun[label]
                thread.join(WAIT_SECONDS)
                self.check(action, lambda: self.reveal(outcome[0]))
            case {"call": name}:
                self.check(action, lambda: getattr(self.run, name)(**action.get("args", {})))
            case {"wait": pattern}:
                self.check({"returns": pattern, **action}, lambda: self.run.wait(WAIT_SECONDS))
            case {"close": _}:
                self.run.close()
            case {"until": {"heard": name}}:
                self.hear(name)
            case {"expect": expected}:
                for key, value in expected.items():
                    assert self.compare(key, value), f"{key}: expected {value}, got {self.facts(key)}"
            case _:
                raise AssertionError(f"unknown action: {action}")

    def open(self, name: str, subject: Any, **options: Any) -> None:
        opener = functools.partial(self.twin.open, name) if self.twin else getattr(tw, name)
        self.run = opener(subject, on_unknown=self.unknown.append, **options)

    def launch(self, **options: Any) -> None:
        config = {"model": "model", "data": "data.jsonl", "run_dir": str(self.folder)}
        command = fake_worker(self.case, folder=self.kit)
        self.open("launch", config, command=command, **options)

    def each(self) -> Iterator[Any]:
        # Not list(run): what was read before an error must be kept.
        yield from self.run

    def begin(self, label: str, name: str, arguments: dict[str, Any]) -> None:
        outcome: list[Any] = []

        def call() -> None:
            try:
                outcome.append(getattr(self.run, name)(**arguments))
            except tw.ClientError as error:
                outcome.append(error)

        self.begun[label] = threading.Thread(target=call), outcome
        self.begun[label][0].start()

    def reveal(self, outcome: Any) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def hear(self, name: str) -> None:
        kind = next(kind for kind in EVENT_TYPES if type_name(kind) == name)
        deadline = time.monotonic() + WAIT_SECONDS
        while kind not in self.run._core.tracker.heard:
            assert time.monotonic() < deadline, f"{name} did not come"
            time.sleep(0.002)

    def check(self, action: dict[str, Any], do: Any) -> None:
        expected = action.get("raises")
        if expected is None:
            value = do()
            if "returns" in action:
                assert matches(action["returns"], plain(value)), f"{action} gave {value}"
            return
        with pytest.raises(getattr(tw, expected["error"])) as caught:
            do()
        said = str(caught.value)
        assert all(text in said for text in expected.get("says", [])), f"{expected} not in {said}"
        attributes = {key: value for key, value in expected.items() if key not in ("error", "says")}
        assert matches(attributes, plain(caught.value)), f"{attributes} not in {vars(caught.value)}"

    def facts(self, key: str) -> Any:
        """Give what an expectation of this name is about."""
        lines = [plain(event) for event in self.read]
        steps = [line for line in lines if line["type"] == "step"]
        match key:
            case "types" | "not":
                return [line["type"] for line in lines]
            case "events" | "has":
                return lines
            case "seqs":
                return [line["seq"] for line in lines if "seq" in line]
            case "steps":
                return [line["step"] for line in steps]
            case "updates":
                return sum(line["updates"] for line in steps)
            case "tokens":
                return sum(line["total_tokens"] for line in steps)
            case "at_most":
                return len(lines)
            case "unknown":
                return self.unknown
            case "shutdown":
                return [rung.name for rung in self.run.rungs]
            case "alive":
                return self.run._process.alive
        return getattr(self.run, key)

    def compare(self, key: str, expected: Any) -> bool:
        fact = self.facts(key)
        match key:
            case "has":
                return all(any(matches(pattern, line) for line in fact) for pattern in expected)
            case "not":
                return not set(expected) & set(fact)
            case "at_most":
                return bool(fact <= expected)
            case "stderr":
                return expected in fact
        return matches(expected, fact)


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
@pytest.mark.parametrize("name", NAMES)
def test_the_client_keeps_the_promise_of_the_case(name: str, kind: str, tmp_path: Path) -> None:
    case = json.loads((CASES / f"{name}.json").read_text())
    Player(case, tmp_path, kind).play()
