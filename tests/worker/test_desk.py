"""What the desk makes of a command at a moment that no process can be brought to on purpose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from trainwire_protocol.channel import ResumeOrder
from trainwire_worker.desk import Desk


def test_a_resume_takes_back_the_stretch_of_one_that_is_not_answered_yet() -> None:
    given: list[Any] = []
    emitter: Any = SimpleNamespace(log=None, connections=[], say=lambda *_: None, emit=lambda *_: None)
    snapshot: Any = SimpleNamespace(phase="paused", step=4, run_dir="run")
    connection: Any = SimpleNamespace(source="stdin")
    desk = Desk(emitter, snapshot)
    desk.host = SimpleNamespace(give_order=given.append)  # type: ignore[assignment]
    desk.take(b'{"cmd":"resume","id":1,"steps":3}', connection)
    # The engine has said that it goes on, and not yet answered.
    snapshot.phase = "running"
    desk.take(b'{"cmd":"resume","id":2}', connection)
    assert given == [ResumeOrder(order=1, steps=3), ResumeOrder(order=2)]
    desk.answer(1, {"step": 4, "changed": True}, None)
    desk.answer(2, {"step": 4, "changed": True}, None)
    assert desk.rest_of_stretch(4) is None
    desk.take(b'{"cmd":"resume","id":3}', connection)
    assert len(given) == 2
    assert not desk.open_ids
