"""The run folder: only whole checkpoints count, and a lock proves that its holder lives."""

import fcntl
import json
import os
from pathlib import Path

import msgspec
import pytest

from trainwire_protocol import rundir
from trainwire_protocol.events import CheckpointKind


def write(run_dir: Path, name: str, step: int, kind: CheckpointKind = "periodic") -> Path:
    folder = run_dir / name
    folder.mkdir(parents=True)
    (folder / "adapters.safetensors").write_bytes(b"x" * 100)
    file = folder / "adapters.safetensors"
    files = {file.name: rundir.FileEntry(100, rundir.file_sha256(file))}
    manifest = rundir.Manifest(format=1, step=step, kind=kind, files=files)
    (folder / rundir.MANIFEST_NAME).write_bytes(msgspec.json.encode(manifest))
    return folder


def test_a_checkpoint_is_whole_when_every_file_is_as_its_manifest_says(tmp_path: Path) -> None:
    assert rundir.defect(write(tmp_path, "checkpoint-000001", 1)) is None


def test_a_checkpoint_that_is_not_there_is_called_so(tmp_path: Path) -> None:
    assert rundir.defect(tmp_path / "checkpoint-000001") == "there is no such folder"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / rundir.MANIFEST_NAME).unlink(), "manifest.json is missing"),
        (lambda f: (f / rundir.MANIFEST_NAME).write_text("{"), "manifest.json is missing or broken"),
        (lambda f: (f / "adapters.safetensors").unlink(), "is missing"),
        (lambda f: (f / "adapters.safetensors").write_bytes(b"x" * 99), "99 bytes instead of 100"),
        (lambda f: (f / "adapters.safetensors").write_bytes(b"y" * 100), "SHA-256"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_named(damage: object, words: str, tmp_path: Path) -> None:
    good = write(tmp_path, "checkpoint-000001", 1)
    bad = write(tmp_path, "checkpoint-000002", 2)
    damage(bad)  # type: ignore[operator]
    assert words in (rundir.defect(bad) or "")
    found, broken = rundir.newest_whole_checkpoint(tmp_path)
    assert found is not None
    assert found.path == good
    assert all(path == bad for path, _ in broken)


def test_sizes_alone_do_not_see_changed_bytes(tmp_path: Path) -> None:
    folder = write(tmp_path, "checkpoint-000001", 1)
    (folder / "adapters.safetensors").write_bytes(b"y" * 100)
    assert rundir.defect(folder, hashes=False) is None
    assert rundir.defect(folder) is not None


def test_checkpoints_are_listed_newest_first_and_final_first_among_those_of_one_step(tmp_path: Path) -> None:
    for name, step in (("checkpoint-000002", 2), ("best", 4), ("checkpoint-000004", 4), ("final", 4), ("mine", 3)):
        write(tmp_path, name, step)
    write(tmp_path, ".writing-checkpoint-000009", 9)
    write(tmp_path, "abandoned", 9)
    (tmp_path / "notes").mkdir()
    assert [info.path.name for info in rundir.list_checkpoints(tmp_path)] == [
        *["final", "checkpoint-000004", "best", "mine", "checkpoint-000002"]
    ]
    assert rundir.list_checkpoints(tmp_path)[0].bytes == 100


def test_a_folder_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert rundir.newest_whole_checkpoint(tmp_path / "nothing") == (None, [])


def test_names_sort_by_step() -> None:
    assert rundir.checkpoint_name(120) == "checkpoint-000120"
    assert rundir.emergency_name(131) == "emergency-checkpoint-000131"
    assert rundir.checkpoint_name(12_345_678) == "checkpoint-12345678"


def test_a_lock_that_nobody_holds_has_no_holder(tmp_path: Path) -> None:
    assert rundir.lock_holder(tmp_path) is None
    (tmp_path / rundir.LOCK_NAME).write_text('{"pid":1,"since_ms":2}')
    assert rundir.lock_holder(tmp_path) is None


@pytest.mark.parametrize("text", ['{"pid":7,"since_ms":8,"phase":"paused"}', "half a li"])
def test_the_holder_of_a_lock_is_told_even_if_what_it_wrote_cannot_be_read(text: str, tmp_path: Path) -> None:
    path = tmp_path / rundir.LOCK_NAME
    path.write_text(text)
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        holder = rundir.lock_holder(tmp_path)
    finally:
        os.close(descriptor)
    assert holder is not None
    if text.startswith("{"):
        assert json.loads(text) == {"pid": holder.pid, "since_ms": holder.since_ms, "phase": holder.phase}
