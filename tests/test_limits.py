"""How long tests wait: a limit ends a test that hangs, and says nothing about speed."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEAST_SECONDS = 60
PYTHON = re.compile(r"(?:timeout=|seconds=|settimeout\(|\.(?:wait|join|started|exit_code|rest)\()(\d+(?:\.\d+)?)\b")
NODE = re.compile(r"timeout: ([\d_]+)")


def test_a_limit_is_meant_to_pass_or_lies_far_above_what_a_busy_machine_needs() -> None:
    short = []
    for path in sorted(ROOT.glob("tests/**/*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            # What is below a second is waited for to its end.
            if any(1 < float(seconds) < LEAST_SECONDS for seconds in PYTHON.findall(line)):
                short.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    for path in sorted(ROOT.glob("clients/node/test/*.mjs")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if any(1000 < int(ms) < LEAST_SECONDS * 1000 for ms in NODE.findall(line)):
                short.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert short == []
