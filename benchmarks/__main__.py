"""Compares trainwire with the real `mlx_lm.lora` on this machine: the same model, rows, updates and optimizer.

    python -m benchmarks [--short] [--cases NAME …] [--rounds 2] [--record] [--folder FOLDER]

Each case trains in turn (A B C A B C): trainwire, `mlx_lm.lora` on the BLAS that trainwire uses, and `mlx_lm.lora` as
it is installed; where that one takes minutes an update, it has shorter rows and comes behind the others, once. Figures
are medians over the rounds, rates are trained tokens per second after the first update over
the updates that both sides made. `--record` writes results.json and the table of README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from benchmarks.arguments import add_folder, folder_of
from benchmarks.compare import CASES, beside_stock, compare
from benchmarks.report import HERE, line_of, machine, write_readme


def main() -> None:
    """Run the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="the small models alone, a few minutes")
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peer-threads", type=int, help="BLAS threads of the peer; else it gets what suits it best")
    parser.add_argument(
        "--beside", choices=("same", "installed"), help="of the large cases, one peer alone: its part of kept results"
    )
    parser.add_argument("--record", action="store_true", help="keep the results and write them into README.md")
    add_folder(parser)
    chosen = parser.parse_args()
    names = chosen.cases or [name for name, case in CASES.items() if case.short or not chosen.short]
    kept = HERE / "results.json"
    results = json.loads(kept.read_text()) if kept.is_file() else {}
    if chosen.beside == "installed" and (missing := [name for name in names if name not in results]):
        parser.error(f"--beside installed adds to kept results, and there are none of {', '.join(missing)}")
    with folder_of(chosen) as folder:
        for name in names:
            load = os.getloadavg()[0]
            case, result = CASES[name], results.get(name, {})
            if chosen.beside != "installed":
                found = compare(case, folder, chosen.rounds, chosen.peer_threads)
                both = {part: {**result.get(part, {}), **found[part]} for part in ("sides", "ratios")}
                result = {**result, **found, **both}
            if case.stock_longest is not None and chosen.beside != "same":
                result = beside_stock(case, folder, result)
            results[name] = {**result, **machine(), "load": round(load, 1)}
            print(line_of(name, results[name]), flush=True)
            if chosen.record:
                kept.write_text(json.dumps(results, indent=1) + "\n")
                write_readme(results)
    if not chosen.record:
        json.dump({name: results[name] for name in names}, sys.stdout, indent=1)
        print()


if __name__ == "__main__":
    main()
