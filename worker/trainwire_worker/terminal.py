"""What a person sees on stderr: a progress bar on a terminal, plain lines elsewhere if asked for."""

import time
import traceback
from typing import Any

from trainwire_protocol.events import (
    Checkpoint,
    End,
    Error,
    EvalEnd,
    Event,
    Generation,
    Init,
    Log,
    Progress,
    Resumed,
    Status,
    Step,
)
from trainwire_protocol.printable import printable

from .wire import TextWriter


def _time(milliseconds: float | None) -> str:
    if milliseconds is None:
        return "?"
    seconds = int(milliseconds / 1000)
    hours, rest = divmod(seconds, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


class Terminal:
    """Shows events to people. `mode` is auto (a bar, on a terminal only), on (a bar or plain lines) or off."""

    def __init__(self, stderr: TextWriter, mode: str) -> None:
        self._stderr = stderr
        on_terminal = stderr.isatty()
        self._bars = mode != "off" and on_terminal
        self._lines = mode == "on" and not on_terminal
        self._bar: Any = None
        self._progress: Any = None
        self._drawn = 0.0
        self._last_text = ""
        self._unfinished = b""

    def show(self, event: Event) -> None:
        """Take notice of an event. A view that fails is given up, and the run goes on."""
        try:
            self._show(event)
        except Exception:
            self._bars = self._lines = False
            self._bar = self._progress = None
            self._stderr.write(f"{traceback.format_exc()}trainwire: the view of the progress is given up.\n")

    def _show(self, event: Event) -> None:
        if type(event) is Step:
            if self._bars:
                self._advance(event)
            elif self._lines:
                self._stderr.write(self._step_line(event))
            return
        if not (self._bars or self._lines):
            if isinstance(event, Error):
                self._stderr.write(printable(f"trainwire: {event.message}{' ' + event.hint if event.hint else ''}\n"))
            return
        if isinstance(event, Progress):
            self._show_progress(event)
        elif isinstance(event, Init) and self._bars:
            self._open_bar(event)
        else:
            if isinstance(event, End):
                self._close_bars()
            text = self._text(event)
            if text and text != self._last_text:
                self._last_text = text
                self._write(printable(text))

    def _text(self, event: Event) -> str | None:
        if isinstance(event, Error):
            return f"error: {event.message}" + (f"\n  {event.hint}" if event.hint else "")
        if isinstance(event, Log) and event.level in ("warn", "error"):
            return f"{event.level}: {event.message}"
        if isinstance(event, Init):
            return f"training {event.trainable_parameters:,} of {event.total_parameters:,} parameters on {event.device}"
        if isinstance(event, EvalEnd):
            loss = "not finite" if event.valid_loss is None else f"{event.valid_loss:.4f}"
            return f"step {event.step}: validation loss {loss}{' (best so far)' if event.best else ''}"
        if isinstance(event, Generation):
            return f"step {event.step}: {event.prompt!r} -> {event.completion!r}"
        if isinstance(event, Resumed):
            return f"resumed at step {event.step}"
        if isinstance(event, Checkpoint):
            return f"step {event.step}: saved {event.path}"
        if isinstance(event, Status) and event.phase in ("loading", "preparing", "pausing", "paused", "stopping"):
            if event.phase == "paused":
                return f"paused at step {event.step}"
            return f"loading {event.message}" if event.phase == "loading" else event.message
        if isinstance(event, End):
            return f"{event.outcome} at step {event.step}" + (f": {event.checkpoint}" if event.checkpoint else "")
        return None

    @staticmethod
    def _step_line(event: Step) -> str:
        loss = "not finite" if event.loss is None else f"{event.loss:.4f}"
        return (
            f"step {event.step}/{event.total_steps}  loss {loss}  {event.tokens_per_second:,.0f} tokens/s"
            f"  ETA {_time(event.eta_ms)}\n"
        )

    def pass_on(self, output: bytes) -> None:
        """Show what the engine prints; whole lines above a bar, as it comes where there is none."""
        if self._bar is None and self._progress is None:
            self._stderr.write_bytes(self._unfinished + output)
            self._unfinished = b""
            return
        *lines, self._unfinished = (self._unfinished + output).split(b"\n")
        if lines:
            self._write(b"\n".join(lines).decode("utf-8", "replace"))

    def _write(self, text: str) -> None:
        bars = [bar for bar in (self._progress, self._bar) if bar is not None]
        for bar in bars:
            bar.clear()
        self._stderr.write(text + "\n")
        for bar in bars:
            bar.refresh()

    def _open_bar(self, event: Init) -> None:
        self._write(self._text(event) or "")
        self._bar = _make_bar(
            total=event.total_steps,
            initial=event.start_step,
            file=self._stderr,
            desc="training",
            unit="step",
            dynamic_ncols=True,
            mininterval=0.1,
            bar_format="{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}",
        )

    def _advance(self, event: Step) -> None:
        if self._bar is None:
            return
        self._bar.total = event.total_steps
        loss = "nan" if event.loss is None else f"{event.loss:.3f}"
        rate = f"{event.tokens_per_second:,.0f}"
        self._bar.set_postfix_str(f"loss {loss}, {rate} tokens/s, ETA {_time(event.eta_ms)}", refresh=False)
        self._bar.n = event.step
        now = time.monotonic()
        if now - self._drawn >= 0.1 or event.step >= event.total_steps:
            self._drawn = now
            self._bar.refresh()

    def _show_progress(self, event: Progress) -> None:
        if not self._bars:
            return
        if self._progress is None:
            self._progress = _make_bar(
                total=event.total, file=self._stderr, desc=event.title, unit=event.unit, dynamic_ncols=True, leave=False
            )
        self._progress.total = event.total
        self._progress.n = event.done
        self._progress.refresh()
        if event.done >= event.total:
            self._progress.close()
            self._progress = None

    def _close_bars(self) -> None:
        for bar in (self._progress, self._bar):
            if bar is not None:
                bar.close()
        self._progress = self._bar = None

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._close_bars()
        self._stderr.write_bytes(self._unfinished)
        self._stderr.flush()


def _make_bar(**settings: Any) -> Any:
    """Make a progress bar, without the thread that the library would start to watch it."""
    from tqdm import tqdm

    tqdm.monitor_interval = 0
    return tqdm(**settings)
