"""What a scripted run consists of, and the pieces of work it does: a save, an evaluation, a generation."""

import errno
import math
from collections.abc import Callable
from pathlib import Path

import msgspec

from trainwire_protocol import rundir
from trainwire_protocol.coalesce import perplexity
from trainwire_protocol.config import Config
from trainwire_protocol.errors import DiskFull, IoError, TrainwireError
from trainwire_protocol.events import Checkpoint, CheckpointKind, EvalEnd, Log

from .acts import Acts
from .clock import Clock
from .disk import State, write_checkpoint
from .inbox import Inbox
from .plan import Plan
from .script import Script

GiveWay = Callable[[], None]


class Session:
    """The parts of a run and its state; the work that the loop and the orders share."""

    def __init__(self, script: Script, inbox: Inbox, clock: Clock, acts: Acts, config: Config, plan: Plan) -> None:
        self.script, self.inbox, self.clock, self.acts = script, inbox, clock, acts
        self.given = self.config = config
        self.plan = plan
        self.state = State()
        self.newest: Path | None = None
        """The checkpoint that was whole last."""
        self.begun = False
        """True once the run is ready for its first update."""
        self.start_step = 0
        self._whole: tuple[int, Config, Path, int] | None = None
        self.run_dir = Path(config.run_dir or "run").absolute()

    def went_on_from(self, folder: Path) -> None:
        """Take notice of the checkpoint that the run goes on from."""
        manifest = rundir.read_manifest(folder)
        size = sum(entry.size for entry in manifest.files.values()) if manifest else 0
        self.newest = folder
        self._whole = (self.state.step, self.config, folder, size)

    def whole(self) -> tuple[Path, int] | None:
        """Give the checkpoint that already holds this very state, and its size in bytes."""
        if self._whole is not None and self._whole[:2] == (self.state.step, self.config):
            return self._whole[2:]
        return None

    def save(self, name: str, kind: CheckpointKind, *, cause: int | None = None) -> tuple[Path, int]:
        """Write a checkpoint: its path and its size in bytes. Raises TrainwireError if it fails."""
        step = self.state.step
        self.inbox.alive("checkpoint", step)
        self.inbox.flush()
        self.clock.wait(self.script.save_ms)
        self.acts.perform("final" if kind == "final" else "save", step)
        self.state.given = msgspec.to_builtins(self.given)
        self.state.config = msgspec.to_builtins(self.config)
        history = list(self.inbox.reported)
        try:
            path, size = write_checkpoint(self.run_dir, name, kind, self.state, history, self.clock.epoch_ms())
        except OSError as error:
            known = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else IoError
            raise known(f"{self.run_dir / name} cannot be written: {error.strerror}.") from None
        self.inbox.emit(Checkpoint(path=str(path), step=step, bytes=size, kind=kind, cause=cause))
        if kind == "periodic":
            self.inbox.reported.clear()
        self.newest = path
        self._whole = (step, self.config, path, size)
        return path, size

    def save_due(self, name: str, kind: CheckpointKind) -> None:
        """Write a checkpoint that is due; one that fails is reported, and the run goes on."""
        try:
            self.save(name, kind)
        except TrainwireError as error:
            details = {"path": str(self.run_dir / name), "step": self.state.step, "code": error.code}
            message = f"{error.message} The checkpoints before are intact."
            self.inbox.emit(Log(level="error", code="save_failed", message=message, details=details))

    def evaluate(self, max_batches: int | None, give_way: GiveWay, cause: int | None = None) -> EvalEnd:
        """Evaluate, giving way to urgent orders between batches, and report it.

        An evaluation that was ordered, by `cause`, is for looking and never the best one.
        """
        started = self.clock.now_ms()
        state, script = self.state, self.script
        self.inbox.alive("eval", state.step)
        batches = -(-script.valid_examples // self.plan.batch_size)
        batches = min(batches, (self.config.eval_batches if max_batches is None else max_batches) or batches)
        self.acts.perform("eval", state.step)
        for _ in range(batches):
            give_way()
            self.clock.wait(script.eval_ms)
            self.inbox.sign_of_life(state.step)
        loss = script.valid_loss_at(state.step)
        best = cause is None and state.judge(loss)
        rows = min(script.valid_examples, batches * self.plan.batch_size)
        event = EvalEnd(
            step=state.step,
            valid_loss=loss,
            perplexity=six_digits(perplexity(loss)),
            token_accuracy=six_digits(math.exp(-loss)),
            tokens=rows * script.tokens_per_example,
            ms=round(self.clock.now_ms() - started, 3),
            best=best,
            cause=cause,
        )
        self.inbox.emit(event)
        return event

    def generate(self, max_tokens: int, give_way: GiveWay, adapter: bool = True) -> tuple[str, int, float]:
        """Say what the script lets the model say, giving way between tokens: text, tokens, milliseconds.

        Without `adapter` the base model speaks.
        """
        started = self.clock.now_ms()
        self.inbox.alive("generate", self.state.step)
        self.acts.perform("generate", self.state.step)
        words = (self.script.completion if adapter else self.script.base_completion).split(" ")
        tokens = min(max_tokens, len(words))
        for _ in range(tokens if self.script.token_ms else 0):
            give_way()
            self.clock.wait(self.script.token_ms)
        text = " ".join(words[:tokens]) * self.script.completion_repeat
        return text, tokens, round(self.clock.now_ms() - started, 3)


def six_digits(value: float | None) -> float | None:
    """Round to six digits, so that the number is the same on every machine."""
    return value if value is None or not math.isfinite(value) else float(f"{value:.6g}")
