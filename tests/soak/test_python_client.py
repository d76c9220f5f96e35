"""The Python client over ten million events: its memory stays flat."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "client_python.py"


def test_memory_is_flat_over_ten_million_events() -> None:
    words = [sys.executable, str(BENCHMARK), "--launches", "0", "--events", "10000000"]
    figures = json.loads(subprocess.run(words, capture_output=True, text=True, timeout=1800, check=True).stdout)
    for kind in ("blocking", "asyncio"):
        memory = figures[kind]["resident_mib"]
        assert len(memory) >= 9
        assert max(memory) - memory[0] < 8, memory
