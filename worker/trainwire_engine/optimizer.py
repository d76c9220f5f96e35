"""Optimizers as pure functions over flat dictionaries of arrays, and learning-rate schedules in updates.

Arithmetic is float32 whatever the weights' dtype; weight decay is decoupled (Loshchilov and Hutter,
arXiv 1711.05101) and spares norms and biases, that is every weight with fewer than two axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from trainwire_engine import pieces
from trainwire_engine.cuda import tensors
from trainwire_engine.cuda.adamw import adamw
from trainwire_engine.pieces import note
from trainwire_engine.update_rules import MUON_OTHERS, RULES, Arguments, Arrays, Rule, Slots
from trainwire_protocol.errors import ConfigInvalid

FUSED_FROM, FUSED_WITH = 2**20, 2**16
"""Elements from which a weight's update is worth the CPU's C++ compiler, about a second per kernel, and of weights that
use the kernel when it is there: their update alone would go over the memory some fifteen times."""


class Optimizer:
    """An update rule by name: `init` makes the state, `apply` returns new weights and state, compilable.

    The state is flat: `count` (updates made, int32) and one entry `<slot>.<weight>` per slot and weight.
    Raises ConfigInvalid for an argument the optimizer does not have.
    """

    def __init__(self, config: Any) -> None:
        self.name: str = config.optimizer
        self.weight_decay: float = config.weight_decay
        rule, defaults = RULES[self.name]
        arguments = dict(config.optimizer_args)
        for key in arguments:
            if key not in defaults:
                raise ConfigInvalid(
                    f"optimizer_args: {self.name} has no argument {key!r}.",
                    hint=f"It has: {', '.join(defaults)}.",
                    key="optimizer_args",
                )
        self.arguments = {key: _checked(key, arguments.get(key, value), value) for key, value in defaults.items()}
        self._rule = rule
        self._fused: dict[tuple[Rule, bool], Callable[..., Any]] = {}

    def init(self, params: Arrays) -> Arrays:
        """Make the state for these weights: zeros in each weight's dtype."""
        state: Arrays = {"count": mx.zeros((), mx.int32)}
        for name, param in params.items():
            for slot, value in self._slots(name, param).items():
                state[f"{slot}.{name}"] = value
        mx.eval(state)
        return state

    def _slots(self, name: str, param: mx.array) -> Slots:
        zeros = mx.zeros_like(param)
        if self.name == "adamw" or (self.name == "muon" and not is_matrix(name, param)):
            return {"mean": zeros, "square": zeros}
        if self.name == "adafactor":
            if param.ndim < 2:
                return {"square": zeros}
            return {"rows": mx.zeros(param.shape[:-1]), "columns": mx.zeros((*param.shape[:-2], param.shape[-1]))}
        if self.name == "sgd" and not self.arguments["momentum"]:
            return {}
        return {"mean": zeros}

    def apply(
        self,
        params: Arrays,
        grads: Arrays,
        state: Arrays,
        learning_rate: mx.array,
        *,
        scale: mx.array | None = None,
        accept: mx.array | None = None,
    ) -> tuple[Arrays, Arrays]:
        """Make one update with gradients times `scale`; where `accept` is false everything stays as it was.

        `learning_rate`, `scale` and `accept` are scalar arrays, so that a change traces nothing anew.
        """
        scale = mx.ones(()) if scale is None else scale
        accept = mx.array(True) if accept is None else accept
        count = state["count"] + 1
        steps = {rule: rule.scalars(count.astype(mx.float32), arguments) for rule, arguments in self._rules()}
        shared = (learning_rate, 1 - learning_rate * self.weight_decay, scale, accept)
        if self.together(params):
            return self._apply_together(params, grads, state, count, steps[self._rule], shared)
        new_params: Arrays = {}
        new_state: Arrays = {"count": mx.where(accept, count, state["count"])}
        fused_from = self._fused_from(params)
        for name, param in params.items():
            rule, arguments = self._rule_of(name, param)
            slots = list(self._slots(name, param))
            old = [state[f"{slot}.{name}"] for slot in slots]
            one = self._one(rule, arguments, tuple(slots), param, fuse=param.size >= fused_from)
            new_params[name], *new = one(param, grads[name], old, steps[rule], shared)
            for slot, value in zip(slots, new):
                new_state[f"{slot}.{name}"] = value
            if param.size >= pieces.LARGE:
                note(new_params[name], *new)
        return new_params, new_state

    @property
    def elementwise(self) -> bool:
        """Whether every number of a weight is updated by itself."""
        return self._rule.elementwise

    def together(self, params: Arrays) -> bool:
        """Tell whether a few kernels go over all these weights at once: AdamW in float32 on a CUDA card."""
        return self.name == "adamw" and all(p.dtype == mx.float32 for p in params.values()) and tensors.usable(params)

    def _apply_together(
        self, params: Arrays, grads: Arrays, state: Arrays, count: mx.array, steps: Any, shared: Any
    ) -> tuple[Arrays, Arrays]:
        means, squares = ({name: state[f"{slot}.{name}"] for name in params} for slot in ("mean", "square"))
        accept = shared[3]
        scalars = mx.stack([value.astype(mx.float32).reshape(()) for value in (*shared, *steps)])
        weights, means, squares = adamw(
            params, grads, means, squares, scalars,
            betas=self.arguments["betas"], eps=self.arguments["eps"], decays=self._decays,
        )  # fmt: skip
        new_state: Arrays = {"count": mx.where(accept, count, state["count"])}
        for name in params:
            new_state |= {f"mean.{name}": means[name], f"square.{name}": squares[name]}
        return weights, new_state

    def _decays(self, param: mx.array) -> bool:
        return bool(self.weight_decay) and param.ndim >= 2

    def _rules(self) -> list[tuple[Rule, Arguments]]:
        others = [MUON_OTHERS] if self.name == "muon" else []
        return [(self._rule, self.arguments), *others]

    def _rule_of(self, name: str, param: mx.array) -> tuple[Rule, Arguments]:
        return MUON_OTHERS if self.name == "muon" and not is_matrix(name, param) else (self._rule, self.arguments)

    def _fused_from(self, params: Arrays) -> int:
        """Elements from which the updates of these weights are fused."""
        if mx.default_device() != mx.cpu:
            return 0
        return FUSED_WITH if any(param.size >= FUSED_FROM for param in params.values()) else FUSED_FROM

    def _one(
        self, rule: Rule, arguments: Arguments, slots: tuple[str, ...], param: mx.array, *, fuse: bool
    ) -> Callable[..., Any]:
        """The update of one weight; an elementwise rule can be fused into few passes over it."""
        decays = self._decays(param)
        fuse = fuse and rule.elementwise
        if fuse and (rule, decays) in self._fused:
            return self._fused[rule, decays]

        def one(param: mx.array, grad: mx.array, old: list[mx.array], scalars: Any, shared: Any) -> list[mx.array]:
            learning_rate, keep, scale, accept = shared
            weight = param.astype(mx.float32)
            values = {slot: value.astype(mx.float32) for slot, value in zip(slots, old)}
            change, new = rule.change(weight, grad.astype(mx.float32) * scale, values, scalars, arguments)
            if decays:
                weight = weight * keep
            weight = weight - learning_rate * change
            return [
                mx.where(accept, value.astype(before.dtype), before)
                for value, before in zip([weight, *(new[slot] for slot in slots)], [param, *old])
            ]

        if not fuse:
            return one
        self._fused[rule, decays] = mx.compile(one, shapeless=True)
        return self._fused[rule, decays]


