"""Writes a checkpoint in a form that other tools load: `python -m trainwire_engine.export CHECKPOINT --to FORM -o DIR`.

Forms: `mlx`, a fused model in mlx-lm's layout; `peft`, an adapter for peft and transformers; `hf`, a fused model in
transformers' layout. The last two exist for the architectures whose logits are proved equal by a test.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

from trainwire_engine.export_forms import Source, to_hf, to_mlx, to_peft
from trainwire_engine.failures import tell
from trainwire_engine.model_card import model_card
from trainwire_protocol.errors import NotFound, TrainwireError, Unsupported
from trainwire_protocol.rundir import STATE_NAME, TEMPORARY_PREFIX, defect, read_manifest

_KEPT_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
    # It names the tokens that end an answer.
    "generation_config.json",
)


def open_checkpoint(folder: Path) -> Source:
    """Read what a checkpoint folder says about itself. Raises NotFound if it is not a whole checkpoint."""
    if read_manifest(folder) is None:
        hint = "Give a checkpoint folder of a run, for instance runs/chat/final."
        raise NotFound(f"{folder} is no checkpoint: it has no readable manifest.json.", hint=hint)
    problem = defect(folder)
    if problem is not None:
        raise NotFound(f"The checkpoint {folder} is broken: {problem}.")
    state = json.loads((folder / STATE_NAME).read_bytes())
    adapter_file = folder / "adapter_config.json"
    adapter = json.loads(adapter_file.read_bytes()) if adapter_file.is_file() else None
    if adapter is not None and adapter["fine_tune_type"] == "full":
        adapter = None
    return Source(folder, state, adapter)


def _copy_files(source: Source, out: Path) -> None:
    """Copy what belongs to a model besides its weights and their config."""
    # The checkpoint's own files come last: its chat template is the one that was trained with.
    for folder in (source.base, source.folder):
        for pattern in _KEPT_FILES:
            for file in folder.glob(pattern):
                if file.is_file():
                    shutil.copyfile(file, out / file.name)


def export(checkpoint: Path, form: str, out: Path, *, dequantize: bool = False) -> str | None:
    """Export a checkpoint into a new folder, which appears whole; what is to be known of it, if there is something.

    Raises NotFound, Unsupported, ModelLoadFailed, and Unsupported if `out` exists and is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Unsupported(f"{out} exists already.", hint="Choose a folder that does not exist or is empty.")
    source = open_checkpoint(checkpoint)
    aside = out.parent / f"{TEMPORARY_PREFIX}{out.name}-{os.getpid()}"
    out.parent.mkdir(parents=True, exist_ok=True)
    aside.mkdir()
    note = None
    try:
        if form == "mlx":
            note = to_mlx(source, aside, dequantize=dequantize)
        elif form == "hf":
            to_hf(source, aside)
        else:
            note = to_peft(source, aside)
        _copy_files(source, aside)
        card = model_card(source.folder, source.state, source.adapter_config, form, note)
        (aside / "README.md").write_text(card, encoding="utf-8")
        if out.exists():
            out.rmdir()
        aside.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return note


def main(words: list[str] | None = None) -> int:
    """Run the exporter as a process; its exit status."""
    parser = argparse.ArgumentParser(prog="trainwire export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint folder, for instance runs/chat/final")
    parser.add_argument("--to", choices=("mlx", "peft", "hf"), required=True, dest="form")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="a new folder")
    parser.add_argument("--dequantize", action="store_true", help="with --to mlx: write a packed base unpacked")
    chosen = parser.parse_args(words)
    if chosen.dequantize and chosen.form != "mlx":
        parser.error("--dequantize goes with --to mlx")
    try:
        note = export(chosen.checkpoint.absolute(), chosen.form, chosen.out.absolute(), dequantize=chosen.dequantize)
    except TrainwireError as error:
        return tell(error)
    if note:
        print(note, file=sys.stderr)
    print(chosen.out.absolute())
    return 0


if __name__ == "__main__":
    sys.exit(main())
