"""`trainwire watch`: a live view in the terminal, of a run it starts, of a run folder, or at the end of a pipe."""

import argparse
import importlib.util
import os
import select
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainwire_client import AttachedRun, ClientError, Init, Run, attach, launch
from trainwire_protocol.codec import decode_message
from trainwire_protocol.config_load import parse_assignment, read_config_file
from trainwire_protocol.errors import ConfigInvalid

from .curves import read_curves
from .watch_state import WatchState

_REFRESH = 0.125
_FASTER = 1.25
_STANDING = ("paused", "pausing")


class Watch:
    """Shows a run until it ends; with a handle it also takes keys."""

    def __init__(self, events: Iterable[Any], run: Run | AttachedRun | None) -> None:
        self._events = events
        self._run = run
        self._state = WatchState()
        self._over = threading.Event()
        self._left = False
        self._interrupted = False
        self._remark = ""
        self._farewell = ""

    def show(self) -> int:
        """Show the run; 0 when it has ended well or the view was left, the run's exit code, or 1 if its worker died."""
        from rich.console import Console
        from rich.live import Live

        from .watch_view import draw

        console = Console()
        colour = console.color_system is not None and not console.no_color

        def view(*, last: bool = False) -> Any:
            width, height = console.size
            return draw(self._state, width, height, self._keys(), self._remark, colour=colour, last=last)

        threading.Thread(target=self._follow, daemon=True).start()
        # A screen of its own stays whole when the terminal changes its size; what is left at the end goes below.
        with self._keyboard() as pressed, Live(console=console, auto_refresh=False, screen=True) as live:
            while not self._over.is_set() and not self._left:
                try:
                    live.update(view(), refresh=True)
                    for key in pressed(_REFRESH):
                        self._press(key)
                except KeyboardInterrupt:
                    self._interrupt()
        console.print(view(last=True))
        if self._farewell:
            print(self._farewell)
        if self._state.end is not None:
            return self._state.end.exit_code
        return 0 if self._left else 1

    def _interrupt(self) -> None:
        """Ctrl-C: a run that is joined is only left; one that ends with the view is stopped first, and shown so."""
        if self._interrupted or isinstance(self._run, AttachedRun):
            raise KeyboardInterrupt
        self._interrupted = True
        if self._run is None:
            self._remark = "Ctrl-C: the run of this pipe stops; a second one leaves."
        else:
            self._press("s")

    def _follow(self) -> None:
        try:
            for event in self._events:
                self._state.observe(event)
                if isinstance(event, Init) and event.start_step and not self._state.losses:
                    self._recall(event)
            if self._state.end is None and not self._left:
                self._state.lose("The events end without an end line: the worker was killed.")
        except ClientError as error:
            self._state.lose(str(error))
        finally:
            self._over.set()

    def _recall(self, init: Init) -> None:
        """Draw what came before a resume too, where the log is at hand."""
        with suppress(ClientError, OSError):
            before = read_curves(Path(init.run_dir))
            self._state.recall(before.loss, before.valid_loss, init.start_step)

    @contextmanager
    def _keyboard(self) -> Iterator[Callable[[float], str]]:
        """Read single keys while inside; without a terminal to read from it only waits."""
        if self._run is None or not sys.stdin.isatty():
            yield self._wait
            return
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
        tty.setcbreak(fd)
        try:
            yield (
                lambda seconds: (
                    os.read(fd, 64).decode("ascii", "ignore") if select.select([fd], [], [], seconds)[0] else ""
                )
            )
        finally:
            termios.tcsetattr(fd, termios.TCSADRAIN, before)

    def _wait(self, seconds: float) -> str:
        self._over.wait(seconds)
        return ""

    def _keys(self) -> str:
        if self._run is None:
            return "shows only: no keys"
        leave = "d detach" if isinstance(self._run, Run) else "q leave"
        pause = "p resume" if self._state.phase in _STANDING else "p pause"
        return f"{pause}  c save  s stop  +- rate  {leave}"

    def _press(self, key: str) -> None:
        run, state = self._run, self._state
        if run is None:
            return
        if key == "p":
            paused = state.phase in _STANDING
            self._do("resume" if paused else "pause", self._resume if paused else self._pause)
        elif key == "c":
            self._do("checkpoint", run.checkpoint)
        elif key == "s" or (key == "q" and isinstance(run, Run)):
            self._do("stop", run.stop)
        elif key in ("+", "=", "-"):
            if state.peak is None:
                self._remark = "learning rate: it is not known yet"
                return
            peak = float(f"{state.peak * (1 / _FASTER if key == '-' else _FASTER):.4g}")
            self._do(f"learning rate {peak:g}", lambda: run.set(learning_rate=peak))
        elif key == "d" and isinstance(run, Run):
            self._left = True
            run.detach()
            if run.run_dir is not None:
                self._farewell = f"The run goes on: trainwire watch {run.run_dir}"
        elif key == "q":
            self._left = True

    def _pause(self) -> None:
        assert self._run is not None
        self._run.pause()
        # The event may come a moment later; the key must not ask for a pause again until then.
        self._state.phase = "paused"

    def _resume(self) -> None:
        assert self._run is not None
        self._run.resume()
        self._state.phase = "running"

    def _do(self, name: str, order: Callable[[], Any]) -> None:
        """Give an order without holding up the view."""

        def work() -> None:
            self._remark = f"{name} …"
            try:
                order()
                self._remark = f"{name}: done"
            except ClientError as error:
                self._remark = f"{name}: {error}"

        threading.Thread(target=work, daemon=True).start()


def _piped() -> Iterator[Any]:
    """Read events from the end of a pipe; what is no protocol line is passed over."""
    for line in sys.stdin.buffer:
        try:
            yield decode_message(line)
        except ValueError:
            continue


def _config(path: Path, assignments: list[str]) -> dict[str, Any]:
    values = read_config_file(path)
    values.setdefault("run_name", path.stem)
    values.update(parse_assignment(word) for word in assignments)
    return values


def run(words: list[str]) -> int:
    """Watch; 2 without a terminal to draw on, 4 without the libraries of the view."""
    parser = argparse.ArgumentParser(prog="trainwire watch", description=__doc__)
    parser.add_argument("what", type=Path, nargs="?", metavar="CONFIG|RUN_DIR", help="without it: stdin, a pipe")
    parser.add_argument(
        "assignments", nargs="*", default=[], metavar="key=value", help="with a config: keys that win over it"
    )
    chosen = parser.parse_args(words)
    if not sys.stdout.isatty():
        print("trainwire: watch needs a terminal to draw on; `trainwire run` prints plain lines.", file=sys.stderr)
        return 2
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        print("trainwire: watch needs a terminal that can draw; `trainwire run` prints plain lines.", file=sys.stderr)
        return 2
    missing = [name for name in ("rich", "uniplot") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"trainwire: watch needs {missing[0]}. Run `pip install 'trainwire[view]'`.", file=sys.stderr)
        return 4
    try:
        if chosen.what is None:
            if sys.stdin.isatty():
                parser.error("give a config, a run folder, or a pipe: trainwire run c.toml | trainwire watch")
            return Watch(_piped(), None).show()
        if chosen.what.is_dir():
            with attach(chosen.what) as attached:
                return Watch(attached, attached).show()
        values = _config(chosen.what, chosen.assignments)
        with launch(values, cwd=chosen.what.absolute().parent) as launched:
            return Watch(launched, launched).show()
    except (ClientError, ConfigInvalid) as error:
        print(f"trainwire: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        return 130
