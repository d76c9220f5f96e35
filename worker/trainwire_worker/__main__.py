"""The worker's way in and only way out: arguments, descriptors, a run, an exit code."""

import contextlib
import os
import stat
import sys


def _secure_descriptors() -> tuple[int, int, int]:
    """Move the wire away from descriptors 0 and 1, where nothing that prints or reads by accident finds it.

    Descriptors that were closed at the start become the null device first, so that no file takes their number.
    Returns the input, -1 for none; the output, -1 for none; and stderr.
    """
    closed = set()
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            closed.add(fd)
            os.open(os.devnull, os.O_RDWR)
    wire_in = os.dup(0)
    wire_out = -1 if 1 in closed else os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return wire_in, wire_out, 2


def _who_looks_on(mode: str, dialect: str, stdout: int, stderr: int) -> tuple[int, str]:
    """Choose between lines and a bar where both would end on one terminal and tear each other.

    A person who types `run` gets the bar; the lines are in the log. Where the lines go through a pipe, what reads
    them is likely to draw on the terminal. Returns the output, -1 for none, and the mode of the progress.
    """
    if stdout < 0 or not os.isatty(stderr):
        return stdout, "auto"
    if os.isatty(stdout):
        person = mode == "run" and dialect == "native" and os.fstat(stdout).st_rdev == os.fstat(stderr).st_rdev
        return (-1, "auto") if person else (stdout, "off")
    kind = os.fstat(stdout).st_mode
    return stdout, "off" if stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind) else "auto"


def main(arguments: list[str] | None = None) -> int:
    """Run one worker; the exit status of the process."""
    words = sys.argv[1:] if arguments is None else arguments
    from msgspec.structs import replace

    from .options import parse

    options = parse(words, dict(os.environ))
    stdin, stdout, stderr = _secure_descriptors()
    if options.progress == "auto":
        stdout, progress = _who_looks_on(options.mode, options.dialect, stdout, stderr)
        options = replace(options, progress=progress)
    from .hello import greet
    from .signals import hold

    hold()
    greeted = greet(options, stdout)
    from .wire import TextWriter
    from .worker import Worker

    code = Worker(options, stdin, stdout, TextWriter(stderr), greeted=greeted).run()
    if options.dialect == "mlx-tui" and code in (20, 21):
        # That view restarts a worker that leaves with anything but 0.
        return 0
    return code


def _assist_rank_0() -> None:
    """Become an engine without a worker where a launcher gave this process another rank than 0."""
    rank = os.environ.get("MLX_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0"
    if rank != "0":
        os.environ["PYTHONSAFEPATH"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "trainwire_engine", "--assist"])


def leave() -> None:
    """Run the worker and leave the process at once: no thread or library can hold it up."""
    try:
        _assist_rank_0()
        code = main()
    except KeyboardInterrupt:
        code = 130
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 2
        # The text of `--help`; nobody else writes to it.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            sys.stdout.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    try:
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    leave()
