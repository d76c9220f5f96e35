"""The memory that a container or a service of systemd may have: limits of Linux's control groups."""

from __future__ import annotations

from pathlib import Path

_PROC, _ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def memory_limit(proc: Path = _PROC, root: Path = _ROOT) -> int | None:
    """Bytes that this process's groups may use together with their other processes; None without a limit."""
    limits = [limit for folder in _groups(proc, root) if (limit := _number(folder, *_LIMITS)) is not None]
    return min(limits, default=None)


def memory_left(proc: Path = _PROC, root: Path = _ROOT) -> int | None:
    """Bytes that can still be had before a limit is reached; None without one.

    Pages of files that nobody has read lately count as free, as the kernel drops them first.
    """
    left = []
    for folder in _groups(proc, root):
        limit, used = _number(folder, *_LIMITS), _number(folder, *_USED)
        if limit is not None and used is not None:
            left.append(max(0, limit - max(0, used - _inactive(folder))))
    return min(left, default=None)


_LIMITS, _USED = ("memory.max", "memory.limit_in_bytes"), ("memory.current", "memory.usage_in_bytes")
"""Names of the files in version 2 and version 1 (kernel.org, admin-guide/cgroup-v2 and cgroup-v1/memory)."""
_NO_LIMIT = 2**60
"""Version 1 says a number near 2**63 where there is none."""


def _groups(proc: Path, root: Path) -> list[Path]:
    """The folders of the groups of this process, from its own up to the root that it sees."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = root / "memory" if "memory" in controllers.split(",") else root
        if controllers and base == root:
            continue
        own = base / path.strip("/")
        found += [folder for folder in (own, *own.parents) if folder == base or base in folder.parents]
    return found


def _number(folder: Path, *names: str) -> int | None:
    for name in names:
        try:
            text = (folder / name).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() and int(text) < _NO_LIMIT else None
    return None


def _inactive(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    figures = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(figures.get("total_inactive_file", figures.get("inactive_file", "0")))
