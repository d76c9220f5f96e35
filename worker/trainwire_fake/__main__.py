"""Starts a scripted engine for the worker whose channel it inherits: `python -m trainwire_fake --script FILE`."""

import argparse
import contextlib
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

from trainwire_protocol.channel import CHANNEL_FD_VARIABLE, Failed
from trainwire_protocol.errors import TrainwireError

from .inbox import Inbox
from .run import run
from .script import Script, read_script


def main() -> int:
    """Act out a script and give the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainwire_fake", description="Acts out a scripted run.")
    parser.add_argument("--script", type=Path, help="JSON or TOML file; without it a plain run of 20 updates")
    arguments = parser.parse_args()
    descriptor = os.environ.get(CHANNEL_FD_VARIABLE, "")
    if not descriptor.isdigit():
        parser.error(f"a worker starts this program and names its channel in {CHANNEL_FD_VARIABLE}")
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP):
        signal.signal(name, signal.SIG_IGN)
    connection = socket.socket(fileno=int(descriptor))
    os.set_inheritable(connection.fileno(), False)
    return _act_out(arguments.script, connection)


def _act_out(path: Path | None, connection: socket.socket) -> int:
    inbox = Inbox(connection)
    try:
        script: Script = read_script(path)
        inbox.ignore_orders = script.ignore_orders
        return run(script, inbox)
    except TrainwireError as error:
        inbox.report(Failed(code=error.code, message=error.message, hint=error.hint))
        return error.exit_code or 1
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            inbox.report(Failed(code="internal", message=f"The scripted engine failed: {error!r}."))
        return 1


if __name__ == "__main__":
    sys.exit(main())