def is_matrix(name: str, param: mx.array) -> bool:
    """Tell whether muon orthogonalizes a weight: matrices do, embeddings, heads, norms and biases do not."""
    whole_vocabulary = any(part in ("lm_head", "wte", "wpe") or part.startswith("embed") for part in name.split("."))
    return param.ndim == 2 and (not whole_vocabulary or "lora_" in name)


def _checked(key: str, value: Any, default: Any) -> Any:
    """Take an argument only if it has the type of its default and lies in its range."""

    def refuse(allowed: str) -> ConfigInvalid:
        return ConfigInvalid(
            f"optimizer_args: {key} = {value!r} is not allowed.", hint=f"{key} is {allowed}.", key="optimizer_args"
        )

    def number(v: Any) -> bool:
        return isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)

    if isinstance(default, tuple):
        if not (isinstance(value, list | tuple) and len(value) == 2 and all(number(v) and 0 <= v < 1 for v in value)):
            raise refuse("a pair of numbers from 0 to below 1")
        return tuple(float(v) for v in value)
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise refuse("true or false")
        return value
    if isinstance(default, int):
        if not (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 20):
            raise refuse("a whole number from 1 to 20")
        return value
    if key == "momentum" and not (number(value) and 0 <= value < 1):
        raise refuse("a number from 0 to below 1")
    if key == "decay_rate" and not (number(value) and -1 <= value < 0):
        raise refuse("a number from -1 to below 0")
    if key in ("eps", "clip_threshold") and not (number(value) and value > 0):
        raise refuse("a number above 0")
    return float(value)


class Schedule:
    """The learning rate of each update: a rise to the peak, then the way down to the minimum.

    With W warm-up updates the update W-1 (from 0) has the peak exactly; the way down ends where the first update
    after the run would be, so no update of the run is spent on a rate of zero.
    """

    def __init__(self, config: Any, total_steps: int) -> None:
        self.shape: str = config.schedule
        self.warmup: int = config.warmup_steps or 0
        self.minimum: float = config.min_learning_rate
        self.total_steps = total_steps

    def learning_rate(self, update: int, peak: float) -> float:
        """The rate of the update with this index (from 0) when the schedule's peak is `peak`."""
        if update < self.warmup:
            return peak * (update + 1) / self.warmup
        if self.shape == "constant":
            return peak
        top = max(self.warmup - 1, 0)
        way = min(1.0, (update - top) / max(1, self.total_steps - top))
        share = 1 - way if self.shape == "linear" else (1 + math.cos(math.pi * way)) / 2
        low = min(self.minimum, peak)
        return low + (peak - low) * share
