"""Arrays as safetensors files: laid out here, so that a save can hash and flush what it writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

_NAMES = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.uint16: "U16",
    mx.uint32: "U32",
    mx.uint64: "U64",
    mx.int8: "I8",
    mx.int16: "I16",
    mx.int32: "I32",
    mx.int64: "I64",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.float32: "F32",
}


@dataclass(frozen=True)
class Tensors:
    """The content of one safetensors file: its header, and the arrays' own memory, which no update changes."""

    header: bytes
    views: tuple[memoryview, ...]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.header) + sum(len(view) for view in self.views)

    def chunks(self) -> Iterator[bytes | memoryview]:
        """Give the file's content, piece by piece."""
        yield self.header
        yield from self.views


def lay_out(arrays: Mapping[str, mx.array]) -> Tensors:
    """Lay arrays out as a safetensors file that mlx and the safetensors library read; computes what is lazy."""
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0]))
    raw = [mx.contiguous(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array) for _, array in ordered]
    mx.eval(raw)
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for name, array in ordered:
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return Tensors(len(text).to_bytes(8, "little") + text, tuple(_memory(array) for array in raw))


def _memory(array: mx.array) -> memoryview:
    flat: Any = array.reshape(-1)
    return memoryview(flat).cast("B") if array.size else memoryview(b"")


def load(path: Path) -> dict[str, mx.array]:
    """Read a safetensors file into memory; the file may go away afterwards."""
    arrays: Any = mx.load(str(path))
    mx.eval(arrays)
    return dict(arrays)
