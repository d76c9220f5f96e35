"""`trainwire report`: a run as one HTML page that needs no network."""

import argparse
import html
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainwire_client import ClientError
from trainwire_client.log import Timeline
from trainwire_protocol.rundir import LOG_NAME, list_checkpoints, read_log

from .curves import read_curves
from .overview import Overview, look_at, number
from .plot import has_matplotlib

_STYLE = """
:root { color-scheme: light; --ink: #1b1b1b; --dim: #666; --line: #ddd; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: #fff; margin: 2rem auto;
       max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
code, pre { font: 13px/1.45 ui-monospace, monospace; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; margin: 0; max-height: 14rem; overflow-y: auto; }
svg { max-width: 100%; height: auto; } .dim { color: var(--dim); } .error { color: #a40000; }
.bar { display: inline-block; height: .7rem; background: #0072B2; }
"""
_MAX_GENERATIONS = 30


def _text(value: Any) -> str:
    return html.escape(str(value))


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]], numbers: frozenset[int] = frozenset()) -> str:
    """Make a table of cells that are HTML already; `numbers` are the columns to align on the right."""

    def row(cells: Iterable[str], tag: str) -> str:
        return (
            "<tr>"
            + "".join(f"<{tag}{' class=n' if i in numbers else ''}>{cell}</{tag}>" for i, cell in enumerate(cells))
            + "</tr>"
        )

    return "<table>" + row(head, "th") + "".join(row(cells, "td") for cells in rows) + "</table>"


def _summary(overview: Overview) -> str:
    rows = [
        ("state", overview.state + (f", process {overview.pid}" if overview.alive else "")),
        ("step", f"{overview.step} of {overview.total_steps}"),
        ("loss", number(overview.loss)),
        ("validation loss", number(overview.valid_loss)),
        ("checkpoint", overview.checkpoint or "–"),
        ("run id", overview.run_id),
    ]
    text = _table((), ((_text(name), _text(value)) for name, value in rows))
    return text + (f"<p class=error>{_text(overview.error)}</p>" if overview.error else "")


def _data(events: Iterable[Mapping[str, Any]]) -> str:
    parts = []
    for event in events:
        parts.append(f"<h3>{_text(event['split'])}</h3>")
        rows = [
            (key.replace("_", " "), f"{event[key]:,}") for key in ("rows_read", "rows_used", "tokens", "trained_tokens")
        ]
        rows.append(("expected padding", f"{event['padding_fraction']:.0%}"))
        for reason, dropped in event["rows_dropped"].items():
            rows.append((f"dropped: {reason}", f"{dropped['count']:,} ({', '.join(dropped['lines'][:5])})"))
        parts.append(_table((), ((_text(a), _text(b)) for a, b in rows)))
        histogram = event["length_histogram"]
        most = max(histogram.values(), default=1)
        parts.append(
            _table(
                ("length up to", "rows", ""),
                (
                    (
                        _text(bound),
                        f"{count:,}",
                        f"<span class=bar style='width:{max(1, 300 * count // most)}px'></span>",
                    )
                    for bound, count in histogram.items()
                ),
                frozenset({0, 1}),
            )
        )
    return "".join(parts)


def _last_of_each(events: Iterable[Mapping[str, Any]], key: str) -> list[Mapping[str, Any]]:
    return list({event[key]: event for event in events}.values())


def _versions(checkpoints: Iterable[Path]) -> list[tuple[str, Any]]:
    """Give the versions that the newest checkpoint was made with, by name."""
    for folder in checkpoints:
        try:
            versions = json.loads((folder / "trainer_state.json").read_bytes()).get("versions", {})
        except (OSError, ValueError):
            continue
        return [(name, version) for name, version in versions.items() if name not in ("device", "trainwire")]
    return []


