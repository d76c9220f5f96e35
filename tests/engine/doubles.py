"""What the tests of kernels share: random arrays, and NumPy in double precision to hold results against."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np


def draw(seed: int, *shape: int, dtype: Any = mx.float32, scale: float = 1.0) -> mx.array:
    return mx.array((np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)).astype(dtype)


def exact(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def close(got: mx.array, expected: np.ndarray, relative: float) -> None:
    np.testing.assert_allclose(exact(got), expected, rtol=relative, atol=relative * np.abs(expected).max())
