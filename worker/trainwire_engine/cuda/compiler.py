"""CUDA source to machine code with the NVRTC that MLX brings, as `mx.fast.precompiled_cuda_kernel` takes it.

MLX compiles a fused kernel in 34 forms and with its headers: two to three seconds for each, a minute or two before
the first update of a model. Source without headers and in one form takes a tenth of a second.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx

_PRELUDES = {
    mx.float32: """
typedef float T;
static __device__ __forceinline__ float number(T x) { return x; }
static __device__ __forceinline__ T rounded(float x) { return x; }
""",
    mx.bfloat16: """
typedef unsigned short T;
static __device__ __forceinline__ float number(T x) { return __int_as_float((unsigned)x << 16); }
static __device__ __forceinline__ T rounded(float x) {
  T y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
""",
    mx.float16: """
typedef unsigned short T;
static __device__ __forceinline__ float number(T x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
static __device__ __forceinline__ T rounded(float x) {
  T y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
""",
}

DTYPES = tuple(_PRELUDES)
"""The types that kernels over T are made for."""


_pool = ThreadPoolExecutor(thread_name_prefix="nvrtc")
_begun: dict[tuple[str, str], Future[bytes]] = {}
_lock = threading.Lock()


class CompileFailed(Exception):
    """NVRTC is missing, too old for the card, or refused the source: its message."""


def prelude(dtype: mx.Dtype) -> str:
    """The definition of T for a type: `number` makes a float of it, `rounded` rounds a float to the nearest."""
    return _PRELUDES[dtype]


@functools.cache
def architecture() -> str:
    """The card's architecture, as `sm_90`; raises CompileFailed without a card of at least sm_80."""
    info = mx.device_info(mx.gpu) if mx.is_available(mx.gpu) else {}
    name = str(info.get("architecture", ""))
    if not name.startswith("sm_") or not name[3:].isdigit() or int(name[3:]) < 80:
        raise CompileFailed(f"no card of at least sm_80 but {name or 'none'}")
    return name


def compile_source(source: str) -> bytes:
    """Compile CUDA C++ that includes nothing to a cubin for this card; raises CompileFailed."""
    return compile_for(source, architecture())


def compile_for(source: str, target: str) -> bytes:
    """Compile for a given architecture, once; needs no card. Raises CompileFailed."""
    return begin(source, target).result()


def begin(source: str, target: str) -> Future[bytes]:
    """Start to compile what will be needed soon: each source takes a thread of its own a tenth of a second or more."""
    with _lock:
        if (source, target) not in _begun:
            _begun[source, target] = _pool.submit(_compile, source, target)
        return _begun[source, target]


def _compile(source: str, target: str) -> bytes:
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    _check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"trainwire.cu", 0, None, None))
    try:
        options = (ctypes.c_char_p * 2)(f"--gpu-architecture={target}".encode(), b"--fmad=true")
        if nvrtc.nvrtcCompileProgram(program, len(options), options):
            raise CompileFailed(_log(nvrtc, program))
        size = ctypes.c_size_t()
        _check(nvrtc, nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        _check(nvrtc, nvrtc.nvrtcGetCUBIN(program, code))
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """The library that this process has loaded for MLX; the loader finds one by its name otherwise."""
    loaded = []
    maps = Path("/proc/self/maps")
    if maps.exists():
        loaded = sorted({line.split()[-1] for line in maps.read_text().splitlines() if "libnvrtc.so" in line})
    for name in [*loaded, "libnvrtc.so.13", "libnvrtc.so.12"]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CompileFailed("libnvrtc was not found")


def _check(nvrtc: ctypes.CDLL, status: int) -> None:
    if status:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CompileFailed(nvrtc.nvrtcGetErrorString(status).decode())


def _log(nvrtc: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(max(1, size.value))
    nvrtc.nvrtcGetProgramLog(program, text)
    return text.value.decode(errors="replace")
