"""The worker's arguments: what a front end decides before the run, one list for `run` and `serve`."""

import argparse
import functools
from pathlib import Path
from typing import NoReturn

import msgspec

from trainwire_protocol.limits import MAX_LINE_OUT, MIN_LINE_OUT

BACKENDS = ("ring", "nccl", "jaccl", "jaccl-ring")
"""MLX's ways to add up over ranks that the launcher knows how to set up."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The parsed arguments. Times are in seconds."""

    mode: str
    config: Path | None = None
    assignments: list[str] = []
    overwrite: bool = False
    resume: str | None = None
    linger: bool = False
    on_eof: str | None = None
    on_detach: str = "stop"
    parent_pid: int | None = None
    root: Path | None = None
    offline: bool = False
    trust_remote_code: bool = False
    blas: str = "auto"
    profile: int = 0
    engine: str = "mlx"
    script: Path | None = None
    restarts: int = 0
    tracker: list[str] = []
    ranks: int = 1
    hostfile: Path | None = None
    backend: str | None = None
    rank_timeout: float = 30.0
    heartbeat: float = 5.0
    max_line: int = MAX_LINE_OUT
    backpressure: str = "drop"
    dialect: str = "native"
    progress: str = "auto"
    clock: str = "real"
    signal_grace: float = 1.0
    stop_grace: float = 2.0
    exit_grace: float = 10.0
    flush_grace: float = 2.0
    lock_wait: float = 30.0
    parent_poll: float = 0.5


_DEFAULTS = Options(mode="")
_OF_THE_RUN = (
    "engine",
    "script",
    "blas",
    "profile",
    "restarts",
    "tracker",
    "ranks",
    "hostfile",
    "backend",
    "rank_timeout",
    "root",
    "offline",
    "trust_remote_code",
    "on_eof",
    "on_detach",
    "signal_grace",
    "stop_grace",
    "exit_grace",
    "lock_wait",
    "max_line",
)
"""What a resumed run is given again; the rest is about one process, its front end and the lines between them.

A config may need the longest line that it was started with.
"""


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1e9:
        raise ValueError(text)
    return value


def _line_bytes(text: str) -> int:
    value = int(text)
    if not MIN_LINE_OUT <= value <= 1 << 24:
        raise argparse.ArgumentTypeError(f"must be between {MIN_LINE_OUT} and {1 << 24}")
    return value


