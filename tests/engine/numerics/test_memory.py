"""Figures and defaults of the memory: from the model and the whole device, never from what is free."""

from __future__ import annotations

import mlx.core as mx
import pytest
from tiny import tiny_config

from trainwire_engine import memory


def test_figures_follow_what_mlx_holds() -> None:
    memory.clear_cache()
    assert memory.figures(reset_peak=True).cache == 0
    before = memory.figures()
    block = mx.zeros((1024, 1024))
    mx.eval(block)
    held = memory.figures()
    assert held.active >= before.active + 2**22
    assert held.peak >= held.active
    del block
    assert memory.figures().active < held.active


def test_the_default_is_a_power_of_two_from_model_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens(total: int, **keys: int) -> int:
        monkeypatch.setattr(memory, "total_memory", lambda: total)
        return memory.default_micro_batch_tokens(tiny_config(**keys), "full", 2048)

    large = {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288}
    values = [tokens(size * 2**30, **large) for size in (8, 16, 32, 64, 128)]
    assert values == sorted(values)
    assert all(value & (value - 1) == 0 for value in values)
    assert values[0] < values[-1]
    assert tokens(8 * 2**30) >= values[0]
    assert tokens(2**20, **large) == 256


@pytest.mark.parametrize(("blocks", "width", "inner", "expected"), [(4, 256, 768, 1024), (30, 576, 1536, 256)])
def test_on_a_cpu_adapters_have_activations_of_a_gigabyte_in_work_at_most(
    monkeypatch: pytest.MonkeyPatch, blocks: int, width: int, inner: int, expected: int
) -> None:
    monkeypatch.setattr(memory, "total_memory", lambda: 2**36)
    shape = tiny_config(num_hidden_layers=blocks, hidden_size=width, intermediate_size=inner)
    assert memory.default_micro_batch_tokens(shape, "lora", 2048) == expected
    assert memory.default_micro_batch_tokens(shape, "full", 2048) == 1024
    assert expected == 1024 or memory.bytes_per_token(shape) * expected <= 2**30


def test_a_card_of_80_gigabytes_takes_16384_tokens_of_a_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    qwen3_0_6b = tiny_config(hidden_size=1024, num_hidden_layers=28, intermediate_size=3072)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    found = []
    for size in (8, 24, 80, 140):
        monkeypatch.setattr(memory, "total_memory", lambda size=size: size * 2**30)
        found.append(memory.default_micro_batch_tokens(qwen3_0_6b, "lora", 2048))
    assert found == [2048, 4096, 16384, 16384]


def test_a_model_wrapped_in_another_is_measured_by_its_text_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "total_memory", lambda: 16 * 2**30)
    text = tiny_config(hidden_size=4096, num_hidden_layers=36, intermediate_size=12288)
    wrapped = {"model_type": "qwen3_5", "text_config": text}
    assert memory.default_micro_batch_tokens(wrapped, "lora", 2048) == memory.default_micro_batch_tokens(
        text, "lora", 2048
    )


def test_the_cache_is_capped() -> None:
    memory.configure()
    cap = mx.set_cache_limit(0)
    mx.set_cache_limit(cap)
    assert 0 < cap <= 2**34
    assert cap <= memory.total_memory() // 8
