"""Elementwise work on hundreds of weights in a few launches on a CUDA card.

An adapter on every layer of a model has some hundred small weights; a launch for each of them and each operation
takes longer than the work. Here one launch goes over up to 64 of them, a row of blocks for each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx

from trainwire_engine.cuda.compiler import DTYPES, compile_source, prelude
from trainwire_engine.cuda.kernels import available

Arrays = dict[str, mx.array]

MOST = 64
"""Weights in a launch: its arguments, seven pointers for each, must fit into 4 KB."""
_WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}
_THREADS = 256
_BLOCKS = 1024

_ADAMW = """
    float g = grad[i] * with[2], w = weight[i];
    float m = beta1 * mean[i] + (1.0f - beta1) * g;
    float v = beta2 * square[i] + (1.0f - beta2) * g * g;
    float change = m * with[4] / (sqrtf(v) * with[5] + eps);
    float next = (decays ? w * with[1] : w) - with[0] * change;
    bool accept = with[3] != 0.0f;
    new_weight[i] = accept ? next : w;
    new_mean[i] = accept ? m : mean[i];
    new_square[i] = accept ? v : square[i];
"""


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
            for part in parts(names, arrays):
                body = "    result[i] = to_target(of_source(value[i]));\n"
                ins, outs = {"value": _code_type(source)}, {"result": _code_type(target)}
                code = _program("cast", ins, outs, body, len(part), _conversions(source, target))
                made = _launch("cast", code, [[arrays[n] for n in part]], [target])
                cast |= dict(zip(part, made))
    return {name: cast[name] for name in arrays}


def copied(arrays: Arrays) -> Arrays:
    """Copy arrays of any type."""
    made: Arrays = {}
    for dtype in {array.dtype for array in arrays.values()}:
        for part in parts([name for name, array in arrays.items() if array.dtype == dtype], arrays):
            kind = _WORDS[dtype.size]
            code = _program("copied", {"value": kind}, {"result": kind}, "    result[i] = value[i];\n", len(part))
            made |= dict(zip(part, _launch("copied", code, [[arrays[n] for n in part]], [dtype])))
    return {name: made[name] for name in arrays}


def put(targets: Arrays, sources: Arrays) -> list[mx.array]:
    """Copy over arrays in place, name by name; returns what must be evaluated for it to happen.

    MLX knows nothing of the change: the targets must be nobody's whose values were read before.
    """
    done = []
    for size in {array.itemsize for array in targets.values()}:
        for part in parts([name for name, array in targets.items() if array.itemsize == size], targets):
            done.append(
                _change("put", "    target[i] = value[i];\n", _WORDS[size], targets, part, _WORDS[size], sources)
            )
    return done


def clear(targets: Arrays) -> list[mx.array]:
    """Set float32 arrays to zero in place, as `put` does."""
    return [
        _change("clear", "    target[i] = 0.0f;\n", "float", targets, part) for part in parts(list(targets), targets)
    ]


def add_to(targets: Arrays, more: Arrays) -> list[mx.array]:
    """Add arrays of any of the known types to float32 arrays in place, as `put` does."""
    done = []
    for dtype in DTYPES:
        for part in parts([name for name in targets if more[name].dtype == dtype], targets):
            body = "    target[i] += number(value[i]);\n"
            done.append(_change("add_to", body, "float", targets, part, "T", more, prelude(dtype)))
    return done


def added(totals: Arrays, more: Arrays) -> Arrays:
    """Add float32 arrays to float32 arrays, name by name."""
    sums: Arrays = {}
    for part in parts(list(totals), totals):
        code = _program(
            "added",
            {"total": "float", "more": "float"},
            {"result": "float"},
            "    result[i] = total[i] + more[i];\n",
            len(part),
        )
        made = _launch("added", code, [[totals[n] for n in part], [more[n] for n in part]], [mx.float32])
        sums |= dict(zip(part, made))
    return {name: sums[name] for name in totals}


def square_sum(arrays: Arrays) -> mx.array:
    """The sum of the squares of all numbers of float32 arrays, in an order that is always the same."""
    sums = []
    for part in parts(list(arrays), arrays):
        values = [arrays[name] for name in part]
        blocks = _blocks(values)
        (made,) = mx.fast.precompiled_cuda_kernel(
            name="square_sum",
            compiled_source=_square_sum_code(len(part)),
            inputs=values,
            output_shapes=[(len(part) * blocks,)],
            output_dtypes=[mx.float32],
            scalars=[value.size for value in values],
            grid=(blocks * _THREADS, len(part), 1),
            threadgroup=(_THREADS, 1, 1),
            ensure_row_contiguous=True,
        )
        sums.append(mx.sum(made))
    return functools.reduce(mx.add, sums)


def adamw(
    params: Arrays,
    grads: Arrays,
    means: Arrays,
    squares: Arrays,
    scalars: mx.array,
    *,
    betas: tuple[float, float],
    eps: float,
    decays: Callable[[mx.array], bool],
) -> tuple[Arrays, Arrays, Arrays]:
    """AdamW on float32 arrays, as `update_rules.adamw` has it; returns weights, means and squares.

    `scalars` float32 [6]: learning rate, what decay leaves of a weight, scale of the gradient, whether to accept, and
    the two bias corrections. `decays` tells which weights decay.
    """
    made: tuple[Arrays, Arrays, Arrays] = ({}, {}, {})
    for decaying in (False, True):
        names = [name for name, param in params.items() if decays(param) == decaying]
        for part in parts(names, params):
            ins = dict.fromkeys(("weight", "grad", "mean", "square"), "float")
            outs = dict.fromkeys(("new_weight", "new_mean", "new_square"), "float")
            constants = (
                f"const float beta1 = {_float(betas[0])}, beta2 = {_float(betas[1])}, eps = {_float(eps)};\n"
                f"const bool decays = {str(decaying).lower()};\n"
            )
            code = _program("adamw", ins, outs, _ADAMW, len(part), constants, shared="const float* with")
            columns = [[source[name] for name in part] for source in (params, grads, means, squares)]
            results = _launch("adamw", code, columns, [mx.float32] * 3, scalars)
            for index, target in enumerate(made):
                target |= dict(zip(part, results[index * len(part) : (index + 1) * len(part)]))
    return tuple({name: target[name] for name in params} for target in made)  # type: ignore[return-value]


def parts(names: Sequence[str], arrays: Arrays) -> Iterator[list[str]]:
    """Share names out evenly, arrays of one size together, so that there are one or two numbers of them."""
    ordered = sorted(names, key=lambda name: -arrays[name].size)
    count = -(-len(ordered) // MOST)
    for index in range(count):
        yield ordered[index * len(ordered) // count : (index + 1) * len(ordered) // count]


def _blocks(values: Sequence[mx.array]) -> int:
    most = max(value.size for value in values)
    return max(1, min(_BLOCKS, -(-most // (4 * _THREADS))))


def _change(
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
        grid=(_blocks(changed) * _THREADS, len(part), 1),
        threadgroup=(_THREADS, 1, 1),
        ensure_row_contiguous=True,
    )
    return mark


def _launch(
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
        grid=(_blocks(first) * _THREADS, len(first), 1),
        threadgroup=(_THREADS, 1, 1),
        ensure_row_contiguous=True,
    )


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


def _program(
    name: str, ins: dict[str, str], outs: dict[str, str], body: str, count: int, before: str = "", shared: str = ""
) -> bytes:
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


def _code_type(dtype: mx.Dtype) -> str:
    return "float" if dtype == mx.float32 else "unsigned short"


def _conversions(source: mx.Dtype, target: mx.Dtype) -> str:
    """`of_source` and `to_target`, each made of the prelude of its type in a namespace of its own."""
    return (
        f"namespace source {{ {prelude(source)} }}\nnamespace target {{ {prelude(target)} }}\n"
        "#define of_source source::number\n#define to_target target::rounded\n"
    )


def _float(value: float) -> str:
    return f"{float(value)!r}f"
