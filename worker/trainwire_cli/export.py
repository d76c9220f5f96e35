"""`trainwire export`: a checkpoint in a form that other tools load."""

from .engine_process import run_engine_module


def run(words: list[str]) -> int:
    """Export in a process that has MLX."""
    return run_engine_module("export", words)
