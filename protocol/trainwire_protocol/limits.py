"""The protocol's version and what a line may hold: numbers that a worker needs before anything else."""

PROTOCOL, MINOR = 1, 0
MAX_LINE_OUT = 60_000
"""Bytes of a printed line, LF included; common line readers give up at 64 KiB."""
MIN_LINE_OUT = 4_096
MAX_LINE_IN = 1 << 20
"""Bytes of a control line, LF not counted."""
