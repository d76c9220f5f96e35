"""Model folders that appear whole or not at all."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from trainwire_engine.model_folder import MARKER, is_whole, make_once
from trainwire_protocol.errors import IoError


def write_weights(aside: Path) -> None:
    (aside / "weights").write_bytes(b"12345")


def test_a_folder_is_made_once_and_then_reused(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "model"
    assert make_once(folder, "key", write_weights)
    made = (folder / "weights").stat()
    assert not make_once(folder, "key", lambda aside: pytest.fail("made again"))
    assert (folder / "weights").stat().st_ino == made.st_ino


def test_a_folder_made_under_another_key_is_replaced(tmp_path: Path) -> None:
    make_once(tmp_path / "model", "old", write_weights)
    assert make_once(tmp_path / "model", "new", lambda aside: (aside / "other").write_bytes(b"1") and None)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [MARKER, "other"]


@pytest.mark.parametrize("damage", ["truncated", "missing", "no marker content"])
def test_a_damaged_folder_is_made_again(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "model"
    make_once(folder, "key", write_weights)
    if damage == "truncated":
        (folder / "weights").write_bytes(b"123")
    elif damage == "missing":
        (folder / "weights").unlink()
    else:
        (folder / MARKER).write_bytes(b"")
    assert not is_whole(folder, "key")
    assert make_once(folder, "key", write_weights)
    assert (folder / "weights").read_bytes() == b"12345"


def test_a_folder_that_trainwire_did_not_make_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("mine")
    with pytest.raises(IoError, match="not made by trainwire"):
        make_once(tmp_path, "key", write_weights)
    assert (tmp_path / "thesis").read_text() == "mine"


def test_a_writer_that_fails_leaves_nothing_behind_and_keeps_the_old_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_once(folder, "old", write_weights)

    def fail(aside: Path) -> None:
        write_weights(aside)
        raise OSError(5, "Input/output error")

    with pytest.raises(IoError, match="Input/output error"):
        make_once(folder, "new", fail)
    assert is_whole(folder, "old")
    assert not [path for path in tmp_path.iterdir() if path.name not in ("model", ".model.lock")]


def test_what_a_killed_maker_left_behind_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".model.part").mkdir()
    (tmp_path / ".model.part" / "half").write_bytes(b"1")
    assert make_once(tmp_path / "model", "key", write_weights)
    assert not (tmp_path / "model" / "half").exists()
    assert not (tmp_path / ".model.part").exists()


def test_makers_that_run_at_once_make_the_folder_one_time(tmp_path: Path) -> None:
    inside, go_on, made = threading.Event(), threading.Event(), []

    def slow(aside: Path) -> None:
        inside.set()
        assert go_on.wait(90)
        write_weights(aside)

    first = threading.Thread(target=lambda: made.append(make_once(tmp_path / "model", "key", slow)))
    first.start()
    assert inside.wait(90)
    second = threading.Thread(target=lambda: made.append(make_once(tmp_path / "model", "key", slow)))
    second.start()
    go_on.set()
    first.join(90)
    second.join(90)
    assert sorted(made) == [False, True]
