"""`trainwire stop`: end a run gracefully from another shell, through its control socket."""

import argparse
import sys
from pathlib import Path

from trainwire_client import ClientError, NoWorker, attach

from .overview import left_behind, look_at


def run(words: list[str]) -> int:
    """Stop the run and wait for its end; 0 when it has stopped, 3 if nothing runs there."""
    parser = argparse.ArgumentParser(prog="trainwire stop", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--no-save", action="store_true", help="without a checkpoint")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds to wait for the end")
    chosen = parser.parse_args(words)
    overview = look_at(chosen.run_dir.absolute())
    if overview is None or not overview.alive:
        state = "" if overview is None else overview.state.replace("died", "dead")
        what = "holds no run" if overview is None else f"has no living worker: it is {state}"
        more = None if overview is None else left_behind(overview)
        print(f"trainwire: {chosen.run_dir} {what}." + (f" {more}" if more else ""), file=sys.stderr)
        return 3
    try:
        with attach(chosen.run_dir) as run_:
            stopped = run_.stop(save=not chosen.no_save, timeout=chosen.timeout)
    except NoWorker as error:
        print(f"trainwire: {error} `kill {overview.pid}` stops the run as gracefully.", file=sys.stderr)
        return 1
    except ClientError as error:
        print(f"trainwire: {error}", file=sys.stderr)
        return 1
    print(f"{stopped.outcome} at step {stopped.step}" + (f": {stopped.checkpoint}" if stopped.checkpoint else ""))
    return 0
