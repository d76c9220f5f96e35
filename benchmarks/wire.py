"""Measures the worker and its wire, and compares with what is promised: with the scripted engine, but where it is said.

python -m benchmarks.wire [--short] [--json FILE] [PART …]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from benchmarks.wire_latency import hello, pings, reaction, real_pings
from benchmarks.wire_load import never_reading, throughput, upkeep
from benchmarks.wire_worker import Figure

PARTS: dict[str, Callable[[Path, bool], list[Figure]]] = {
    measure.__name__: measure for measure in (hello, pings, real_pings, throughput, never_reading, reaction, upkeep)
}


def main() -> int:
    """Print a table; 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON, too")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"instead of all: {', '.join(PARTS)}")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(unknown)}")
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="trainwire-wire-") as name:
        for part in arguments.parts or PARTS:
            measure = PARTS[part]
            for figure in measure(Path(name) / measure.__name__, arguments.short):
                figures.append(figure)
                sign = "≥" if figure.at_least else "≤"
                promise = f"{sign} {figure.limit:,.0f}" if figure.limit is not None else ""
                verdict = "" if figure.limit is None else "kept" if figure.kept else "BROKEN"
                print(f"{figure.name:<62} {figure.value:>12,.2f} {figure.unit:<4} {promise:<10} {verdict}", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([{**asdict(f), "kept": f.kept} for f in figures], indent=2) + "\n")
    return 0 if all(figure.kept for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
