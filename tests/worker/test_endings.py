"""Every exit code, wrong arguments, forbidden paths, and a bug in the worker itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from worker_driver import SCHEMA, Spawn, Worker, is_gone, wait_until

from trainwire_protocol.errors import BY_CODE
from trainwire_worker.options import parse

LONG = {"max_steps": 100_000}


def test_every_fatal_code_has_one_exit_code_and_the_schema_says_the_same() -> None:
    fatal = {code: kind.exit_code for code, kind in BY_CODE.items() if kind.exit_code is not None}
    assert SCHEMA["$defs"]["ErrorCode"]["x-exit-codes"] == fatal
    assert fatal == {
        "internal": 1,
        "config_invalid": 3,
        "dataset_invalid": 3,
        "resume_refused": 3,
        "busy": 3,
        "forbidden_path": 3,
        "unsupported": 3,
        "model_load_failed": 4,
        "engine_unavailable": 4,
        "out_of_memory": 5,
        "non_finite": 6,
        "disk_full": 7,
        "io_error": 7,
        "log_unavailable": 7,
        "engine_died": 9,
    }


WRONG_ARGUMENTS = [
    [],
    ["walk"],
    ["run"],
    ["serve", "extra"],
    ["run", "c.toml", "--engine", "gpu"],
    ["run", "c.toml", "--restarts", "-1"],
    ["run", "c.toml", "--heartbeat", "soon"],
    ["run", "c.toml", "--heartbeat", "nan"],
    ["run", "c.toml", "--max-line", "10"],
    ["run", "c.toml", "--script", "there-is-none.json"],
    ["run", "c.toml", "--engine", "fake", "--script", "there-is-none.json"],
    ["run", "c.toml", "--on-eof", "maybe"],
    ["run", "c.toml", "--parent-pid", "me"],
    ["run", "c.toml", "--no-such-option"],
    ["run", "c.toml", "--prog", "on"],
    ["serve", "batch_size=3"],
]


@pytest.mark.parametrize("words", WRONG_ARGUMENTS, ids=" ".join)
def test_wrong_arguments_end_before_hello_with_a_sentence(words: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainwire_worker", *words], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: " in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def failed(worker: Worker, code: str) -> dict[str, Any]:
    """Check a run that failed with a code, and give its error."""
    end = worker.finish()
    error = worker.of("error")[0]
    assert (error["code"], end["reason"], end["exit_code"]) == (code, code, BY_CODE[code].exit_code)
    return error


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (b"model = ", "not TOML"),
        (b"model = \xff", "not UTF-8"),
        (b"# " + b"x" * (1 << 20), "larger than 1 MiB"),
        (b"", "model is missing"),
        (b'model = "m"\ndata = "d"\nbatch_size = 0\n', "batch_size = 0"),
        (b'model = "m"\ndata = "d"\nbatchsize = 3\n', "Did you mean batch_size?"),
        (b'model = "m"\ndata = "d\\u0000/../x"\n', "null"),
        (b'model = "' + b"m" * 5000 + b'"\ndata = "d"\n', "name too long"),
    ],
)
def test_a_config_that_cannot_be_used_is_told_before_anything_is_written(run: Spawn, text: bytes, part: str) -> None:
    worker = run("--lock-wait", "0")
    worker.clean()
    (worker.folder / "config.toml").write_bytes(text)
    again = subprocess.run(
        worker.command, capture_output=True, cwd=worker.folder, check=False, stdin=subprocess.DEVNULL
    )
    assert again.returncode == 3, again.stdout[-500:]
    assert b'"code":"config_invalid"' in again.stdout
    assert part.lower() in again.stdout.decode().lower()
    assert again.stdout.splitlines()[-1].startswith(b'{"type":"end"')


@pytest.mark.parametrize("name", ["there-is-none.toml", ".", "none.json"])
def test_a_config_file_that_is_not_there_is_told(run: Spawn, name: str) -> None:
    worker = run()
    worker.clean()
    command = [name if word.endswith("config.toml") else word for word in worker.command]
    done = subprocess.run(command, capture_output=True, cwd=worker.folder, check=False, stdin=subprocess.DEVNULL)
    assert (done.returncode, b"cannot be read" in done.stdout) == (3, True)


def test_a_config_error_of_start_answers_it_and_ends_the_process(serve: Spawn) -> None:
    worker = serve()
    response = worker.start(config={"batch_size": "many"})
    assert response["error"]["code"] == "config_invalid"
    assert response["error"]["details"]["issues"][0]["path"] == "batch_size"
    failed(worker, "config_invalid")


def test_a_script_that_is_wrong_is_a_config_error(run: Spawn) -> None:
    failed(run(script={"acts": [{"do": "dance"}]}), "config_invalid")


@pytest.mark.parametrize("what", ["model", "config.json", "data", "empty data"])
def test_a_missing_model_or_data_is_found_before_an_engine_starts(run: Spawn, what: str) -> None:
    pytest.importorskip("mlx_lm")
    worker = run(engine="mlx")
    worker.clean()
    if what == "model":
        (worker.folder / "model" / "config.json").unlink()
        (worker.folder / "model").rmdir()
    elif what == "config.json":
        (worker.folder / "model" / "config.json").unlink()
    elif what == "data":
        (worker.folder / "train.jsonl").unlink()
    else:
        (worker.folder / "train.jsonl").write_bytes(b"")
    done = subprocess.run(worker.command, capture_output=True, cwd=worker.folder, check=False, stdin=subprocess.DEVNULL)
    code, status = ("dataset_invalid", 3) if "data" in what else ("model_load_failed", 4)
    assert done.returncode == status
    assert f'"code":"{code}"'.encode() in done.stdout
    assert not (worker.folder / "run").exists()


def test_an_engine_that_is_not_installed_is_told_with_what_to_install(run: Spawn) -> None:
    code = (
        "from trainwire_worker import engine_link, __main__\n"
        "engine_link._NEEDED = ('mlx_is_not_here',)\n"
        "__main__.leave()\n"
    )
    worker = run(python=("-c", code), engine="mlx")
    error = failed(worker, "engine_unavailable")
    assert "pip install" in error["hint"]
    assert error["details"]["missing"] == ["mlx_is_not_here"]


FORBIDDEN = {
    "parent": "../outside",
    "absolute": "/etc",
    "link": "link",
    "below a link": "link/x",
    "loop": "loop",
    "dash": "-",
    "nul": "a\0b",
}


PATH_KEYS = ("model", "data", "valid_data", "run_dir", "start_from", "cache_dir", "prompts", "resume")


@pytest.mark.parametrize(
    ("key", "kind"), [(key, "link") for key in PATH_KEYS] + [("run_dir", kind) for kind in FORBIDDEN if kind != "link"]
)
def test_with_root_no_path_from_stdin_leaves_it(serve: Spawn, tmp_path: Path, key: str, kind: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    (root / "loop").symlink_to(root / "loop")
    path = FORBIDDEN[kind]
    if kind not in ("dash", "nul"):
        path = str(root / path)
    worker = serve("--root", str(root), cwd=root)
    inside = {"model": str(root / "m"), "data": str(root / "d"), "run_dir": str(root / "run")}
    assert worker.refusal("validate", config=inside | {key: path}) == "forbidden_path"
    assert worker.result("validate", config=inside)["valid"]
    response = worker.ask("start", config=inside | {key: path})
    assert response["error"]["code"] == "forbidden_path"
    failed(worker, "forbidden_path")
    assert {entry.name for entry in root.iterdir()} <= {"link", "loop"}


def test_with_root_hub_ids_and_inner_paths_are_fine(serve: Spawn, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "real").mkdir(parents=True)
    (root / "link").symlink_to(root / "real")
    worker = serve("--root", str(root), cwd=tmp_path)
    config = {"model": "organisation/model", "data": [str(root / "link" / "d")], "run_dir": str(root / "link" / "run")}
    worker.config.clear()
    response = worker.ask("start", config=config | {"max_steps": 2})
    assert response["ok"], response
    worker.finish()


def broken(where: str, what: str = "raise ZeroDivisionError('a bug')") -> tuple[str, str]:
    """Make a worker with a bug in one of its functions."""
    module, name = where.rsplit(".", 1)
    owner, _, attribute = f"{module}.{name}".partition(":")
    code = (
        "import sys\n"
        f"import trainwire_worker.{owner.split('.')[0]} as module\n"
        f"def broken(*a, **k):\n    {what}\n"
        f"module.{attribute} = broken\n"
        "from trainwire_worker.__main__ import leave\n"
        "leave()\n"
    )
    return "-c", code


@pytest.mark.parametrize(
    "where",
    [
        "desk.:Desk._dispatch",
        "state.:RunState.as_result",
        "reports.:Reports._on_event",
        "beginning.:prepare",
        "presence.:Presence.settle",
        "snapshot.:Snapshot.observe",
        "state.:RunState.conclude",
    ],
)
def test_a_bug_in_the_worker_still_ends_with_error_end_and_exit_code_one(serve: Spawn, where: str) -> None:
    worker = serve(python=broken(where), config=LONG)
    try:
        worker.send("ping")
        worker.send("start", config=worker.config)
        worker.send("status")
        if where == "state.:RunState.conclude":
            worker.send("stop")
    except BrokenPipeError:
        pass
    worker.reader.rest()
    assert worker.exit_code() == 1
    (error,), end = worker.of("error"), worker.lines[-1]
    assert error["code"] == "internal"
    assert "a bug" in error["message"]
    assert (end["type"], end["outcome"], end["exit_code"]) == ("end", "failed", 1)
    assert "ZeroDivisionError: a bug" in worker.stderr(), "with a traceback for the report"


def test_a_bug_in_the_view_for_people_ends_the_view_and_not_the_run(run: Spawn) -> None:
    worker = run("--progress", "on", python=broken("terminal.:Terminal._text"), config={"max_steps": 5})
    assert worker.finish()["outcome"] == "completed"
    assert worker.stderr().count("the view of the progress is given up") == 1


def test_a_bug_in_the_worker_costs_no_update(serve: Spawn) -> None:
    worker = serve(python=broken("state.:RunState.as_result"), config=LONG | {"save_every": 0})
    worker.begin()
    engine = worker.engine_pid()
    worker.send("status")
    worker.reader.rest()
    assert worker.exit_code() == 1
    wait_until(lambda: is_gone(engine), "the engine saves and leaves")
    assert list(worker.run_dir.glob("checkpoint-*")), "the engine has saved what it had"


def test_an_interrupt_before_the_worker_can_listen_ends_quietly() -> None:
    code = (
        "import trainwire_worker.__main__ as m\n"
        "def interrupted(*a): raise KeyboardInterrupt\n"
        "m.main = interrupted\n"
        "m.leave()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (130, b"")


def test_the_end_waits_for_a_slow_reader_only_so_long(serve: Spawn) -> None:
    worker = serve(
        "--flush-grace", "0.2", script={"acts": [{"do": "flood", "at": "load", "events": 3000}]}, config=LONG
    )
    worker.send("start", config=worker.config)
    path = worker.run_dir / "events.jsonl"
    wait_until(lambda: path.exists() and b'"type":"step"' in path.read_bytes(), "it trains")
    worker.send("stop")
    assert worker.exit_code() == 0


def test_the_working_folder_may_be_gone(serve: Spawn, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()

    def leave() -> None:
        os.chdir(gone)
        gone.rmdir()

    worker = serve(preexec_fn=leave, cwd=None)
    response = worker.start()
    assert response["error"]["code"] == "config_invalid" or response["ok"]
    if response["ok"]:
        worker.send("stop")
    worker.finish()


def test_hello_comes_before_the_rest_of_the_worker_is_loaded(serve: Spawn) -> None:
    read_fd, write_fd = os.pipe()
    code = (
        "import os, sys\n"
        "class Held:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == 'trainwire_worker.worker': os.read({read_fd}, 1)\n"
        "sys.meta_path.insert(0, Held())\n"
        "from trainwire_worker.__main__ import leave\n"
        "leave()\n"
    )
    worker = serve(python=("-c", code), pass_fds=[read_fd])
    worker.wait("hello")
    os.write(write_fd, b"!")
    worker.send("stop")
    worker.finish()
    os.close(read_fd)
    os.close(write_fd)


def test_a_run_that_stops_early_says_so_in_its_last_line(run: Spawn) -> None:
    script = {"valid_examples": 4, "valid_loss": [1.0, 2.0, 3.0, 4.0, 5.0]}
    worker = run(script=script, config={"eval_every": 2, "early_stopping_patience": 1})
    end = worker.finish()
    assert worker.of("complete")[0]["reason"] == "early_stopping"
    assert (end["outcome"], end["reason"], end["exit_code"]) == ("completed", "early_stopping", 0)


def test_the_page_s_arguments_are_those_of_the_worker_with_their_defaults() -> None:
    page = (Path(__file__).parents[2] / "PROTOCOL.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`--.*?) \| .*? \| (.*?) \|$", page, re.MULTILINE)
    run, serve = parse(["run", "c.toml"], {}), parse(["serve"], {})
    assert len(rows) > 12
    for names, told in rows:
        options = re.findall(r"--([a-z-]+)", names)
        for option, default in zip(options, told.split(", ") if len(options) > 1 else [told], strict=True):
            value = getattr(run, option.replace("-", "_"))
            if isinstance(value, int | float) and not isinstance(value, bool):
                assert float(default) == value, option
            elif isinstance(value, str):
                assert default == f"`{value}`", option
            else:
                assert not value, "what has no default is off"
            if option not in ("resume", "overwrite", "linger"):
                assert getattr(serve, option.replace("-", "_")) == value
    usage = " ".join(_help(mode) for mode in ("run", "serve"))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page))
    assert [option for option in sorted(named) if not re.search(rf"{option}\b", usage)] == []


def _help(mode: str) -> str:
    command = [sys.executable, "-m", "trainwire_worker", mode, "--help"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
