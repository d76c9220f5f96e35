"""`trainwire generate`: what a checkpoint's model answers, streamed to the terminal."""

import signal

from .engine_process import run_engine_module


def run(words: list[str]) -> int:
    """Answer in a process that has MLX; Ctrl-C is that process's business."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        return run_engine_module("talk", words)
    finally:
        signal.signal(signal.SIGINT, before)