def _blas(text: str) -> str:
    return str(Path(text).absolute()) if "/" in text else text


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def _ranks(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 4096:
        raise ValueError(text)
    return value


def _timeout(text: str) -> float:
    value = _seconds(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1 second")
    return value


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of `trainwire run` and `trainwire serve`."""
    # A formatter that had to ask for the terminal's width would be asked for every argument, also without --help.
    formatter = functools.partial(argparse.HelpFormatter, width=100)
    parser = argparse.ArgumentParser(
        prog="trainwire",
        description="Fine-tune a language model. Events are JSON lines on stdout, commands are lines on stdin.",
        allow_abbrev=False,
        formatter_class=formatter,
    )
    modes = parser.add_subparsers(dest="mode", required=True, metavar="run|serve")
    run = modes.add_parser(
        "run", help="start at once with a config file", allow_abbrev=False, formatter_class=formatter
    )
    serve = modes.add_parser("serve", help="wait for a start command", allow_abbrev=False, formatter_class=formatter)
    run.add_argument("config", type=Path, help="TOML file (or the config.json of a run folder)")
    run.add_argument("assignments", nargs="*", default=[], metavar="key=value", help="keys that win over the file")
    run.add_argument("--overwrite", action="store_true", help="with resume=never: remove the run that the folder holds")
    run.add_argument("--resume", nargs="?", const="auto", help="auto, never, latest or a checkpoint folder")
    run.add_argument("--linger", action="store_true", help="keep the model after the end for eval and generate")
    for sub in (run, serve):
        _add_common(sub)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--on-eof", choices=("stop", "continue"), help="at the end of stdin (run: continue; serve: detach)")
    add("--on-detach", choices=("stop", "continue"), default="stop", help="when the front end is gone")
    add("--parent-pid", type=int, metavar="PID", help="detach when this process is gone (serve: the parent)")
    add("--root", type=Path, metavar="DIR", help="paths that come over stdin must stay below this folder")
    add("--offline", action="store_true", help="download nothing from the Hub")
    add("--trust-remote-code", action="store_true", help="let a model folder bring its own code")
    add("--blas", type=_blas, default="auto", metavar="WHICH", help="on a CPU: auto, none (MLX's own) or a library")
    add("--profile", type=_count, default=0, metavar="N", help="say where the time of N updates goes")
    add("--engine", choices=("mlx", "fake"), default="mlx", help="fake acts out a script, without MLX")
    add("--script", type=Path, metavar="FILE", help="script of the fake engine")
    add("--restarts", type=_count, default=0, metavar="N", help="restart a dead engine from its checkpoint N times")
    add("--tracker", action="append", metavar="NAME", help="tensorboard, wandb or package.module:Class; repeatable")
    add("--ranks", type=_ranks, default=1, metavar="N", help="train with N processes on this machine")
    add("--hostfile", type=Path, metavar="FILE", help="train on the hosts of this file (MLX's format), over ssh")
    add("--backend", choices=BACKENDS, help="how ranks compute sums; default: nccl with a GPU for each, else ring")
    add("--rank-timeout", type=_timeout, default=30.0, metavar="S", help="a rank that is silent for so long is lost")
    add("--heartbeat", type=_seconds, default=5.0, metavar="S", help="seconds of silence before a heartbeat; 0: none")
    add("--max-line", type=_line_bytes, default=MAX_LINE_OUT, metavar="BYTES", help="longest printed line")
    add("--backpressure", choices=("drop", "block"), default="drop", help="block: wait for the reader of stdout")
    add("--dialect", choices=("native", "mlx-tui"), help="what the lines look like")
    add("--progress", choices=("auto", "on", "off"), default="auto", help="on stderr; auto: a bar that no line tears")
    add("--clock", choices=("real", "scripted"), default="real", help="scripted: the same times in each run")
    add("--signal-grace", type=_seconds, default=1.0, metavar="S", help="a second signal within it is ignored")
    add("--stop-grace", type=_seconds, default=2.0, metavar="S", help="to stop before the first update")
    add("--exit-grace", type=_seconds, default=10.0, metavar="S", help="for the engine to leave after its last report")
    add("--flush-grace", type=_seconds, default=2.0, metavar="S", help="for the reader to take the last lines")
    add("--lock-wait", type=_seconds, default=30.0, metavar="S", help="for an orphaned engine that still saves")
    add("--parent-poll", type=_seconds, default=0.5, metavar="S", help="between looks at the parent process")


def parse(arguments: list[str], environment: dict[str, str]) -> Options:
    """Parse the arguments; leaves the process with status 2 and a sentence on stderr if they are wrong."""
    parser = build_parser()
    known, rest = parser.parse_known_args(arguments)
    values = vars(known)

    def refuse(message: str) -> NoReturn:
        parser.error(message)

    # argparse takes the assignments before the first option only; people write them behind options too.
    late = [word for word in rest if "=" in word and not word.startswith("-")]
    if rest != late or (late and values["mode"] != "run"):
        refuse(f"unrecognized arguments: {' '.join(rest)}")
    if "=" in (values.get("resume") or "") and values["resume"].partition("=")[0].isidentifier():
        # `--resume key=value`: the word behind it is a key of the config, not a folder.
        late.insert(0, values["resume"])
        values["resume"] = "auto"
    values.setdefault("assignments", []).extend(late)
    if values["dialect"] is None:
        values["dialect"] = "mlx-tui" if environment.get("MLX_TUI_MODE") == "1" else "native"
    if values["script"] is not None and values["engine"] != "fake":
        refuse("--script needs --engine fake")
    if values["script"] is not None and not values["script"].is_file():
        refuse(f"--script: there is no file {values['script']}")
    values["tracker"] = list(dict.fromkeys(values["tracker"] or []))
    for name in values["tracker"]:
        from .trackers import problem_with

        if problem := problem_with(name):
            refuse(f"--tracker: {problem}")
    if values["hostfile"] is not None and values["ranks"] != 1:
        refuse("--ranks counts processes on this machine; --hostfile names the hosts")
    several = values["hostfile"] is not None or values["ranks"] != 1
    if values["backend"] is not None and not several:
        refuse("--backend needs --ranks or --hostfile; another launcher says it by its environment")
    if several and values["engine"] == "fake":
        refuse("--ranks and --hostfile need the real engine")
    if values["hostfile"] is not None and not values["hostfile"].is_file():
        refuse(f"--hostfile: there is no file {values['hostfile']}")
    for key in ("script", "root", "hostfile"):
        if values[key] is not None:
            values[key] = values[key].absolute()
    return Options(**values)


def words_of_the_run(options: Options, *, linger: bool) -> list[str]:
    """Give the arguments with which the same run goes on in the same way, without those at their default."""
    words = []
    for key in _OF_THE_RUN:
        value = getattr(options, key)
        name = f"--{key.replace('_', '-')}"
        if value is True:
            words.append(name)
        elif isinstance(value, list):
            words += [word for item in value for word in (name, item)]
        elif value != getattr(_DEFAULTS, key):
            words += [name, f"{value:g}" if isinstance(value, float) else str(value)]
    return [*words, "--linger"] if linger else words
