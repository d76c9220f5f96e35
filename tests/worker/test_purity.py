"""Nothing that prints reaches the wire; descriptors that are closed at the start; terminals."""

from __future__ import annotations

import fcntl
import itertools
import os
import resource
import select
import shlex
import socket
import struct
import subprocess
import termios
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from worker_driver import DEADLINE_SECONDS, LineReader, Spawn, check_line, read_log, wait_until

from trainwire_protocol.events import Status
from trainwire_worker.terminal import Terminal

PRINTS = [
    {"do": "print", "step": 2, "by": by, "stream": stream, "text": f'{{"type":"step"}} {by} {stream}', "repeat": 5}
    for by in ("python", "c", "child")
    for stream in ("stdout", "stderr")
]


def test_what_the_engine_its_libraries_and_its_children_print_is_the_worker_s_stderr(run: Spawn) -> None:
    worker = run(script={"acts": PRINTS}, config={"max_steps": 5})
    assert worker.finish()["outcome"] == "completed"
    printed = worker.stderr()
    for by, stream in itertools.product(("python", "c", "child"), ("stdout", "stderr")):
        assert printed.count(f'{{"type":"step"}} {by} {stream}') == 5


def test_the_engine_reads_nothing_from_the_worker_s_stdin(serve: Spawn) -> None:
    worker = serve(config={"max_steps": 10**5})
    worker.begin()
    assert os.readlink(f"/proc/{worker.engine_pid()}/fd/0") == "/dev/null"
    for number in range(50):
        worker.send("ping", number)
    for number in range(50):
        worker.reader.answer(number)
    worker.send("stop")
    worker.finish()


def test_a_print_in_the_worker_itself_does_not_reach_the_wire(run: Spawn) -> None:
    code = (
        "import os, sys\n"
        "from trainwire_worker import beginning, __main__\n"
        "real = beginning.prepare\n"
        "def noisy(*a):\n"
        "    print('from python', flush=True); os.write(1, b'from c\\n'); os.system('echo from a child')\n"
        "    return real(*a)\n"
        "beginning.prepare = noisy\n"
        "__main__.leave()\n"
    )
    worker = run(python=("-c", code), config={"max_steps": 3})
    assert worker.finish()["outcome"] == "completed"
    assert all(text in worker.stderr() for text in ("from python", "from c", "from a child"))


def closing(*numbers: int) -> Callable[[], None]:
    """Close descriptors between fork and exec."""

    def close() -> None:
        for number in numbers:
            os.close(number)

    return close


@pytest.mark.parametrize("closed", [c for n in range(4) for c in itertools.combinations((0, 1, 2), n)])
@pytest.mark.parametrize("mode", ["run", "serve"])
def test_descriptors_that_are_closed_at_the_start(
    request: pytest.FixtureRequest, mode: str, closed: tuple[int, ...]
) -> None:
    spawn: Spawn = request.getfixturevalue(mode)
    worker = spawn("--progress", "on", preexec_fn=closing(*closed), script={"acts": PRINTS}, config={"max_steps": 5})
    if mode == "serve":
        if 0 not in closed:
            worker.send("start", config=worker.config)
            if 1 not in closed:
                worker.wait("complete")
        code = worker.exit_code()
        assert code == 0
        assert (worker.run_dir / "events.jsonl").exists() is (0 not in closed)
    else:
        assert worker.exit_code() == 0
        log = read_log(worker.run_dir)
        assert (log[-1]["type"], log[-1]["outcome"]) == ("end", "completed")
    worker.reader.rest()
    assert bool(worker.lines) is (1 not in closed)
    if 1 not in closed:
        assert worker.lines[-1]["type"] == "end"


@pytest.mark.parametrize("mode", ["run", "serve"])
def test_a_thousand_descriptors_that_the_parent_left_open_are_in_nobody_s_way(
    request: pytest.FixtureRequest, mode: str
) -> None:
    def leak() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        for _ in range(1100):
            os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)

    spawn: Spawn = request.getfixturevalue(mode)
    worker = spawn(preexec_fn=leak, close_fds=False, config={"max_steps": 5})
    if mode == "serve":
        worker.begin()
        worker.wait("complete")
    assert worker.finish()["outcome"] == "completed"


