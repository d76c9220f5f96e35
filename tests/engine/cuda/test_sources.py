"""What can be said of the CUDA kernels without a card: their sources compile, and say no more arguments than fit."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from trainwire_engine.cuda import compiler, kernels, low_rank, many, norms, recordings, tensors, tracing


def test_without_a_card_nothing_is_ready_and_everything_works_as_before() -> None:
    if mx.default_device() != mx.cpu:
        pytest.skip("MLX computes on a GPU here")
    assert not kernels.available()
    assert not kernels.ready(mx.zeros(3))
    assert not tensors.usable({"w": mx.zeros(3)})
    assert not recordings.usable({"w": mx.zeros(3)})


@pytest.mark.parametrize("dtype", compiler.DTYPES, ids=str)
@pytest.mark.parametrize("file", ["swiglu", "loss", "take", "join", "rotate", "norm"])
def test_every_source_compiles_for_every_type(file: str, dtype: mx.Dtype) -> None:
    constants = norms.constants_of(128, dtype) if file == "norm" else {}
    assert_compiles(kernels.source(file, dtype, **constants))


def assert_compiles(source: str) -> None:
    try:
        code = compiler.compile_for(source, "sm_80")
    except compiler.CompileFailed as error:
        if "was not found" in str(error):
            pytest.skip(str(error))
        raise
    assert code.startswith(b"\x7fELF")


def test_the_arguments_of_a_full_launch_fit_into_four_kilobytes() -> None:
    ins = tuple((name, "float") for name in ("weight", "grad", "mean", "square"))
    outs = tuple((name, "float") for name in ("new_weight", "new_mean", "new_square"))
    source = many.program("adamw", ins, outs, "", many.MOST, shared="const float* with")
    arguments = source[source.index("(") + 1 : source.index(")")].split(", ")
    assert sum(8 if "*" in argument else 4 for argument in arguments) <= 4096


def test_names_are_shared_out_evenly_and_none_is_lost() -> None:
    arrays = {f"w{i}": mx.zeros(1 + i % 3) for i in range(392)}
    parts = list(many.parts(list(arrays), arrays))
    assert sorted(name for part in parts for name in part) == sorted(arrays)
    assert {len(part) for part in parts} == {56}


def test_fusing_can_be_switched_off_and_on() -> None:
    seen = []

    def function(x: mx.array) -> mx.array:
        return mx.exp(x) * 2 + x

    for wanted in (False, True):
        with tracing.fusing(wanted):
            seen.append(str(mx.compile(function)(mx.zeros(3)).tolist()))
    assert seen == ["[2.0, 2.0, 2.0]"] * 2


def test_what_a_pass_reads_comes_apart_as_it_was() -> None:
    inputs = (
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.array([1.5, -2.0, 0.1], np.float32),
        np.full((1, 1, 2), 2**32 - 1, np.uint32),
        np.array([-1], np.int32),
    )
    views = recordings._apart(recordings._one(inputs), inputs)
    for view, array in zip(views, inputs, strict=True):
        got = np.array(view)
        assert got.dtype == array.dtype
        assert np.array_equal(got, array)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize(("count", "rank"), [(1, 8), (3, 16), (4, 64)])
def test_products_of_adapters_compile_for_every_number_of_layers(dtype: mx.Dtype, count: int, rank: int) -> None:
    assert_compiles(kernels.source("low_rank", dtype, **low_rank.constants_of(dtype, count, rank)))
