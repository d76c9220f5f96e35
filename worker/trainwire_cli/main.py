"""`trainwire`: run and serve go to the worker before any other import, every other command is one module."""

import os
import sys
from importlib import import_module

COMMANDS = {
    "run": "train with a config file: trainwire run CONFIG.toml [key=value ...]",
    "serve": "wait for a start command on stdin",
    "demo": "make a small model, train it and show what it learned",
    "validate": "check a config, its model and its data without training; say what the run would take",
    "watch": "show a run live in the terminal",
    "runs": "list the runs in a folder, alive or dead",
    "status": "show one run",
    "stop": "end a run from another shell",
    "plot": "draw the curves of one or several runs",
    "report": "write a run as one HTML page",
    "generate": "let a checkpoint's model answer, once or in a chat",
    "track": "feed TensorBoard or another tracker with a run, while it lives or afterwards",
    "export": "write a checkpoint in a form that mlx-lm, peft or transformers loads",
    "config": "print the documented default config file",
    "schema": "print the JSON Schema of the protocol and the config",
}
"""Every command with a line of help."""


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: trainwire COMMAND ...",
            "",
            "A headless trainer for language models: events are JSON lines on stdout, commands are lines on stdin.",
            "",
            *lines,
            "",
            "`trainwire COMMAND --help` says more. `trainwire --version` prints the version.",
        ]
    )


def main() -> int:
    """Do what the first argument says; the exit status."""
    words = sys.argv[1:]
    command = words[0] if words else ""
    if command in ("run", "serve"):
        from trainwire_worker.__main__ import leave

        leave()
    if command in ("--version", "-V"):
        from trainwire_protocol.version import VERSION

        print(f"trainwire {VERSION}")
        return 0
    if command in ("", "-h", "--help", "help"):
        print(_usage())
        return 0 if command else 2
    if command not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"Did you mean {near[0]}?" if near else "`trainwire --help` lists them."
        print(f"trainwire: there is no command {command!r}. {hint}", file=sys.stderr)
        return 2
    try:
        status: int = import_module(f"trainwire_cli.{command}").run(words[1:])
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader, `head` for instance, has seen enough; nothing more may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.filename is None:
            raise
        print(f"trainwire: {error.filename}: {error.strerror}.", file=sys.stderr)
        return 7


if __name__ == "__main__":
    sys.exit(main())
