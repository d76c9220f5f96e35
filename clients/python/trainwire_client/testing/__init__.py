"""The test kit: a fake worker for tests of front ends, played from a script or a recorded session.

>>> from trainwire_client.testing import fake_worker
>>> with launch(config, command=fake_worker([{"hello": {}}, {"start": {}}, {"steps": 3}, {"finish": {}}])) as run:
...     events = list(run)
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FAKE_WORKER = Path(__file__).with_name("player.py")
"""The fake worker's program; it needs the standard library only."""
LINES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("lines.json").read_text(encoding="utf-8"))
"""A complete sample line of every type of message; a script's lines are completed from it."""

Script = Sequence[Any] | Mapping[str, Any] | str | os.PathLike[str]


def fake_worker(script: Script, *, folder: str | os.PathLike[str] | None = None) -> list[str]:
    """Give the command of a fake worker, for `launch(…, command=…)`.

    `script` is a list of actions, a mapping with `attempts` (a list of such lists: one for each process that
    supervision starts), or the path of such a JSON file or of a recorded session (.jsonl). The actions are:
    hello, send, steps, raw, hex, chunks, stderr, log_raw, await, answer, start, finish, repeat, ignore, close,
    grandchild, sleep_ms, hang, die, exit. `folder` keeps the script's files; by default a new temporary folder.
    """
    base = Path(tempfile.mkdtemp(prefix="trainwire-fake-")) if folder is None else Path(folder)
    if isinstance(script, str | os.PathLike):
        path = Path(script).absolute()
    else:
        path = base / "script.json"
        whole = script if isinstance(script, Mapping) else {"worker": list(script)}
        path.write_text(json.dumps(whole), encoding="utf-8")
    return [
        sys.executable,
        "-I",
        str(FAKE_WORKER),
        "--script",
        str(path),
        "--counter",
        str(base / "processes"),
    ]
