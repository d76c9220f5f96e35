"""`trainwire plot`: the curves of one or several runs as a picture."""

import argparse
import html
import importlib.util
import sys
from pathlib import Path

from trainwire_client import ClientError

from .curves import read_curves

_ENDINGS = (".png", ".svg", ".html")
_STYLE = "<style>body{margin:1rem;background:#fff}svg{max-width:100%;height:auto}</style>"


def has_matplotlib() -> bool:
    """Say whether pictures can be drawn; prints what to install if not."""
    if importlib.util.find_spec("matplotlib") is None:
        print("trainwire: pictures need matplotlib. Run `pip install 'trainwire[view]'`.", file=sys.stderr)
        return False
    return True


def run(words: list[str]) -> int:
    """Draw the picture; 3 if a folder holds no run, 4 without matplotlib."""
    parser = argparse.ArgumentParser(prog="trainwire plot", description=__doc__)
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="a .png, .svg or .html file")
    chosen = parser.parse_args(words)
    out: Path = chosen.out
    if out.suffix.lower() not in _ENDINGS:
        parser.error(f"-o must end with one of {', '.join(_ENDINGS)}")
    if not has_matplotlib():
        return 4
    from .picture import as_element, draw, names_of, save

    try:
        runs = [read_curves(run_dir) for run_dir in chosen.run_dirs]
    except ClientError as error:
        print(f"trainwire: {error}", file=sys.stderr)
        return 3
    figure = draw(runs)
    try:
        if out.suffix.lower() == ".html":
            title = html.escape(", ".join(names_of(runs)))
            page = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n{_STYLE}\n'
            out.write_text(page + as_element(figure), encoding="utf-8")
        else:
            save(figure, out)
    except OSError as error:
        print(f"trainwire: {out} cannot be written: {error.strerror}.", file=sys.stderr)
        return 7
    print(out)
    return 0
