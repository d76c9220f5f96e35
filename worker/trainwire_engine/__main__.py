"""The engine's process: takes its channel from the worker, does what it is told, and leaves."""

from __future__ import annotations

import os
import signal
import socket
import sys

from trainwire_engine.place import keep, take_place
from trainwire_protocol.channel import CHANNEL_FD_VARIABLE, EngineChannel


def main() -> int:
    """Serve the worker on the inherited channel, or assist the rank that does; gives the exit status."""
    # Signals are the worker's business: it hears them too, and tells the engine what to do.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    text = os.environ.pop(CHANNEL_FD_VARIABLE, "")
    if "--keep" in sys.argv:
        keep()
    if "--rank" in sys.argv:
        connection = take_place(sys.stdin.buffer)
    elif text.isdigit():
        connection = socket.socket(fileno=int(text))
    elif "--assist" in sys.argv:
        connection = None
    else:
        print("trainwire_engine is started by the trainwire worker; use `trainwire run`.", file=sys.stderr)
        return 2
    channel = EngineChannel(connection) if connection is not None else None
    try:
        from trainwire_engine.run import assist, serve
    except ImportError as error:
        from trainwire_protocol.channel import Failed

        message = f"The engine cannot be loaded: {error}."
        hint = "Install it: pip install 'trainwire[cpu]' (or [cuda12], [cuda13]; on a Mac: trainwire)."
        if channel is not None:
            channel.send(Failed(code="engine_unavailable", message=message, hint=hint))
        else:
            print(f"{message} {hint}", file=sys.stderr)
        return 4
    return serve(channel) if channel is not None else assist()


if __name__ == "__main__":
    status = main()
    if not status:
        from trainwire_engine.meeting import part

        part()
    sys.stdout.flush()
    sys.stderr.flush()
    # A driver's teardown can hang, and there is nothing left to do.
    os._exit(status)
