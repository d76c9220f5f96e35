"""What the weights, gradients and sums of a model need done on a CUDA card, hundreds of arrays in a few launches."""

from __future__ import annotations

import functools

import mlx.core as mx

from trainwire_engine.cuda import many
from trainwire_engine.cuda.compiler import DTYPES, compile_source, prelude
from trainwire_engine.cuda.kernels import available
from trainwire_engine.cuda.many import Arrays

_WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}


def usable(arrays: Arrays) -> bool:
    """Tell whether kernels exist for all of these: a card is there, their types are known, none is too large."""
    return bool(arrays) and available() and all(a.dtype in DTYPES and a.size < 2**31 for a in arrays.values())


def cast(arrays: Arrays, dtypes: dict[str, mx.Dtype]) -> Arrays:
    """Round the arrays to other types."""
    cast: Arrays = {}
    for source in DTYPES:
        for target in DTYPES:
            names = [n for n, a in arrays.items() if a.dtype == source and dtypes[n] == target]
            if source == target:
                cast |= {name: arrays[name] for name in names}
                continue
            for part in many.parts(names, arrays):
                body = "    result[i] = to_target(of_source(value[i]));\n"
                ins, outs = {"value": _code_type(source)}, {"result": _code_type(target)}
                code = many.compiled("cast", ins, outs, body, len(part), _conversions(source, target))
                made = many.launch("cast", code, [[arrays[n] for n in part]], [target])
                cast |= dict(zip(part, made))
    return {name: cast[name] for name in arrays}


def copied(arrays: Arrays) -> Arrays:
    """Copy arrays of any type."""
    made: Arrays = {}
    for dtype in {array.dtype for array in arrays.values()}:
        for part in many.parts([name for name, array in arrays.items() if array.dtype == dtype], arrays):
            kind = _WORDS[dtype.size]
            code = many.compiled("copied", {"value": kind}, {"result": kind}, "    result[i] = value[i];\n", len(part))
            made |= dict(zip(part, many.launch("copied", code, [[arrays[n] for n in part]], [dtype])))
    return {name: made[name] for name in arrays}


def put(targets: Arrays, sources: Arrays) -> list[mx.array]:
    """Copy over arrays in place, name by name; returns what must be evaluated for it to happen.

    MLX knows nothing of the change: the targets must be nobody's whose values were read before.
    """
    done = []
    for size in {array.itemsize for array in targets.values()}:
        for part in many.parts([name for name, array in targets.items() if array.itemsize == size], targets):
            done.append(
                many.change("put", "    target[i] = value[i];\n", _WORDS[size], targets, part, _WORDS[size], sources)
            )
    return done


def clear(targets: Arrays) -> list[mx.array]:
    """Set float32 arrays to zero in place, as `put` does."""
    return [
        many.change("clear", "    target[i] = 0.0f;\n", "float", targets, part)
        for part in many.parts(list(targets), targets)
    ]


def add_to(targets: Arrays, more: Arrays) -> list[mx.array]:
    """Add arrays of any of the known types to float32 arrays in place, as `put` does."""
    done = []
    for dtype in DTYPES:
        for part in many.parts([name for name in targets if more[name].dtype == dtype], targets):
            body = "    target[i] += number(value[i]);\n"
            done.append(many.change("add_to", body, "float", targets, part, "T", more, prelude(dtype)))
    return done


def added(totals: Arrays, more: Arrays) -> Arrays:
    """Add float32 arrays to float32 arrays, name by name."""
    sums: Arrays = {}
    for part in many.parts(list(totals), totals):
        code = many.compiled(
            "added",
            {"total": "float", "more": "float"},
            {"result": "float"},
            "    result[i] = total[i] + more[i];\n",
            len(part),
        )
        made = many.launch("added", code, [[totals[n] for n in part], [more[n] for n in part]], [mx.float32])
        sums |= dict(zip(part, made))
    return {name: sums[name] for name in totals}


def square_sum(arrays: Arrays) -> mx.array:
    """The sum of the squares of all numbers of float32 arrays, in an order that is always the same."""
    sums = []
    for part in many.parts(list(arrays), arrays):
        values = [arrays[name] for name in part]
        blocks = many.blocks(values)
        (made,) = mx.fast.precompiled_cuda_kernel(
            name="square_sum",
            compiled_source=_square_sum_code(len(part)),
            inputs=values,
            output_shapes=[(len(part) * blocks,)],
            output_dtypes=[mx.float32],
            scalars=[value.size for value in values],
            grid=(blocks * many.THREADS, len(part), 1),
            threadgroup=(many.THREADS, 1, 1),
            ensure_row_contiguous=True,
        )
        sums.append(mx.sum(made))
    return functools.reduce(mx.add, sums)


@functools.cache
def _square_sum_code(count: int) -> bytes:
    arguments = [f"const float* value{i}" for i in range(count)] + ["float* result"]
    arguments += [f"int size{i}" for i in range(count)]
    cases = "".join(f"    case {i}: value = value{i}; size = size{i}; break;\n" for i in range(count))
    return compile_source(f"""
extern "C" __global__ void square_sum({", ".join(arguments)}) {{
  const float* value;
  int size;
  switch (blockIdx.y) {{
{cases}    default: return;
  }}
  float sum = 0.0f;
  for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += (long long)gridDim.x * blockDim.x)
    sum += value[i] * value[i];
  __shared__ float of_warps[32];
  for (int distance = 16; distance; distance >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, distance);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {{
    sum = 0.0f;
    for (int i = 0; i < blockDim.x / 32; i++) sum += of_warps[i];
    result[blockIdx.y * gridDim.x + blockIdx.x] = sum;
  }}
}}
""")


def _code_type(dtype: mx.Dtype) -> str:
    return "float" if dtype == mx.float32 else "unsigned short"


def _conversions(source: mx.Dtype, target: mx.Dtype) -> str:
    """`of_source` and `to_target`, each made of the prelude of its type in a namespace of its own."""
    return (
        f"namespace source {{ {prelude(source)} }}\nnamespace target {{ {prelude(target)} }}\n"
        "#define of_source source::number\n#define to_target target::rounded\n"
    )
