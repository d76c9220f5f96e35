"""`trainwire track`: feed a tracker with a run's events, while the run lives or afterwards."""

import argparse
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import orjson

from trainwire_client import ClientError
from trainwire_client.log import Tail, Timeline, log_path
from trainwire_protocol.rundir import lock_holder

from .trackers import Follower, load

_PAUSE = 0.2
_LIFE_SIGN = 5.0
_VOID_KINDS = ("step", "eval_end", "generation")


def run(words: list[str]) -> int:
    """Follow the log to the end of the run; 0, 1 if the tracker failed, 3 without a run, 4 without its package."""
    parser = argparse.ArgumentParser(prog="trainwire track", description=__doc__, allow_abbrev=False)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--tracker", required=True, metavar="NAME", help="tensorboard, wandb, or package.module:Class")
    parser.add_argument("--from-seq", type=int, default=1, metavar="N", help="first event (default: all)")
    parser.add_argument("--parent", type=int, metavar="PID", help=argparse.SUPPRESS)
    parser.add_argument("--grace", type=float, default=120.0, metavar="S", help="to finish once the run is over")
    chosen = parser.parse_args(words)
    if chosen.parent is not None:
        # It has the end of the run to tell, so what ends the run does not end it.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        threading.Thread(target=_leave_behind, args=(chosen.parent, chosen.grace), daemon=True).start()
    try:
        path = log_path(chosen.run_dir)
        tracker = load(chosen.tracker)
    except ClientError as error:
        print(f"trainwire: {error}", file=sys.stderr)
        return 3
    except (ImportError, AttributeError, ValueError) as error:
        print(f"trainwire: the tracker {chosen.tracker} cannot be loaded: {error}.", file=sys.stderr)
        return 4
    try:
        _follow(path, Follower(tracker, path.parent), chosen.from_seq, chosen.parent)
    except KeyboardInterrupt:
        return 130
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _leave_behind(parent: int, grace: float) -> None:
    """Leave when the worker has been gone for the grace, whatever the tracker hangs in."""
    while os.getppid() == parent:
        time.sleep(1)
    time.sleep(grace)
    print("trainwire: the tracker did not finish in time.", file=sys.stderr, flush=True)
    os._exit(1)


def _follow(path: Path, follower: Follower, first: int, parent: int | None) -> None:
    timeline = Timeline.of(path)
    tail = Tail(path)
    living, look_at = True, 0.0
    while True:
        lines = tail.read()
        for line in lines:
            try:
                event = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if not isinstance(event, dict):
                continue
            void = event["type"] in _VOID_KINDS and not timeline.holds(event["seq"], event["step"])
            if event["seq"] >= first and not void:
                follower.take(event)
        if lines:
            continue
        if follower.outcome is not None or not living:
            follower.close()
            return
        time.sleep(_PAUSE)
        if parent is not None:
            living = os.getppid() == parent
        elif time.monotonic() > look_at:
            look_at = time.monotonic() + _LIFE_SIGN
            living = lock_holder(path.parent) is not None