def page(run_dir: Path, overview: Overview) -> str:
    """Write the page. Raises ClientError if the folder holds no run."""
    from .picture import as_element, draw

    curves = read_curves(run_dir)
    log = list(read_log(run_dir, ("init", "data", "generation", "eval_end", "log", "attempt")))
    init: dict[str, Any] = next((event for event in reversed(log) if event["type"] == "init"), {})
    name = _text(init.get("run_name") or curves.run_dir.name)
    parts = [
        f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>{name}</title>",
        '<meta name=viewport content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style>",
        f"<h1>{name}</h1><p class=dim><code>{_text(run_dir)}</code></p>",
        _summary(overview),
        f"<h2>Curves</h2>{as_element(draw([curves]))}",
    ]
    data = _last_of_each((e for e in log if e["type"] == "data"), "split")
    if data:
        parts.append(f"<h2>Data</h2>{_data(data)}")
    timeline = Timeline.of(run_dir / LOG_NAME)
    said = (e for e in log if e["type"] == "generation" and timeline.holds(e["seq"], e["step"]))
    generations = list(said)[-_MAX_GENERATIONS:]
    if generations:
        spoken = (
            (str(e["step"]), f"<pre>{_text(e['prompt'])}</pre>", f"<pre>{_text(e['completion'])}</pre>")
            for e in generations
        )
        parts.append(f"<h2>Generations</h2>{_table(('step', 'prompt', 'completion'), spoken)}")
    checkpoints = list_checkpoints(run_dir)
    if checkpoints:
        saved = ((_text(c.path.name), str(c.step), _text(c.manifest.kind), _size(c.bytes)) for c in checkpoints)
        parts.append(f"<h2>Checkpoints</h2>{_table(('folder', 'step', 'kind', 'size'), saved, frozenset({1, 3}))}")
    notices = [e for e in log if e["type"] == "log" and e["level"] in ("warn", "error")]
    if notices:
        noticed = ((_text(e["level"]), _text(e.get("code") or ""), _text(e["message"])) for e in notices)
        parts.append(f"<h2>Notices</h2>{_table(('level', 'code', 'message'), noticed)}")
    attempts = [e for e in log if e["type"] == "attempt"]
    environment = [("device", init.get("device")), ("head", init.get("head")), ("BLAS", init.get("blas"))]
    environment += [("worker", attempts[-1]["worker"]), ("attempts", len(attempts))] if attempts else []
    environment += [
        (k.replace("_", " "), f"{init[k]:,}") for k in ("trainable_parameters", "total_parameters") if k in init
    ]
    environment += _versions([checkpoint.path for checkpoint in checkpoints])
    known = ((_text(key), _text(value)) for key, value in environment if value is not None)
    parts.append(f"<h2>Environment</h2>{_table((), known)}")
    config = init.get("config") or {}
    keys = ((f"<code>{_text(k)}</code>", f"<code>{_text(v)}</code>") for k, v in config.items() if v is not None)
    parts.append(f"<h2>Config</h2>{_table(('key', 'value'), keys)}")
    return "\n".join(parts) + "\n"


def run(words: list[str]) -> int:
    """Write the page; 3 if the folder holds no run, 4 without matplotlib."""
    parser = argparse.ArgumentParser(prog="trainwire report", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="default: report.html in the run folder")
    chosen = parser.parse_args(words)
    run_dir = chosen.run_dir.absolute()
    out: Path = chosen.out or run_dir / "report.html"
    overview = look_at(run_dir)
    if overview is None:
        print(f"trainwire: {chosen.run_dir} holds no run.", file=sys.stderr)
        return 3
    if not has_matplotlib():
        return 4
    try:
        out.write_text(page(run_dir, overview), encoding="utf-8")
    except ClientError as error:
        print(f"trainwire: {error}", file=sys.stderr)
        return 3
    except OSError as error:
        print(f"trainwire: {out} cannot be written: {error.strerror}.", file=sys.stderr)
        return 7
    print(out)
    return 0
