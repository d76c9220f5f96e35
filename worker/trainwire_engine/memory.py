"""The engine's memory: limits set at the start, figures for the step events, the default micro-batch size."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from trainwire_engine import cgroup, native

_CUDA_SETTINGS = {
    # Larger pieces would spare the host time, but the memory of a piece is only used again after it.
    "MLX_MAX_OPS_PER_BUFFER": "100",
    "MLX_MAX_MB_PER_BUFFER": "100000",
    # MLX keeps a graph for each piece and an attention plan for each shape, and gives up a process that needs many.
    "MLX_CUDA_GRAPH_CACHE_SIZE": "4000",
    "MLX_CUDA_SDPA_CACHE_SIZE": "1000",
    "MLX_CUDA_SDPA_BACKWARD_CACHE_SIZE": "1000",
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
}
"""MLX reads these when it first computes on the card."""


@dataclass(frozen=True)
class MemoryFigures:
    """Bytes that MLX holds: in use, kept for reuse, and the highest use since the last reset."""

    active: int
    cache: int
    peak: int


def configure() -> None:
    """Cap the buffer cache, and set the wired limit on Apple GPUs; called once before a model loads.

    On a CUDA card, whose memory nobody else needs, buffers stay: to give and take them costs a twentieth of a step.
    """
    total = total_memory()
    if mx.default_device() != mx.cpu and not mx.metal.is_available():
        mx.set_cache_limit(total)
        for name, value in _CUDA_SETTINGS.items():
            os.environ.setdefault(name, value)
        return
    mx.set_cache_limit(min(total // 8, 2**34))
    if mx.metal.is_available():
        wired = mx.device_info().get("max_recommended_working_set_size")
        if wired:
            mx.set_wired_limit(int(wired))


def figures(*, reset_peak: bool = False) -> MemoryFigures:
    """Read MLX's counters; with `reset_peak` the next peak starts from what is in use now."""
    now = MemoryFigures(mx.get_active_memory(), mx.get_cache_memory(), mx.get_peak_memory())
    if reset_peak:
        mx.reset_peak_memory()
    return now


def clear_cache() -> None:
    """Give the kept buffers back to the system, as while paused."""
    mx.clear_cache()
    native.give_memory_back()


def total_memory() -> int:
    """Bytes of the memory that MLX's default device computes in, whoever uses it now; a container's limit counts."""
    info = mx.device_info()
    of_device = next((int(info[key]) for key in ("memory_size", "total_memory") if key in info), None)
    if mx.default_device() != mx.cpu and of_device is not None:
        return of_device
    whole = of_device or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(whole, cgroup.memory_limit() or whole)


def available() -> int:
    """Bytes that can still be had: of the device, or, where MLX computes on the CPU, of the machine and of a
    container's limit."""
    if mx.default_device() == mx.cpu and sys.platform == "linux":
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                of_machine = int(line.split()[1]) * 1024
                left = cgroup.memory_left()
                return of_machine if left is None else min(of_machine, left)
    return total_memory() - figures().active


def bytes_per_token(model_config: dict[str, Any]) -> int:
    """What the backward pass keeps of a token. On a CPU, in float32, about 34 activations of the hidden width and 6
    of the feed-forward width per block; on a GPU, in 16 bits and with fused kernels, 20 and 5."""
    text = {**model_config, **model_config.get("text_config", {})}
    width = int(text.get("hidden_size", 1024))
    layers = int(text.get("num_hidden_layers", 24))
    inner = int(text.get("intermediate_size", 4 * width))
    if mx.default_device() == mx.cpu:
        return layers * (34 * width + 6 * inner) * 4
    return layers * (20 * width + 5 * inner) * 2


def default_micro_batch_tokens(model_config: dict[str, Any], method: str, max_seq_length: int) -> int:
    """Padded tokens of one micro-batch from the model and the device's total memory, a power of two.

    A quarter of a machine's memory may go to activations, half of a CUDA card's, which holds nothing else. The CPU
    gains nothing above 1,024; of adapters a gigabyte of activations at most, by the bound above, is in work on a lane:
    SmolLM2-135M with 256 takes a fifth less memory and as long. The gradients of all weights would weigh more than
    that. An H200 trains Qwen3 0.6B at 72,000 tokens/s with 8,192 and at 82,500 with 16,384.
    """
    on_cpu = mx.default_device() == mx.cpu
    share = 2 if not on_cpu and not mx.metal.is_available() else 4
    room = total_memory() // share
    if on_cpu and method != "full":
        room = min(room, 2**30)
    fits = max(256, room // bytes_per_token(model_config))
    return min(1024 if on_cpu else 16384, 1 << (fits.bit_length() - 1))
