"""The forms that a checkpoint is exported in: each writes the weights and the config that its tools read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from trainwire_engine.fuse import fuse, split_adapters, unpack_all
from trainwire_engine.loading import load_module
from trainwire_engine.model_files import resolve_folder
from trainwire_engine.tensors import load
from trainwire_protocol.errors import Unsupported

HF_ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
"""Model types whose weights have the same names and meaning in mlx-lm and transformers, with their class there."""

MAX_SHARD_BYTES = 5 << 30
_PACKED_BASE = (
    "The base model is packed in MLX's way, which transformers does not load: the adapter goes onto the model that it"
    " was packed from, where its answers differ a little from those in training. --to hf keeps them."
)


@dataclass(frozen=True)
class Source:
    """A checkpoint as the exporter sees it: `base` is None where it holds a full model of its own."""

    folder: Path
    state: dict[str, Any]
    adapter_config: dict[str, Any] | None

    @property
    def base(self) -> Path:
        """The folder with the base model, or with the full model itself."""
        if self.adapter_config is None:
            return self.folder
        return resolve_folder(self.adapter_config["model"], (self.state.get("config") or {}).get("revision"))

    @property
    def scale(self) -> float:
        """What the adapters' product is multiplied by."""
        assert self.adapter_config is not None
        return float(self.adapter_config["lora_parameters"]["scale"])

    def adapters(self) -> dict[str, mx.array]:
        """The adapter tensors under mlx-lm's names."""
        return load(self.folder / "adapters.safetensors")


def _check_architecture(model_type: str, form: str) -> None:
    if model_type not in HF_ARCHITECTURES:
        known = ", ".join(HF_ARCHITECTURES)
        raise Unsupported(
            f"--to {form} is not offered for {model_type}: that mlx-lm and transformers agree on its weights is"
            f" proved for {known} only (mlx-lm reshapes or drops weights of some others while loading).",
            hint="Use --to mlx.",
        )


def _save_model(out: Path, weights: dict[str, mx.array], metadata_format: str) -> None:
    shards: list[dict[str, mx.array]] = [{}]
    size = 0
    for name, value in weights.items():
        if size and size + value.nbytes > MAX_SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size += value.nbytes
    places = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        mx.save_safetensors(str(out / name), shard, metadata={"format": metadata_format})
        places.update(dict.fromkeys(shard, name))
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(w.nbytes for w in weights.values())}, "weight_map": places}
        _write_json(out / "model.safetensors.index.json", index)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _fused(source: Source, *, unpack: bool) -> tuple[Any, dict[str, Any], str | None]:
    module, config = load_module(source.base)
    note = None
    if source.adapter_config is not None:
        report = fuse(module, source.adapters(), source.scale, unpack=unpack)
        if report.worst_layer is not None:
            note = (
                f"Packing the fused weights again moved them by {report.mean:.1%} of what was trained, on average over"
                f" the layers ({report.worst:.1%} at worst, in {report.worst_layer}). --dequantize keeps all of it."
            )
    if unpack:
        unpack_all(module)
        config = {k: v for k, v in config.items() if k not in ("quantization", "quantization_config")}
    return module, config, note


def to_mlx(source: Source, out: Path, *, dequantize: bool) -> str | None:
    """Write a fused model in mlx-lm's layout; the sentence about what packing lost, if the base is packed."""
    module, config, note = _fused(source, unpack=dequantize)
    _save_model(out, dict(tree_flatten(module.parameters())), "mlx")
    _write_json(out / "config.json", config)
    return note


def to_hf(source: Source, out: Path) -> None:
    """Write a fused model in transformers' layout, unpacked."""
    module, config, _ = _fused(source, unpack=True)
    model_type = str(config["model_type"])
    _check_architecture(model_type, "hf")
    weights = dict(tree_flatten(module.parameters()))
    if config.get("tie_word_embeddings"):
        weights.pop("lm_head.weight", None)
    dtype = str(next(iter(weights.values())).dtype).removeprefix("mlx.core.")
    config = {**config, "architectures": [HF_ARCHITECTURES[model_type]], "torch_dtype": dtype}
    _save_model(out, weights, "pt")
    _write_json(out / "config.json", config)


def to_peft(source: Source, out: Path) -> str | None:
    """Write an adapter that peft loads onto the base model in transformers; a sentence about a base that is packed."""
    adapter = source.adapter_config
    if adapter is None:
        raise Unsupported("A full model has no adapter.", hint="Use --to hf.")
    config = json.loads((source.base / "config.json").read_bytes())
    _check_architecture(str(config["model_type"]), "peft")
    tensors: dict[str, mx.array] = {}
    layers = split_adapters(source.adapters())
    for path, leaves in layers.items():
        if leaves["lora_a"].ndim != 2 or path.endswith("embed_tokens"):
            raise Unsupported(f"--to peft takes adapters on linear layers only, not on {path}.", hint="Use --to hf.")
        name = f"base_model.model.{path}"
        tensors[f"{name}.lora_A.weight"] = mx.contiguous(leaves["lora_a"].T)
        tensors[f"{name}.lora_B.weight"] = mx.contiguous(leaves["lora_b"].T)
        if "m" in leaves:
            tensors[f"{name}.lora_magnitude_vector"] = leaves["m"]
    parameters = adapter["lora_parameters"]
    mx.save_safetensors(str(out / "adapter_model.safetensors"), tensors, metadata={"format": "pt"})
    _write_json(
        out / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": adapter["model"],
            "revision": (source.state.get("config") or {}).get("revision"),
            "r": parameters["rank"],
            "lora_alpha": parameters["scale"] * parameters["rank"],
            "lora_dropout": parameters["dropout"],
            "target_modules": sorted(layers),
            "use_dora": adapter["fine_tune_type"] == "dora",
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
        },
    )
    return _PACKED_BASE if "quantization" in config else None
