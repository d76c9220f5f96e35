"""Writes the generated files; with --check, says which of them are stale."""

import argparse
import difflib
import json
import sys
from pathlib import Path

from ..schema import build_schema
from .tables import TABLES, fill
from .typescript import typescript

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = ("PROTOCOL.md",)
"""Documents that hold generated tables between markers."""


def generated_files(root: Path = ROOT) -> dict[Path, str]:
    """Make the wanted content of every generated file."""
    schema = build_schema()
    files = {
        root / "protocol" / "schema.json": json.dumps(schema, indent=2, ensure_ascii=False) + "\n",
        root / "clients" / "node" / "protocol.d.ts": typescript(schema),
        root / "clients" / "node" / "schema.json": json.dumps(schema, separators=(",", ":"), ensure_ascii=False) + "\n",
    }
    for name in DOCUMENTS:
        path = root / name
        if path.exists():
            files[path] = fill(path.read_text(encoding="utf-8"), TABLES)
    return files


def main() -> int:
    """Write or compare; 1 if a file is stale."""
    parser = argparse.ArgumentParser(prog="python -m trainwire_protocol.generate")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a file is not current")
    check: bool = parser.parse_args().check
    stale = 0
    for path, wanted in generated_files().items():
        present = path.read_text(encoding="utf-8") if path.exists() else ""
        if present == wanted:
            continue
        stale += 1
        if check:
            difference = difflib.unified_diff(present.splitlines(), wanted.splitlines(), str(path), "generated", n=1)
            print("\n".join(line[:200] for line in list(difference)[:40]), file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    if check and stale:
        print(f"{stale} generated files are stale: run `make generate`.", file=sys.stderr)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