def test_output_to_a_file_is_whole(run: Spawn, tmp_path: Path) -> None:
    with (tmp_path / "out.jsonl").open("wb") as out:
        worker = run(stdout=out, config={"max_steps": 5})
        assert worker.exit_code() == 0
    lines = [check_line(raw) for raw in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert (lines[0]["type"], lines[-1]["type"]) == ("hello", "end")


def test_a_socket_as_stdin_and_stdout(serve: Spawn) -> None:
    ours, theirs = socket.socketpair()
    worker = serve(stdin=theirs, stdout=theirs, config={"max_steps": 5})
    theirs.close()
    reader = LineReader(ours.fileno())
    ours.sendall(b'{"cmd":"ping","id":1}\n')
    assert reader.answer(1)["ok"]
    ours.shutdown(socket.SHUT_WR)
    assert worker.exit_code() == 0
    reader.rest()
    assert reader.lines[-1]["type"] == "end"
    ours.close()


class Pty:
    """A pseudo-terminal with a controlling session for a child."""

    def __init__(self, columns: int = 80) -> None:
        self.master, self.slave = os.openpty()
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def control(self) -> None:
        """Make it the controlling terminal of a new session; to be called in the child."""
        os.setsid()
        fcntl.ioctl(self.slave, termios.TIOCSCTTY, 0)

    def read(self, until: Callable[[str], bool]) -> str:
        """Read until the text is as wanted."""
        text = b""
        while not until(text.decode("utf-8", "replace")):
            ready, _, _ = select.select([self.master], [], [], DEADLINE_SECONDS)
            assert ready, text[-500:]
            try:
                data = os.read(self.master, 1 << 16)
            except OSError:
                break
            text += data
        return text.decode("utf-8", "replace")

    def close(self) -> None:
        os.close(self.master)
        os.close(self.slave)


def test_on_a_terminal_a_person_sees_a_bar_and_stdout_stays_pure(run: Spawn) -> None:
    pty = Pty()
    worker = run("--progress", "on", stderr=pty.slave, stdin=subprocess.DEVNULL, config={"max_steps": 20})
    seen = pty.read(lambda text: "completed" in text)
    worker.finish()
    assert "20/20" in seen
    assert "loss" in seen
    pty.close()


def test_what_the_engine_prints_stands_above_the_bar_in_whole_lines(run: Spawn) -> None:
    pty = Pty()
    acts = [{"do": "print", "step": step, "text": f"warning number {step}"} for step in (5, 6, 7)]
    script = {"acts": acts, "step_ms": 30}
    worker = run("--progress", "on", stderr=pty.slave, stdin=subprocess.DEVNULL, script=script)
    seen = pty.read(lambda text: "completed at" in text)
    worker.finish()
    for step in (5, 6, 7):
        assert f"warning number {step}\r\n" in seen
    pty.close()


def test_a_person_who_types_run_sees_the_bar_and_no_lines_on_the_terminal_that_has_both(run: Spawn) -> None:
    pty = Pty()
    run(stdout=pty.slave, stderr=pty.slave, stdin=subprocess.DEVNULL, config={"max_steps": 20})
    seen = pty.read(lambda text: "completed at step 20" in text)
    assert "20/20" in seen
    assert '"type"' not in seen
    pty.close()


@pytest.mark.parametrize("words", [["--progress", "off"], ["--progress", "on"]], ids=["off", "on"])
def test_who_says_how_the_progress_is_shown_gets_the_lines_on_that_terminal_too(run: Spawn, words: list[str]) -> None:
    pty = Pty()
    run(*words, stdout=pty.slave, stderr=pty.slave, stdin=subprocess.DEVNULL, config={"max_steps": 20})
    seen = pty.read(lambda text: '"type":"end"' in text)
    assert ("20/20" in seen) is (words[1] == "on")
    pty.close()


def test_where_lines_go_through_a_pipe_no_bar_is_drawn_over_what_reads_them(run: Spawn) -> None:
    pty = Pty()
    worker = run(stderr=pty.slave, stdin=subprocess.DEVNULL, script={"acts": [{"do": "print", "step": 1, "text": "?"}]})
    worker.finish()
    assert pty.read(lambda text: "?" in text).strip() == "?"
    pty.close()


def test_serve_on_a_terminal_prints_lines_and_no_bar(serve: Spawn) -> None:
    pty = Pty()
    worker = serve(stdout=pty.slave, stderr=pty.slave, config={"max_steps": 3})
    worker.send("start", config=worker.config)
    seen = pty.read(lambda text: '"type":"end"' in text)
    assert next(check_line(line.encode())["type"] for line in seen.splitlines()) == "hello"
    assert "3/3" not in seen
    pty.close()


def test_a_terminal_as_stdout_gets_the_lines(run: Spawn) -> None:
    pty = Pty()
    worker = run(stdout=pty.slave, stdin=subprocess.DEVNULL, config={"max_steps": 5})
    seen = pty.read(lambda text: '"type":"end"' in text and text.endswith("\n"))
    assert worker.exit_code() == 0
    assert [check_line(line.encode())["type"] for line in seen.splitlines()][-1] == "end"
    pty.close()


def test_words_typed_on_a_terminal_steer_the_run_and_ctrl_c_ends_it(run: Spawn) -> None:
    pty = Pty()
    worker = run(stdin=pty.slave, preexec_fn=pty.control, config={"max_steps": 10**5})
    worker.wait("step")
    os.write(pty.master, b"PAUSE\n")
    worker.wait("paused")
    os.write(pty.master, b"RESUME\n")
    worker.wait("resumed")
    os.write(pty.master, b"\x03")
    end = worker.finish()
    assert (end["reason"], end["exit_code"]) == ("signal SIGINT", 21)
    pty.close()


def test_ctrl_d_is_the_end_of_input_and_the_run_goes_on(run: Spawn) -> None:
    pty = Pty()
    worker = run(stdin=pty.slave, preexec_fn=pty.control, config={"max_steps": 50})
    worker.wait("step")
    os.write(pty.master, b"\x04")
    assert worker.finish()["outcome"] == "completed"
    pty.close()


def test_a_background_job_of_an_interactive_shell_trains_on(run: Spawn, tmp_path: Path) -> None:
    probe = run(config={"max_steps": 5})
    probe.finish()
    pty = Pty(200)
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=pty.slave,
        stdout=pty.slave,
        stderr=pty.slave,
        preexec_fn=pty.control,
        env={**os.environ, "PS1": "ready> ", "TERM": "dumb", "PYTHONSAFEPATH": "1"},
        cwd=tmp_path,
    )
    pty.read(lambda text: "ready>" in text)
    words = [*probe.command, f"run_dir={tmp_path / 'job'}", "max_steps=60"]
    (tmp_path / "job.sh").write_text("exec " + " ".join(map(shlex.quote, words)) + " > job.jsonl\n")
    os.write(pty.master, b"stty tostop; bash job.sh &\n")
    log = tmp_path / "job" / "events.jsonl"
    wait_until(lambda: log.exists() and b'"type":"step"' in log.read_bytes(), "the job trains")
    os.write(pty.master, b"echo typed while it runs\n")
    pty.read(lambda text: text.count("typed while it runs") >= 2)
    wait_until(lambda: b'{"type":"end"' in log.read_bytes(), "the job ends")
    end = read_log(log.parent)[-1]
    assert (end["outcome"], end["step"]) == ("completed", 60)
    os.write(pty.master, b"exit\nexit\n")
    shell.wait(DEADLINE_SECONDS)
    pty.close()


