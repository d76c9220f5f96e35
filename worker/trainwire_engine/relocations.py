"""Where libmlx keeps the addresses that it calls functions through: slots of its relocation table, read and written."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Collection
from pathlib import Path

ROUTINES = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
"""The functions that MLX takes from its BLAS; the wheel's LAPACK keeps its own."""


def is_elf64() -> bool:
    """Tell whether this process is made of files as they are read here."""
    return sys.platform == "linux" and struct.calcsize("P") == 8 and platform.machine() in ("x86_64", "aarch64")


def find_slots(names: Collection[str] = ROUTINES) -> dict[str, int]:
    """Find the addresses that libmlx calls functions through: symbol to the slot's place in memory."""
    import mlx.core

    del mlx
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].endswith("/libmlx.so") and int(fields[2], 16) == 0:
            return _relocations(Path(fields[5]), int(fields[0].split("-")[0], 16), names)
    return {}


def _relocations(file: Path, base: int, wanted: Collection[str]) -> dict[str, int]:
    """Read an ELF file's relocations of some symbols (System V gABI, chapters 4 and 5)."""
    longest = max(map(len, wanted)) + 1
    with file.open("rb") as elf:

        def read(offset: int, size: int) -> bytes:
            elf.seek(offset)
            return elf.read(size)

        header = read(0, 64)
        table, entry, count = (*struct.unpack_from("<Q", header, 32), *struct.unpack_from("<HH", header, 54))
        segments = [struct.unpack("<IIQQQQQQ", read(table + i * entry, 56)) for i in range(count)]

        def offset(address: int) -> int:
            for kind, _, start, virtual, _, size, _, _ in segments:
                if kind == 1 and virtual <= address < virtual + size:
                    return int(start + address - virtual)
            raise ValueError("an address outside the file")

        dynamic = next(segment for segment in segments if segment[0] == 2)
        entries = dict(struct.iter_unpack("<QQ", read(dynamic[2], dynamic[5])))
        symbols, names = offset(entries[6]), offset(entries[5])
        found: dict[str, int] = {}
        for where, size in ((entries.get(23), entries.get(2)), (entries.get(7), entries.get(8))):
            if not where or not size:
                continue
            for slot, info, _ in struct.iter_unpack("<QQq", read(offset(where), size)):
                if info >> 32:
                    (name_at,) = struct.unpack("<I", read(symbols + (info >> 32) * 24, 4))
                    name = read(names + name_at, longest).split(b"\0")[0].decode("ascii", "replace")
                    if name in wanted:
                        found[name] = base + slot
        return found


def read_slot(address: int) -> int:
    """Give the address in a slot."""
    return ctypes.c_size_t.from_address(address).value


def write_slot(address: int, value: int) -> None:
    """Write one pointer, on a page that may have been made read-only after relocation."""
    slot = ctypes.c_size_t.from_address(address)
    if _writable(address):
        slot.value = value
        return
    libc = ctypes.CDLL(None, use_errno=True)
    size = os.sysconf("SC_PAGE_SIZE")
    page = ctypes.c_void_p(address // size * size)
    if libc.mprotect(page, ctypes.c_size_t(size), 3):
        raise OSError(ctypes.get_errno(), "mprotect")
    slot.value = value
    libc.mprotect(page, ctypes.c_size_t(size), 1)


def _writable(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights = line.split(maxsplit=2)[:2]
        start, end = (int(edge, 16) for edge in span.split("-"))
        if start <= address < end:
            return "w" in rights
    raise OSError("no memory at the slot of a relocation")
