"""The first line: said before the rest of the worker is loaded, so that a front end knows at once whom it talks to."""

import os
from typing import Any

import orjson

from trainwire_protocol.known import FEATURES
from trainwire_protocol.limits import MAX_LINE_IN, MINOR, PROTOCOL
from trainwire_protocol.version import VERSION

from .options import Options
from .ready import wait_ready

MAX_OPEN_COMMANDS = 256
MAX_BACKLOG = 8 << 20
"""Bytes of unread lines after which the backlog becomes one `gap`."""
MAX_RESPONSE_BACKLOG = 8 << 20
"""Bytes of unread responses after which no more commands are read."""


def hello_fields(options: Options) -> dict[str, Any]:
    """Give the fields of `hello`; the process id is always 1 under a scripted clock."""
    return {
        "type": "hello",
        "protocol": PROTOCOL,
        "minor": MINOR,
        "worker": {"name": "trainwire", "version": VERSION},
        "pid": os.getpid() if options.clock == "real" else 1,
        "dialect": options.dialect,
        "features": list(FEATURES),
        "limits": {
            "max_line_in": MAX_LINE_IN,
            "max_line_out": options.max_line,
            "max_open_commands": MAX_OPEN_COMMANDS,
            "max_response_backlog": MAX_RESPONSE_BACKLOG,
            "max_backlog": MAX_BACKLOG,
        },
    }


def greet(options: Options, stdout: int) -> bool:
    """Write `hello` if that can be done at once; false leaves it to the outbox, which can wait for the reader."""
    if options.dialect != "native" or stdout < 0:
        return False
    line = orjson.dumps(hello_fields(options)) + b"\n"
    try:
        return bool(wait_ready([], [stdout], 0)[1]) and os.write(stdout, line) == len(line)
    except OSError:
        return False
