"""What a scripted run consists of, and the pieces of work it does: a save, an evaluation, a generation."""

import math
from collections.abc import Callable
from pathlib import Path

import msgspec

from trainwire_protocol import rundir
from trainwire_protocol.coalesce import perplexity
from trainwire_protocol.config import Config
from trainwire_protocol.errors import TrainwireError
from trainwire_protocol.events import Checkpoint, CheckpointKind, EvalEnd, Log, Step

from .acts import Acts
from .clock import Clock
from .disk import State, read_checkpoint, write_checkpoint
from .inbox import Inbox
from .plan import Plan
from .script import Script


class Session:
    """The parts of a run and its state; the work that the loop and the orders share."""

    def __init__(self, script: Script, inbox: Inbox, clock: Clock, acts: Acts, config: Config, plan: Plan) -> None:
        self.script, self.inbox, self.clock, self.acts = script, inbox, clock, acts
        self.config, self.plan = config, plan
        self.state = State()
        self.last_checkpoint: Path | None = None
        self._saved: tuple[int, Path, int] | None = None
        self.run_dir = Path(config.run_dir or "run").absolute()

    def change(self, **values: object) -> None:
        """Replace keys of the config."""
        self.config = msgspec.structs.replace(self.config, **values)
        self.inbox.log_every = self.config.log_every

    def save(self, name: str, kind: CheckpointKind, *, cause: int | None = None) -> tuple[Path, int, bool]:
        """Write a checkpoint: its path, its size in bytes, and whether it was written.

        The same step is not written twice, but for `final` and `best`. Raises TrainwireError if the script wants the
        save to fail.
        """
        step = self.state.step
        if kind in ("periodic", "manual") and self._saved is not None and self._saved[0] == step:
            return self._saved[1], self._saved[2], False
        self.inbox.alive("checkpoint", step)
        self.inbox.flush()
        self.clock.wait(self.script.save_ms)
        self.acts.perform("final" if kind == "final" else "save", step)
        self.state.config = msgspec.to_builtins(self.config)
        history: list[Step] = list(self.inbox.reported)
        path, size = write_checkpoint(self.run_dir, name, kind, self.state, history, self.clock.epoch_ms())
        self.inbox.reported.clear()
        self.inbox.emit(Checkpoint(path=str(path), step=step, bytes=size, kind=kind, cause=cause))
        self.last_checkpoint = path
        if kind in ("periodic", "manual"):
            self._saved = (step, path, size)
        return path, size, True

    def save_for_leaving(self) -> None:
        """Write a checkpoint if there is something to keep: at least one update of this run."""
        if self.state.step:
            self.save(rundir.checkpoint_name(self.state.step), "periodic")

    def resume_from(self, folder: Path) -> list[Step]:
        """Take up a checkpoint; gives the update reports that it carries."""
        self.state, history = read_checkpoint(folder)
        manifest = rundir.read_manifest(folder)
        size = sum(entry.size for entry in manifest.files.values()) if manifest else 0
        self.last_checkpoint = folder
        self._saved = (self.state.step, folder, size)
        return history

    def save_periodic(self) -> None:
        """Write the checkpoint that is due; a save that fails is reported and the run goes on."""
        try:
            self.save(rundir.checkpoint_name(self.state.step), "periodic")
        except TrainwireError as error:
            self.inbox.emit(
                Log(level="error", code="save_failed", message=error.message, details={"step": self.state.step})
            )

    def evaluate(self, max_batches: int | None, give_way: Callable[[], None], cause: int | None = None) -> EvalEnd:
        """Evaluate, giving way to urgent orders between batches, and report the outcome."""
        started = self.clock.now_ms()
        state, script = self.state, self.script
        self.inbox.alive("eval", state.step)
        batches = -(-script.valid_examples // self.plan.batch_size)
        batches = min(batches, max_batches or self.config.eval_batches or batches)
        self.acts.perform("eval", state.step)
        for _ in range(batches):
            give_way()
            self.clock.wait(script.eval_ms)
            self.inbox.sign_of_life(state.step)
        loss = script.valid_loss_at(max(1, state.step))
        best = math.isfinite(loss) and (state.best_valid_loss is None or loss < state.best_valid_loss)
        rows = min(script.valid_examples, batches * self.plan.batch_size)
        event = EvalEnd(
            step=state.step,
            valid_loss=loss,
            perplexity=_rounded(perplexity(loss)),
            token_accuracy=_rounded(math.exp(-loss)),
            tokens=rows * script.tokens_per_example,
            ms=round(self.clock.now_ms() - started, 3),
            best=best,
            cause=cause,
        )
        self.inbox.emit(event)
        if best:
            state.best_valid_loss, state.evaluations_without_best = loss, 0
        else:
            state.evaluations_without_best += 1
        return event

    def generate(self, max_tokens: int, give_way: Callable[[], None], adapter: bool = True) -> tuple[str, int, float]:
        """Say what the script lets the model say, giving way between tokens: text, tokens, milliseconds.

        Without `adapter` the base model speaks.
        """
        started = self.clock.now_ms()
        self.inbox.alive("generate", self.state.step)
        self.acts.perform("generate", self.state.step)
        words = (self.script.completion if adapter else self.script.base_completion).split(" ")
        tokens = min(max_tokens, len(words))
        if self.script.token_ms:
            for _ in range(tokens):
                give_way()
                self.clock.wait(self.script.token_ms)
        text = " ".join(words[:tokens]) * self.script.completion_repeat
        return text, tokens, round(self.clock.now_ms() - started, 3)


def _rounded(value: float | None) -> float | None:
    return value if value is None or not math.isfinite(value) else round(value, 6)
