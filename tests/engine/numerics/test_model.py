"""Loading a folder, attaching adapters, finding the head: what mlx-lm would compute, and clear refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tiny import FAMILIES, tiny_config, tiny_model

from trainwire_engine import loading
from trainwire_engine.adapters import DoRALinear, LoRALinear
from trainwire_engine.low_rank import low_rank_sum
from trainwire_engine.model import Model, load_model
from trainwire_protocol.config import Config
from trainwire_protocol.errors import ConfigInvalid, ModelLoadFailed, Unsupported

TOKENS = mx.array([[5, 9, 300, 41, 7, 8, 220, 3]])


def shaken(model: Model, seed: int = 3) -> Model:
    """Move the trained weights away from their start, so that adapters do something."""
    mx.random.seed(seed)
    model.set_trainable({n: v + 0.1 * mx.random.normal(v.shape) for n, v in model.trainable.items()})
    return model


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_loads_as_mlx_lm_loads_it(tiny: Callable[..., Path], family: str, bits: int | None) -> None:
    from mlx_lm.utils import load_model as reference

    folder = tiny(family, bits=bits)
    module, config = loading.load_module(folder)
    theirs, _ = reference(folder)
    assert config["model_type"] == family
    assert dict(tree_flatten(module.parameters())).keys() == dict(tree_flatten(theirs.parameters())).keys()
    assert mx.array_equal(module(TOKENS), theirs(TOKENS))


def test_loading_a_model_imports_no_transformers(tiny: Callable[..., Path]) -> None:
    code = (
        "import sys; from trainwire_engine.model import load_model; from trainwire_protocol.config import Config\n"
        f"load_model(Config(model={str(tiny('llama'))!r}, data='x'))\n"
        "assert not {'transformers', 'mlx_lm.utils', 'torch'} & set(sys.modules), 'slow imports'\n"
        "import mlx_lm; assert mlx_lm.load"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=240)


def test_what_the_short_way_does_not_know_goes_to_mlx_lm(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "none"}}))
    module, _ = loading.load_module(folder)
    assert mx.array_equal(module(TOKENS), loading.load_module(tiny("llama"))[0](TOKENS))


def test_a_model_type_is_followed_through_mlx_lms_own_table(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mistral"}))
    assert type(loading.load_module(folder)[0]).__module__ == "mlx_lm.models.llama"


def broken(folder: Path, how: str) -> Path:
    if how == "missing":
        return folder / "nowhere"
    if how == "file":
        return folder / "config.json"
    tiny_model(folder, "llama")
    config, weights = folder / "config.json", folder / "model.safetensors"
    if how == "no config":
        config.unlink()
    elif how == "bad json":
        config.write_text("{")
    elif how == "no model_type":
        config.write_text("{}")
    elif how == "unknown architecture":
        config.write_text(json.dumps({**tiny_config("llama"), "model_type": "brain9"}))
    elif how == "no weights":
        weights.unlink()
    elif how == "cut weights":
        weights.write_bytes(weights.read_bytes()[:-5000])
    elif how == "other shapes":
        config.write_text(json.dumps(tiny_config("llama", hidden_size=48, head_dim=12)))
    elif how == "missing key":
        config.write_text(json.dumps({"model_type": "llama"}))
    return folder


@pytest.mark.parametrize(
    "how",
    ["missing", "no config", "bad json", "no model_type", "unknown architecture", "no weights", "cut weights",
     "other shapes", "missing key"],
)  # fmt: skip
def test_a_broken_folder_is_refused_with_its_name_and_a_reason(
    config: Callable[..., Config], tmp_path: Path, how: str
) -> None:
    folder = broken(tmp_path / "model", how)
    with pytest.raises(ModelLoadFailed) as caught:
        load_model(config(model=folder))
    assert "model" in caught.value.message
    assert caught.value.hint or how == "bad json"
    assert caught.value.details


def test_full_training_of_packed_weights_is_refused(config: Callable[..., Config], tiny: Callable[..., Path]) -> None:
    with pytest.raises(Unsupported, match="quantized") as caught:
        load_model(config(model=tiny(bits=4), method="full"))
    assert "lora" in str(caught.value.hint)


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("family", [*FAMILIES, "packed"])
def test_mlx_lm_loads_our_adapters_and_computes_the_same(
    config: Callable[..., Config], tiny: Callable[..., Path], tmp_path: Path, family: str, method: str
) -> None:
    from mlx_lm.tuner.utils import load_adapters
    from mlx_lm.utils import load_model as reference

    folder = tiny(bits=4) if family == "packed" else tiny(family)
    model = shaken(load_model(config(model=folder, method=method, lora_rank=4, lora_alpha=6)))
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), model.tensors_to_save())
    (tmp_path / "adapter_config.json").write_text(json.dumps(model.adapter_config()))
    assert model.adapter_config()["lora_parameters"]["scale"] == 1.5
    theirs = load_adapters(reference(folder)[0], str(tmp_path))
    theirs.eval()
    np.testing.assert_allclose(model.module(TOKENS), theirs(TOKENS), atol=2e-4)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ours", [LoRALinear, DoRALinear])
def test_layers_have_the_values_and_gradients_of_mlx_lms(ours: Any, bias: bool, bits: int | None) -> None:
    from mlx_lm.tuner.dora import DoRALinear as TheirDoRA
    from mlx_lm.tuner.lora import LoRALinear as TheirLoRA

    mx.random.seed(0)
    linear: Any = nn.Linear(64, 32, bias=bias)
    linear = nn.QuantizedLinear.from_linear(linear, 32, bits) if bits else linear
    layer = ours(linear, 4, 1.5, 0.0)
    other = (TheirLoRA if ours is LoRALinear else TheirDoRA).from_base(linear, r=4, scale=1.5)
    values = {"lora_a": mx.random.normal((64, 4)), "lora_b": mx.random.normal((4, 32))}
    x = mx.random.normal((3, 5, 64))

    def outcome(layer: Any) -> Any:
        layer.update(values)
        names = ["lora_a", "lora_b", *(["m"] if "m" in layer else [])]

        def loss(params: dict[str, mx.array], x: mx.array) -> mx.array:
            layer.update(params)
            return mx.sum(mx.sin(layer(x)))

        return layer(x), *mx.grad(loss, argnums=(0, 1))({n: layer[n] for n in names}, x)

    (y, grads, dx), (y2, grads2, dx2) = outcome(layer), outcome(other)
    np.testing.assert_allclose(y, y2, atol=1e-4)
    np.testing.assert_allclose(dx, dx2, atol=2e-4)
    assert grads.keys() == grads2.keys()
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, grads2[name], atol=5e-4, err_msg=name)


def test_adapters_compute_in_the_models_dtype_and_are_kept_in_float32(
    config: Callable[..., Config], tiny: Callable[..., Path]
) -> None:
    model = load_model(config(model=tiny(dtype=mx.bfloat16)))
    assert {value.dtype for value in model.trainable.values()} == {mx.float32}
    computes = mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16
    assert model.forward_dtype == computes
    assert model.module(TOKENS).dtype == computes
    assert model.module.model.layers[0].self_attn.q_proj.lora_a.dtype == computes


def test_a_model_too_large_for_float32_stays_as_it_is(
    config: Callable[..., Config], tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainwire_engine.memory.total_memory", lambda: 100_000)
    model = shaken(load_model(config(model=tiny(dtype=mx.bfloat16))))
    assert model.forward_dtype == mx.bfloat16
    assert model.module(TOKENS).dtype == mx.bfloat16
    assert model.module.model.layers[0].self_attn.q_proj.lora_a.dtype == mx.bfloat16


def test_masters_follow_the_model_if_asked(config: Callable[..., Config], tiny: Callable[..., Path]) -> None:
    model = load_model(config(model=tiny(dtype=mx.bfloat16), trainable_dtype="model"))
    assert {value.dtype for value in model.trainable.values()} == {mx.bfloat16}


def test_adapters_start_from_the_seed_and_change_nothing(
    config: Callable[..., Config], tiny: Callable[..., Path]
) -> None:
    models = [load_model(config(seed=seed)) for seed in (0, 0, 1)]
    first, again, other = (model.trainable for model in models)
    assert all(mx.array_equal(first[name], again[name]) for name in first)
    assert not any(mx.array_equal(first[name], other[name]) for name in first if name.endswith("lora_a"))
    assert all(not mx.any(first[name]).item() for name in first if name.endswith("lora_b"))
    np.testing.assert_allclose(models[0].module(TOKENS), loading.load_module(tiny())[0](TOKENS), atol=1e-5)


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_the_base_model_comes_back_while_the_adapter_is_disabled(
    config: Callable[..., Config], tiny: Callable[..., Path], method: str
) -> None:
    base = loading.load_module(tiny())[0](TOKENS)
    model = shaken(load_model(config(method=method)))
    adapted = model.module(TOKENS)
    with model.adapter_disabled() as module:
        assert mx.array_equal(module(TOKENS), base)
    assert mx.array_equal(model.module(TOKENS), adapted)
    assert not mx.allclose(adapted, base, atol=1e-2)


def test_a_fully_trained_model_has_no_base_beside_it(config: Callable[..., Config]) -> None:
    model = load_model(config(method="full"))
    with pytest.raises(Unsupported, match="no base model"), model.adapter_disabled():
        pass


def test_keys_and_layers_choose_where_adapters_go(config: Callable[..., Config]) -> None:
    model = load_model(config(lora_layers=1, lora_keys=["self_attn.q_proj", "mlp.up_proj", "model.embed_tokens"]))
    layers = {name.rsplit(".", 1)[0] for name in model.trainable}
    assert layers == {"model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj", "model.embed_tokens"}
    assert model.adapter_config()["num_layers"] == 1
    assert model.head == "chunked"


def test_adapters_on_more_blocks_than_there_are_are_refused(config: Callable[..., Config]) -> None:
    assert load_model(config(lora_layers=2)).adapter_config()["num_layers"] == 2
    with pytest.raises(ConfigInvalid, match="lora_layers = 3 is not allowed: the model has 2 blocks"):
        load_model(config(lora_layers=3))


def test_a_key_that_fits_no_layer_is_named_with_those_that_there_are(config: Callable[..., Config]) -> None:
    with pytest.raises(ConfigInvalid, match="'q_proj'") as caught:
        load_model(config(lora_keys=["q_proj"]))
    assert "self_attn.q_proj" in str(caught.value.hint)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_of_each_family_is_found(
    config: Callable[..., Config], tiny: Callable[..., Path], family: str, bits: int | None
) -> None:
    model = load_model(config(model=tiny(family, bits=bits)))
    assert (model.head, model.head_reason) == ("chunked", None)
    assert model.vocab_size == 512


def test_capped_logits_are_taken_whole_with_the_reason(config: Callable[..., Config], tmp_path: Path) -> None:
    keys = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 8}
    folder = tiny_model(tmp_path / "m", "gemma2", **keys)
    model = load_model(config(model=folder))
    assert model.head == "full"
    assert "capped" in str(model.head_reason)


def test_parameters_count_as_before_packing(config: Callable[..., Config], tiny: Callable[..., Path]) -> None:
    whole, packed = load_model(config(model=tiny())), load_model(config(model=tiny(bits=4)))
    assert whole.total_parameters == packed.total_parameters
    assert whole.trainable_parameters == packed.trainable_parameters == sum(v.size for v in whole.trainable.values())


def test_a_full_model_is_saved_whole_in_its_own_dtype_and_its_masters_apart(
    config: Callable[..., Config], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny("qwen3_5", dtype=mx.bfloat16)
    model = shaken(load_model(config(model=folder, method="full")))
    tensors = model.tensors_to_save()
    original = mx.load(str(folder / "model.safetensors"))
    assert {name: value.dtype for name, value in tensors.items()} == {n: v.dtype for n, v in original.items()}
    masters = model.exact_masters()
    assert masters.keys() == model.trainable.keys()
    again = load_model(config(model=folder, method="full"))
    again.set_trainable(masters)
    assert mx.array_equal(again.module(TOKENS), model.module(TOKENS))
    assert not load_model(config(method="full")).exact_masters()


def test_weights_that_do_not_fit_are_refused_and_the_message_names_both_sides(config: Callable[..., Config]) -> None:
    small, large = load_model(config(lora_rank=4)), load_model(config(lora_rank=8))
    with pytest.raises(ModelLoadFailed, match=r"\[32, 4\].*\[32, 8\]"):
        large.set_trainable(small.trainable)
    with pytest.raises(ModelLoadFailed, match=r"only the model has .*lora_a"):
        large.set_trainable({})


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_run_starts_from_other_weights(config: Callable[..., Config], tmp_path: Path, method: str) -> None:
    model = shaken(load_model(config(method=method)))
    name = "adapters.safetensors" if method == "lora" else "model.safetensors"
    mx.save_safetensors(str(tmp_path / name), model.tensors_to_save())
    again = load_model(config(method=method, start_from=str(tmp_path)))
    assert mx.array_equal(again.module(TOKENS), model.module(TOKENS))
    with pytest.raises(ModelLoadFailed, match="start_from"):
        load_model(config(method=method, start_from=str(tmp_path / "nothing")))


@pytest.mark.parametrize("shape", [(2, 5, 64), (7, 64)])
@pytest.mark.parametrize("packed", [False, True])
def test_a_low_rank_sum_in_few_products_is_the_plain_one(shape: tuple[int, ...], packed: bool) -> None:
    linear = nn.Linear(64, 32)
    if packed:
        linear = nn.QuantizedLinear.from_linear(linear, group_size=32, bits=8)
    mx.random.seed(3)
    x, a, b = mx.random.normal(shape), mx.random.normal((64, 4)) / 8, mx.random.normal((4, 32))
    upstream = mx.random.normal((*shape[:-1], 32))

    def plain(x: mx.array, a: mx.array, b: mx.array) -> mx.array:
        return linear(x) + 1.5 * (x @ a) @ b

    def few(x: mx.array, a: mx.array, b: mx.array) -> mx.array:
        return low_rank_sum(linear, x, a, b, 1.5)

    expected, expected_grads = mx.vjp(plain, [x, a, b], [upstream])
    got, grads = mx.vjp(few, [x, a, b], [upstream])
    for ours, theirs in zip([*got, *grads], [*expected, *expected_grads]):
        np.testing.assert_allclose(np.array(ours), np.array(theirs), rtol=2e-5, atol=2e-5)
