"""What is done between two updates: evaluations, generations, new settings, and the checkpoints that go with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from trainwire_engine import memory
from trainwire_engine.evaluate import EvalResult, evaluate
from trainwire_engine.generate import Prompt, best_and_worst, generate, generate_all, reference_losses
from trainwire_engine.lanes import stay_on_one_lane
from trainwire_engine.model import Model
from trainwire_engine.passes import EvaluateSums
from trainwire_engine.ranks import Alone
from trainwire_engine.reports import Reports
from trainwire_engine.room import Room
from trainwire_engine.saving import Saves
from trainwire_engine.schedule import Course
from trainwire_protocol.channel import CheckpointOrder, EvalOrder, GenerateOrder, SetOrder
from trainwire_protocol.errors import BadParams, ShuttingDown, WrongState
from trainwire_protocol.events import Activity

Interrupted = Callable[[], bool]


@dataclass
class Boundary:
    """Does what the schedule and the orders ask for, with the model as the last update left it."""

    course: Course
    model: Model
    tokenizer: Any
    valid: Any
    prompts: Sequence[Prompt]
    reports: Reports
    saves: Saves
    room: Room
    ranks: Alone = field(default_factory=Alone)

    def __post_init__(self) -> None:
        self._sums = EvaluateSums(self.model)
        self._best_unsaved = False

    def do_due(self, interrupted: Interrupted) -> bool:
        """Evaluate and generate if it is due and not done yet; false if that gave way to a stop."""
        self.saves.collect()
        state, what = self.course.state, self.course.due
        if what.evaluate and self.valid is not None and state.evaluated_step < state.step:
            result = self._evaluate(self.course.config.eval_batches, interrupted)
            if result is None:
                return False
            state.evaluated_step = state.step
            best = state.judge(result.loss)
            self._best_unsaved = best and self.course.config.keep_best
            self._report(result, best=best)
        if what.generate and self.prompts and state.generated_step < state.step:
            self.ranks.call()
            with self._looking("generate"):
                if self.ranks.leads and not self._answer_prompts(interrupted):
                    return False
            state.generated_step = state.step
        return True

    def save_due(self) -> None:
        """Write the checkpoints that are due."""
        if self.ranks.leads:
            self.saves.due(best=self._best_unsaved)
        self._best_unsaved = False

    def _looking(self, activity: Activity) -> AbstractContextManager[None]:
        stay_on_one_lane(self.model.total_parameters, self.course.config.micro_batch_tokens or 0)
        return self.reports.activity(activity)

    def _evaluate(self, batches: int, interrupted: Interrupted) -> EvalResult | None:
        with self._looking("eval"):
            config, ranks = self.course.config, self.ranks
            return self.room.have(
                "An evaluation", lambda: evaluate(self._sums, self.valid, config, batches, interrupted, ranks)
            )

    def _report(self, result: EvalResult, **more: Any) -> None:
        step = self.course.state.step
        self.reports.evaluated(step, result.loss, result.tokens, result.correct, result.ms, **more)

    def _answer_prompts(self, interrupted: Interrupted) -> bool:
        config, losses = self.course.config, list[float]()
        chosen: Sequence[int] = range(len(self.prompts))
        if config.sample_display == "best_worst":
            losses = self.room.have(
                "The choice of samples",
                lambda: reference_losses(self._sums, self.tokenizer, self.prompts, config.micro_batch_tokens or 0),
            )
            chosen = best_and_worst(losses)
        length, room = config.generate_max_tokens, config.micro_batch_tokens or 0
        how: dict[str, Any] = {"max_tokens": length, "room": room, "interrupted": interrupted}
        left = list(chosen)

        def answer_the_rest() -> bool:
            asked = [self.prompts[index] for index in left]
            for answer in generate_all(self.model, self.tokenizer, asked, **how):
                if answer is None:
                    return False
                index = left.pop(0)
                loss = losses[index] if losses else None
                prompt = self.prompts[index].text
                self.reports.generated(index, prompt, answer.text, answer.tokens, self.course.state.step, loss)
            return True

        return self.room.have("A sample", answer_the_rest)

    def settle(self) -> None:
        """Finish what is being written and give kept buffers back: training stands still."""
        self.ranks.tell("settle")
        self.saves.settle()
        self.room.make()
        memory.clear_cache()

    def checkpoint(self, order: CheckpointOrder) -> None:
        """Write a checkpoint by order; it is answered once it is whole."""
        self.saves.ordered(order)

    def apply(self, order: SetOrder) -> None:
        """Put new settings in force, all of them or none."""
        values, course = order.values, self.course
        if values.get("eval_every") and self.valid is None:
            raise BadParams("eval_every has no effect: there is no validation data.", key="eval_every")
        if values.get("generate_every") and not self.prompts:
            raise BadParams("generate_every has no effect: the config has no prompts.", key="generate_every")
        check_display(values.get("sample_display", "all"), self.prompts)
        before = {key: getattr(course.config, key) for key in values}
        course.config = msgspec.structs.replace(course.config, **values)
        effective = course.state.step + 1
        self.ranks.tell("set", values)
        self.reports.flush()
        self.reports.config_changed({key: (before[key], values[key]) for key in values}, effective, order.order)
        self.reports.answer(order.order, {"applied": values, "previous": before, "effective_step": effective})

    def evaluate(self, order: EvalOrder, interrupted: Interrupted) -> None:
        """Evaluate by order; it is for looking, and changes neither `best` nor early stopping."""
        if self.valid is None:
            raise WrongState("There is no validation data, so evaluation is off.")
        batches = self.course.config.eval_batches if order.max_batches is None else order.max_batches
        self.ranks.tell("evaluate", batches)
        result = self._evaluate(batches, interrupted)
        if result is None:
            raise ShuttingDown("The run is stopping.")
        self._report(result, best=False, cause=order.order)
        self.reports.answer(order.order, {"valid_loss": result.loss, "tokens": result.tokens, "ms": result.ms})

    def take_part(self, batches: int, interrupted: Interrupted) -> None:
        """Do this rank's part of an evaluation that was ordered on rank 0."""
        self._evaluate(batches, interrupted)

    def generate(self, order: GenerateOrder, interrupted: Interrupted) -> None:
        """Answer a prompt by order."""
        messages = tuple(order.messages) if order.messages is not None else None
        how = {name: getattr(order, name) for name in ("max_tokens", "temperature", "seed", "adapter")}
        with self._looking("generate"):
            prompt = Prompt(order.prompt or "", messages)
            answer = self.room.have(
                "A sample", lambda: generate(self.model, self.tokenizer, prompt, interrupted=interrupted, **how)
            )
        if answer is None:
            raise ShuttingDown("The run is stopping.")
        self.reports.answer(order.order, {"text": answer.text, "tokens": answer.tokens, "ms": answer.ms})


def check_display(value: str, prompts: Sequence[Prompt]) -> None:
    """Raise BadParams if the generations cannot be shown in that way."""
    if value == "best_worst" and prompts and not any(prompt.reference for prompt in prompts):
        raise BadParams(
            'sample_display = "best_worst" compares with references, and the prompts have none.',
            hint='Give the prompts as a .jsonl file whose lines have "prompt" and "completion".',
            key="sample_display",
        )
