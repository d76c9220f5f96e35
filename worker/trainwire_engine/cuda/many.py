"""One launch over many arrays on a CUDA card: the source of such a kernel, and how it is called.

An adapter on every layer of a model has some hundred small weights; a launch for each of them and each operation
takes longer than the work. Here one launch goes over up to 64 of them, a row of blocks for each.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import mlx.core as mx

from trainwire_engine.cuda.compiler import compile_source

Arrays = dict[str, mx.array]

MOST = 64
"""Weights in a launch: its arguments, seven pointers for each, must fit into 4 KB."""
THREADS = 256
_BLOCKS = 1024


def parts(names: Sequence[str], arrays: Arrays) -> Iterator[list[str]]:
    """Share names out evenly, arrays of one size together, so that there are one or two numbers of them."""
    ordered = sorted(names, key=lambda name: -arrays[name].size)
    count = -(-len(ordered) // MOST)
    for index in range(count):
        yield ordered[index * len(ordered) // count : (index + 1) * len(ordered) // count]


def blocks(values: Sequence[mx.array]) -> int:
    """Tell how many blocks of threads each of the arrays gets, by the largest."""
    most = max(value.size for value in values)
    return max(1, min(_BLOCKS, -(-most // (4 * THREADS))))


def change(
    name: str,
    body: str,
    kind: str,
    targets: Arrays,
    part: list[str],
    of: str = "",
    sources: Arrays | None = None,
    before: str = "",
) -> mx.array:
    """Call a kernel that changes arrays of a kind in place, by arrays `of` another; gives the mark of the change."""
    ins = (("value", of),) if sources is not None else ()
    values = [sources[n] for n in part] if sources is not None else []
    changed = [targets[n] for n in part]
    (mark,) = mx.fast.precompiled_cuda_kernel(
        name=name,
        compiled_source=compile_source(program(name, ins, (), body, len(part), before, into=kind)),
        inputs=values + changed,
        output_shapes=[(1,)],
        output_dtypes=[mx.uint8],
        scalars=[array.size for array in changed],
        grid=(blocks(changed) * THREADS, len(part), 1),
        threadgroup=(THREADS, 1, 1),
        ensure_row_contiguous=True,
    )
    return mark


def launch(
    name: str, code: bytes, columns: list[list[mx.array]], dtypes: list[mx.Dtype], shared: mx.array | None = None
) -> list[mx.array]:
    """Call a kernel on columns of arrays; its outputs have the first column's shapes, one set for each type."""
    first = columns[0]
    return mx.fast.precompiled_cuda_kernel(
        name=name,
        compiled_source=code,
        inputs=[array for column in columns for array in column] + ([] if shared is None else [shared]),
        output_shapes=[array.shape for _ in dtypes for array in first],
        output_dtypes=[dtype for dtype in dtypes for _ in first],
        scalars=[array.size for array in first],
        grid=(blocks(first) * THREADS, len(first), 1),
        threadgroup=(THREADS, 1, 1),
        ensure_row_contiguous=True,
    )


def compiled(
    name: str, ins: dict[str, str], outs: dict[str, str], body: str, count: int, before: str = "", shared: str = ""
) -> bytes:
    """Compile the `program` of these arguments, for `launch`; one compiled before is not compiled again."""
    return compile_source(program(name, tuple(ins.items()), tuple(outs.items()), body, count, before, shared))


@functools.cache
def program(
    name: str,
    ins: tuple[tuple[str, str], ...],
    outs: tuple[tuple[str, str], ...],
    body: str,
    count: int,
    before: str = "",
    shared: str = "",
    into: str = "",
) -> str:
    """The source of a kernel that does `body` for every `i` of `count` sets of arrays, named with their types.

    With `into`, a type, the last input of a set is a `target` to change, and the only output is a mark.
    """
    changed = (("target", into),) if into else ()
    arguments = [f"const {kind}* {key}{i}" for key, kind in ins for i in range(count)]
    arguments += [f"{kind}* {key}{i}" for key, kind in changed for i in range(count)]
    arguments += [shared] * bool(shared)
    arguments += [f"{kind}* {key}{i}" for key, kind in outs for i in range(count)]
    arguments += ["unsigned char* mark"] * bool(into)
    arguments += [f"int size{i}" for i in range(count)]
    names = [key for key, _ in (*ins, *changed, *outs)] + ["size"]
    cases = "".join(f"    case {i}: {' '.join(f'{key} = {key}{i};' for key in names)} break;\n" for i in range(count))
    declared = "".join(f"  const {kind}* {key};\n" for key, kind in ins)
    declared += "".join(f"  {kind}* {key};\n" for key, kind in (*changed, *outs))
    return f"""{before}
extern "C" __global__ void {name}({", ".join(arguments)}) {{
{declared}  int size;
  switch (blockIdx.y) {{
{cases}    default: return;
  }}
  for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += (long long)gridDim.x * blockDim.x) {{
{body}  }}
}}
"""
