"""Limits of control groups, as a container sees them."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainwire_engine import cgroup, memory


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_the_tightest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    proc.write_text("0::/slice/service\n")
    write(root, memory__current="900")
    write(root / "slice", memory__max="5000", memory__current="3000", memory__stat="anon 1\ninactive_file 400")
    write(root / "slice/service", memory__max="max", memory__current="100")
    assert cgroup.memory_limit(proc, root) == 5000
    assert cgroup.memory_left(proc, root) == 5000 - (3000 - 400)


def test_a_container_of_its_own_namespace_has_its_limit_at_the_root(tmp_path: Path) -> None:
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    proc.write_text("0::/\n")
    write(root, memory__max="4096", memory__current="5000")
    assert cgroup.memory_limit(proc, root) == 4096
    assert cgroup.memory_left(proc, root) == 0


def test_version_one_is_read_where_its_memory_controller_is(tmp_path: Path) -> None:
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    proc.write_text("9:name=systemd:/\n8:pids:/\n4:memory:/docker/abc\n")
    write(root / "memory/docker/abc", memory__limit_in_bytes="7000", memory__usage_in_bytes="2000")
    write(root / "memory/docker/abc", memory__stat="inactive_file 5\ntotal_inactive_file 500")
    write(root / "memory", memory__limit_in_bytes=str(2**63 - 4096), memory__usage_in_bytes="9000")
    assert cgroup.memory_limit(proc, root) == 7000
    assert cgroup.memory_left(proc, root) == 5500


@pytest.mark.parametrize("text", ["", "0::/\n", "5:cpu:/\n"])
def test_without_a_limit_there_is_none(tmp_path: Path, text: str) -> None:
    proc = tmp_path / "cgroup"
    proc.write_text(text)
    assert cgroup.memory_limit(proc, tmp_path) is None
    assert cgroup.memory_left(proc, tmp_path) is None
    assert cgroup.memory_limit(tmp_path / "none", tmp_path) is None


def test_what_can_be_had_stays_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "memory_limit", lambda: 2**20)
    monkeypatch.setattr(cgroup, "memory_left", lambda: 2**19)
    assert memory.total_memory() == 2**20
    assert memory.available() == 2**19
