"""The lines of the @mlx-node/trl terminal view, made from ours: `--dialect mlx-tui`."""

from collections.abc import Callable
from typing import Any

import orjson

from trainwire_protocol import events as e
from trainwire_protocol.codec import ascii_json

Message = e.Event | e.Transport
_SHORTEST_CUT = 64
_KNOWN_CONFIG = {
    "num_epochs": "numEpochs",
    "batch_size": "batchSize",
    "learning_rate": "learningRate",
}


def translator(dialect: str, max_line: int) -> Callable[[Message], list[bytes]] | None:
    """Give the function that translates a message to the dialect's lines; None for our own."""
    return MlxTui(max_line).translate if dialect == "mlx-tui" else None


class MlxTui:
    """Translates messages. Numbers that the view expects and supervised training has not are 0."""

    def __init__(self, max_line: int) -> None:
        self._max_line = max_line
        self._last_loss: float = 0

    def translate(self, message: Message) -> list[bytes]:
        """Give the dialect's lines for a message; none for what that view does not know."""
        return [self._encode(line) for line in self._lines(message)]

    def _encode(self, fields: dict[str, Any]) -> bytes:
        """Encode a line, its longest text cut until it fits; the config is never cut."""
        line = ascii_json(fields) + b"\n"
        while len(line) > self._max_line:
            longest = max((k for k, v in fields.items() if isinstance(v, str)), key=lambda k: len(fields[k]))
            if len(fields[longest]) < _SHORTEST_CUT:
                break
            fields[longest] = fields[longest][: len(fields[longest]) // 2]
            line = ascii_json(fields) + b"\n"
        return line

    def _lines(self, message: Message) -> list[dict[str, Any]]:
        if isinstance(message, e.Step):
            return self._step(message)
        if isinstance(message, e.Init):
            return [{"type": "init", "model": message.model, "config": _config(message)}]
        if isinstance(message, e.EpochStart):
            return [
                {
                    "type": "epoch_start",
                    "epoch": message.epoch,
                    "totalEpochs": message.total_epochs,
                    "numBatches": message.num_batches,
                }
            ]
        if isinstance(message, e.EpochEnd):
            return [
                {
                    "type": "epoch_end",
                    "epoch": message.epoch,
                    "avgLoss": _number(message.avg_loss, self._last_loss),
                    "avgReward": 0,
                    "epochTimeSecs": message.epoch_time_secs,
                }
            ]
        if isinstance(message, e.Generation):
            return [
                {
                    "type": "generation",
                    "index": message.index,
                    "prompt": message.prompt,
                    "completion": message.completion,
                    "reward": 0,
                    "tokens": message.tokens,
                }
            ]
        if isinstance(message, e.Checkpoint):
            return [{"type": "checkpoint", "path": message.path, "step": message.step}]
        if isinstance(message, e.Complete):
            return [
                {
                    "type": "complete",
                    "totalSteps": message.total_steps,
                    "totalTimeSecs": message.total_time_secs,
                }
            ]
        if isinstance(message, e.Paused | e.Resumed):
            return [{"type": e.type_name(type(message)), "step": message.step}]
        return self._notices(message)

    def _step(self, message: e.Step) -> list[dict[str, Any]]:
        finite = _number(message.loss, None)
        notices = []
        if finite is None:
            finite = self._last_loss
            notices = [_log("error", f"The loss of step {message.step} is not finite; the update was skipped.")]
        self._last_loss = finite
        step = {
            "type": "step",
            "step": message.step,
            "loss": finite,
            "meanReward": 0,
            "stdReward": 0,
            "meanAdvantage": 0,
            "totalTokens": message.total_tokens,
            "generationTimeMs": 0,
            "trainingTimeMs": message.training_time_ms,
        }
        return [step, *notices]

    def _notices(self, message: Message) -> list[dict[str, Any]]:
        if isinstance(message, e.Log):
            return [_log(message.level, message.message)]
        if isinstance(message, e.Status):
            return [{"type": "status", "phase": message.phase, "message": message.message}]
        if isinstance(message, e.Error):
            return [_log("error", message.message + (f" {message.hint}" if message.hint else ""))]
        if isinstance(message, e.EvalEnd):
            loss = _number(message.valid_loss, None)
            return [
                _log(
                    "info",
                    f"Validation loss at step {message.step}: {'not finite' if loss is None else f'{loss:.4f}'}.",
                )
            ]
        if isinstance(message, e.Response) and message.error is not None:
            return [_log("warn", message.error.message)]
        if isinstance(message, e.ConfigChanged):
            changes = ", ".join(f"{key} = {change.to}" for key, change in message.changes.items())
            return [_log("info", f"Changed from step {message.effective_step} on: {changes}.")]
        if isinstance(message, e.End) and message.outcome != "completed":
            return [_log("info", f"The run ended: {message.outcome}, {message.reason}.")]
        return []


def _log(level: str, message: str) -> dict[str, Any]:
    return {"type": "log", "level": level, "message": message}


def _number(value: float | None, otherwise: Any) -> Any:
    return otherwise if value is None or value != value or value in (float("inf"), float("-inf")) else value


def _config(init: e.Init) -> dict[str, Any]:
    config = {**init.config, "trainingType": init.training_type, "gradientAccumulationSteps": 1}
    for ours, theirs in _KNOWN_CONFIG.items():
        config[theirs] = init.config.get(ours)
    cleaned: dict[str, Any] = orjson.loads(orjson.dumps(config))
    return cleaned
