"""`trainwire runs`: what runs there are in a folder, alive or dead by their lock."""

import argparse
import json
import sys
from pathlib import Path
from unicodedata import east_asian_width

from trainwire_protocol.printable import printable

from .overview import Overview, ago, find_runs, number


def _process(overview: Overview) -> str:
    if overview.orphan_pid is not None:
        return f" (engine {overview.orphan_pid} saves)"
    return f" ({overview.pid})" if overview.alive else ""


def _columns(text: str) -> int:
    """Count the columns of a terminal that a text takes: Chinese and Japanese letters take two."""
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in text)


def run(words: list[str]) -> int:
    """Print a table of runs, or one JSON object a line; 3 if the folder does not exist."""
    parser = argparse.ArgumentParser(prog="trainwire runs", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs"), help="default: runs")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    chosen = parser.parse_args(words)
    if not chosen.folder.is_dir():
        print(f"trainwire: there is no folder {chosen.folder}.", file=sys.stderr)
        return 3
    found = list(find_runs(chosen.folder.absolute()))
    if chosen.json:
        for overview in found:
            print(json.dumps(overview.as_json()))
        return 0
    if not found:
        print(f"There are no runs in {chosen.folder}.")
        return 0
    base = chosen.folder.absolute()
    rows = [("RUN", "STATE", "STEP", "LOSS", "LAST LINE", "CHECKPOINT")]
    for overview in found:
        place = Path(overview.run_dir)
        name = str(place.relative_to(base)) if place != base else place.name
        rows.append(
            (
                printable(name),
                overview.state + _process(overview),
                f"{overview.step}/{overview.total_steps}",
                number(overview.loss),
                ago(overview.seconds),
                Path(overview.checkpoint).name if overview.checkpoint else "–",
            )
        )
    widths = [max(_columns(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell + " " * (width - _columns(cell)) for cell, width in zip(row, widths)).rstrip())
    return 0
