"""What every test's process starts from."""

from __future__ import annotations

import signal

# A shell starts what it puts into the background deaf to Ctrl-C, and children inherit that; tests send it to theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
