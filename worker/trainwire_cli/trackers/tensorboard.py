"""TensorBoard: scalars and generations in `<run_dir>/tensorboard`. Needs the extra `tensorboard`."""

from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from .interface import RunInfo, metrics


class TensorBoard:
    """Writes event files without TensorFlow; `tensorboard --logdir runs` finds them."""

    def __init__(self) -> None:
        self._writer: Any = None

    def begin(self, run: RunInfo, resumed_from_step: int | None) -> None:
        """Open a file for this attempt; TensorBoard forgets the steps above the one it goes on from."""
        if self._writer is None:
            self._writer = EventFileWriter(str(run.run_dir / "tensorboard"))
        first = (resumed_from_step or 0) + 1
        self._writer.add_event(Event(step=first, session_log=SessionLog(status=SessionLog.START)))
        self._add(0, 0, _text("config", "\n".join(f"    {key} = {value}" for key, value in run.config.items())))

    def event(self, event: dict[str, Any]) -> None:
        """Add the numbers of an event, or an answer."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics(event).items()]
        if event["type"] == "generation":
            values.append(_text(f"generation/{event['index']}", f"{event['prompt']}\n\n{event['completion']}"))
        if values:
            self._add(event["step"], event["ts"], *values)

    def close(self, outcome: str | None) -> None:
        """Write what is left."""
        self._writer.close()

    def _add(self, step: int, ts: int, *values: Any) -> None:
        self._writer.add_event(Event(step=step, wall_time=ts / 1000, summary=Summary(value=values)))


def _text(tag: str, text: str) -> Any:
    value = Summary.Value(tag=tag, tensor=TensorProto(dtype=DT_STRING, string_val=[text.encode()]))
    value.metadata.plugin_data.plugin_name = "text"
    return value
