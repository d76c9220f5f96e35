"""From a model folder to a module with weights, without mlx-lm's three seconds of imports where possible.

`import mlx_lm` pulls in transformers; the architectures in `mlx_lm.models` need none of it. They are imported
under a bare stand-in for the package, which is taken away again, so that a later `import mlx_lm` is complete.
Whatever the short way does not cover (custom code, foreign quantization formats) goes to
`mlx_lm.utils.load_model`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from trainwire_engine.model_files import first_line, read_config
from trainwire_protocol.errors import EngineUnavailable, ModelLoadFailed, TrainwireError


class _LongWay(Exception):
    """The folder needs more of mlx-lm than its architectures."""


def load_module(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """Build the folder's architecture and load its weights; returns the module and its config.

    Raises ModelLoadFailed for a folder that is broken or of an architecture that mlx-lm does not have.
    """
    config = read_config(folder)
    weight_files = sorted(folder.glob("model*.safetensors"))
    if not weight_files:
        raise ModelLoadFailed(
            f"The model folder {folder} has no model*.safetensors file.",
            hint="Weights in another format are converted with `mlx_lm.convert`.",
            path=str(folder),
        )
    try:
        try:
            return _load_short(config, weight_files), config
        except _LongWay:
            from mlx_lm.utils import load_model

            module, config = load_model(folder)
            return module, config
    except TrainwireError:
        raise
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] in ("mlx_lm", "transformers"):
            raise EngineUnavailable(f"The Python package {error.name.split('.')[0]} is not installed.") from error
        raise _broken(folder, error) from error
    except (Exception, SystemExit) as error:
        raise _broken(folder, error) from error


def _load_short(config: dict[str, Any], weight_files: list[Path]) -> nn.Module:
    quantization = config.get("quantization")
    if (
        config.get("model_file")
        or config.get("quantize_activations")
        or "quantization_config" in config.get("text_config", {})
    ):
        raise _LongWay
    if quantization is None and (
        "quantization_config" in config or (weight_files[0].parent / "hf_quant_config.json").exists()
    ):
        raise _LongWay
    weights: dict[str, mx.array] = {}
    for file in weight_files:
        weights |= read_tensors(file)
    module = build_module(config)
    if hasattr(module, "sanitize"):
        weights = module.sanitize(weights)
    if quantization is not None:
        _quantize(module, quantization, weights)
    module.eval()
    module.load_weights(list(weights.items()), strict=True)
    # Files are read now, so that a cut one is found here, and compiled functions hold values, not reads.
    mx.eval(module.parameters())
    return module


def read_tensors(file: Path) -> dict[str, mx.array]:
    """Open a safetensors file; its arrays are read when they are first used."""
    tensors = mx.load(str(file))
    assert isinstance(tensors, dict)
    return tensors


def build_module(config: dict[str, Any]) -> nn.Module:
    """Build the architecture that a config names, with random weights that are not computed until used."""
    architecture = _architecture(config)
    module: nn.Module = architecture.Model(architecture.ModelArgs.from_dict(config))
    return module


def _architecture(config: dict[str, Any]) -> types.ModuleType:
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("mlx_lm is not installed", name="mlx_lm")
    root = Path(spec.submodule_search_locations[0])
    model_type = _remapped(config, root / "utils.py")
    if not (root / "models" / f"{model_type}.py").is_file():
        raise ModelLoadFailed(
            f"mlx-lm has no architecture for the model type {config['model_type']!r}.",
            hint="A newer mlx-lm may have it: pip install -U mlx-lm.",
            model_type=config["model_type"],
        )
    with _bare_package(spec):
        return importlib.import_module(f"mlx_lm.models.{model_type}")


def _remapped(config: dict[str, Any], utils: Path) -> str:
    """Follow mlx-lm's own tables from a model type to the module that implements it, read from its source."""
    tables: dict[str, Any] = {"MODEL_REMAPPING": {}, "MODEL_ARCHITECTURE_REMAPPING": {}}
    for node in ast.parse(utils.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in tables:
            tables[node.targets[0].id] = ast.literal_eval(node.value)
    model_type: str = config["model_type"]
    architectures = config.get("architectures") or ()
    for architecture in (architectures,) if isinstance(architectures, str) else architectures:
        if (model_type, architecture) in tables["MODEL_ARCHITECTURE_REMAPPING"]:
            return str(tables["MODEL_ARCHITECTURE_REMAPPING"][model_type, architecture])
    return str(tables["MODEL_REMAPPING"].get(model_type, model_type))


@contextmanager
def _bare_package(spec: Any) -> Iterator[None]:
    """Let submodules of mlx_lm be imported without running the package's own __init__."""
    if "mlx_lm" in sys.modules:
        yield
        return
    package = types.ModuleType("mlx_lm")
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    sys.modules["mlx_lm"] = package
    try:
        yield
    finally:
        del sys.modules["mlx_lm"]


def _quantize(module: nn.Module, quantization: dict[str, Any], weights: dict[str, mx.array]) -> None:
    """Replace the layers whose weights come packed; each one's bits and group follow from its shapes."""

    def layout(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        if path in quantization:
            named: bool | dict[str, Any] = quantization[path]
            return named
        scales = weights.get(f"{path}.scales")
        if scales is None or not hasattr(layer, "to_quantized"):
            return False
        if scales.dtype == mx.uint8 or f"{path}.global_scale" in weights:
            raise _LongWay
        width = layer.weight.shape[-1]
        return {
            "group_size": width // scales.shape[-1],
            "bits": weights[f"{path}.weight"].shape[-1] * 32 // width,
            "mode": "affine",
        }

    nn.quantize(
        module,
        group_size=quantization["group_size"],
        bits=quantization["bits"],
        mode=quantization.get("mode", "affine"),
        class_predicate=layout,
    )


def _broken(folder: Path, error: BaseException) -> ModelLoadFailed:
    return ModelLoadFailed(
        f"The model in {folder} could not be loaded: {first_line(error)}",
        hint="The weights do not fit config.json, or a file is cut off: fetch or convert the model again.",
        path=str(folder),
    )
