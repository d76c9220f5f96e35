"""The engine's process: takes its channel from the worker, does what it is told, and leaves."""

from __future__ import annotations

import os
import signal
import socket
import sys

from trainwire_protocol.channel import CHANNEL_FD_VARIABLE, EngineChannel


def main() -> int:
    """Serve the worker on the inherited channel; gives the exit status."""
    text = os.environ.pop(CHANNEL_FD_VARIABLE, "")
    if not text.isdigit():
        print("trainwire_engine is started by the trainwire worker; use `trainwire run`.", file=sys.stderr)
        return 2
    # Signals are the worker's business: it hears them too, and tells the engine what to do.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    channel = EngineChannel(socket.socket(fileno=int(text)))
    try:
        from trainwire_engine.run import serve
    except ImportError as error:
        from trainwire_protocol.channel import Failed

        message = f"The engine cannot be loaded: {error}."
        hint = "Install it: pip install 'trainwire[cpu]' (or [cuda12], [cuda13]; on a Mac: trainwire)."
        channel.send(Failed(code="engine_unavailable", message=message, hint=hint))
        return 4
    return serve(channel)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A driver's teardown can hang, and there is nothing left to do.
    os._exit(status)
