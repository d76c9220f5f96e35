"""Runs a module of the engine as a child process, for commands that need MLX."""

import importlib.util
import os
import subprocess
import sys


def run_engine_module(module: str, words: list[str]) -> int:
    """Run `python -m trainwire_engine.MODULE WORDS` with this terminal's input and output; its exit status."""
    missing = [name for name in ("mlx", "mlx_lm") if importlib.util.find_spec(name) is None]
    if missing:
        extra = "" if sys.platform == "darwin" else "[cpu]"
        print(f"trainwire: this needs the engine. Run `pip install 'trainwire{extra}'`.", file=sys.stderr)
        return 4
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    try:
        return subprocess.run([sys.executable, "-m", f"trainwire_engine.{module}", *words], env=environment).returncode
    except KeyboardInterrupt:
        return 130
