"""`trainwire status`: one run, alive or not."""

import argparse
import json
import sys
from pathlib import Path

from trainwire_protocol.printable import printable

from .overview import ago, left_behind, look_at, number


def run(words: list[str]) -> int:
    """Print the run; 0 if it lives or has ended well, 1 if it died or failed, 3 if there is none."""
    parser = argparse.ArgumentParser(prog="trainwire status", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--json", action="store_true", help="as a JSON object")
    chosen = parser.parse_args(words)
    overview = look_at(chosen.run_dir.absolute())
    if overview is None:
        print(f"trainwire: {chosen.run_dir} holds no run.", file=sys.stderr)
        return 3
    if chosen.json:
        print(json.dumps(overview.as_json()))
    else:
        print(f"run         {overview.run_dir} ({overview.run_id})")
        print(f"state       {overview.state}" + (f", process {overview.pid}" if overview.alive else ""))
        print(f"step        {overview.step} of {overview.total_steps}, {ago(overview.seconds)}")
        print(f"loss        {number(overview.loss)}")
        print(f"valid loss  {number(overview.valid_loss)}")
        print(f"checkpoint  {overview.checkpoint or '–'}")
        if note := left_behind(overview):
            print(f"engine      {note}")
        if overview.error:
            print(f"error       {printable(overview.error)}")
    return 1 if overview.state in ("died", "failed") else 0