def test_a_terminal_that_hangs_up_ends_the_run_gracefully(run: Spawn) -> None:
    pty = Pty()
    worker = run(stdin=pty.slave, preexec_fn=pty.control, config={"max_steps": 10**5})
    worker.wait("step")
    os.close(pty.slave)
    os.close(pty.master)
    end = worker.finish()
    assert (end["reason"], end["exit_code"]) == ("signal SIGHUP", 21)
    assert end["checkpoint"]


def test_plain_lines_on_stderr_come_only_if_asked(run: Spawn, tmp_path: Path) -> None:
    quiet = run(config={"max_steps": 3})
    quiet.finish()
    assert quiet.stderr() == ""
    asked = run("--progress", "on", f"run_dir={tmp_path / 'asked'}", config={"max_steps": 3})
    asked.finish()
    lines = asked.stderr().splitlines()
    assert any(line.startswith("step 3/3  loss ") for line in lines), lines
    assert lines[-1].startswith("completed at step 3")


@pytest.mark.parametrize(
    ("phase", "message", "told"),
    [("loading", "/models/one", "loading /models/one\n"), ("stopping", "Stopping: signal SIGINT.", None)],
)
def test_a_phase_is_told_to_people_once(phase: str, message: str, told: str | None) -> None:
    written: list[str] = []
    stderr: Any = SimpleNamespace(isatty=lambda: False, write=written.append)
    Terminal(stderr, "on").show(Status(phase=phase, message=message, activity="none", step=3))  # type: ignore[arg-type]
    assert written == [told or f"{message}\n"]


def test_an_error_is_told_to_a_person_in_two_sentences(run: Spawn, tmp_path: Path) -> None:
    worker = run(config={"max_steps": 3, "batchsize": 3})
    worker.finish()
    assert worker.stderr().startswith("trainwire: ")
    assert "batch_size" in worker.stderr()
    assert "Traceback" not in worker.stderr()


@pytest.mark.parametrize("options", [(), ("--progress", "on")], ids=["alone", "among lines"])
def test_an_error_that_quotes_a_row_does_not_steer_the_terminal(run: Spawn, options: tuple[str, ...]) -> None:
    evil = {"do": "fail", "step": 1, "code": "dataset_invalid", "message": "It has \x1b[2J.", "hint": "\x9b31m"}
    worker = run(*options, script={"acts": [evil]})
    assert worker.finish()["outcome"] == "failed"
    assert "It has \ufffd[2J." in worker.stderr()
    assert not {"\x1b", "\x9b"} & set(worker.stderr())
