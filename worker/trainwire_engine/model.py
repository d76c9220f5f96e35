"""A model ready to train: loaded with mlx-lm's architectures, adapters attached or weights unfrozen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from trainwire_engine import adapters, cpu_ops, cpu_weights, pieces, segments
from trainwire_engine.adapting import attach
from trainwire_engine.cuda import install as cuda
from trainwire_engine.cuda import kernels, low_rank, recordings, tensors
from trainwire_engine.fastmath import on_cpu
from trainwire_engine.head import PROBE_TOKENS, Head, find_head
from trainwire_engine.loading import load_module, read_tensors
from trainwire_engine.model_files import resolve_folder
from trainwire_engine.recompute import checkpoint_block
from trainwire_engine.unpacking import unpack_on_use
from trainwire_protocol.errors import ModelLoadFailed, Unsupported

Arrays = dict[str, mx.array]


class Model:
    """A module with its trainable weights kept apart as masters, by default in float32.

    `trainable` maps mlx-lm's flat names to the masters. The forward pass sees them in the dtype the model was
    saved in, on a CPU in float32 if memory allows (`leaf_dtype`); `bind` puts a set of them, cast so, into the
    module, and `module` is always in step with `trainable`.
    """

    def __init__(self, module: nn.Module, model_config: dict[str, Any], folder: Path, config: Any) -> None:
        self._saved_dtype: dict[str, mx.Dtype] = {name: leaf.dtype for name, leaf in tree_flatten(module.parameters())}
        floating = [dtype for dtype in self._saved_dtype.values() if mx.issubdtype(dtype, mx.floating)]
        self._saved_dtype_of_activations = max(set(floating), key=floating.count)
        if on_cpu():
            cpu_ops.install(module)
            cpu_weights.widen(module)
        if on_cpu() or kernels.available():
            unpack_on_use(module)
        cuda.install(module)
        if config.packing:
            segments.install(module, model_config.get("model_type"))
        self._module = module
        self.model_config = model_config
        self.folder = folder
        self.method: str = config.method
        self._adapter_config: dict[str, Any] = {"fine_tune_type": "full"}
        split, self.head_reason, probe = find_head(module)
        self.split: Head | None = split
        self.vocab_size = int(probe.shape[-1])
        self.forward_dtype = probe.dtype
        if config.method == "full":
            if any("scales" in layer for _, layer in module.named_modules()):
                raise Unsupported(
                    f"The model in {folder} is quantized, and packed weights cannot be trained.",
                    hint='Use method = "lora" (QLoRA), or the unquantized model for full fine-tuning.',
                )
            module.unfreeze()
            if on_cpu():
                cpu_weights.train_in_rows(module)
        else:
            _, self._adapter_config = attach(module, config)
            if split is not None:
                # Adapters on the head or its embedding replaced the layers that were found before.
                self.split, self.head_reason, _ = find_head(module)
            if kernels.available():
                # Lazy: nothing is computed.
                tokens = mx.zeros((1, PROBE_TOKENS), mx.int32)
                for count in set(adapters.put_together(module, lambda: module(tokens), low_rank.MOST)):
                    low_rank.begin(self.forward_dtype, count, config.lora_rank)
        if config.gradient_checkpointing:
            for block in module.layers:
                checkpoint_block(block)
        if on_cpu():
            pieces.install(module)
        leaves = {
            name: leaf
            for name, leaf in tree_flatten(module.trainable_parameters())
            if mx.issubdtype(leaf.dtype, mx.floating)
        }
        own = config.method == "full"
        self.leaf_dtype: dict[str, mx.Dtype] = {
            name: leaf.dtype if own or name.endswith(".m") else self.forward_dtype for name, leaf in leaves.items()
        }
        keep = config.trainable_dtype == "model"
        self.replaced = 0
        self._later: Callable[[], Arrays] | None = None
        self.trainable = {
            name: leaf.astype(self._kept_dtype(name) if keep else mx.float32) for name, leaf in leaves.items()
        }
        # A compiled function would compute again whatever it captures unevaluated.
        mx.eval(self.trainable, [list(layer.values()) for _, layer in module.named_modules()])
        self._stale = True
        self.trainable_parameters = sum(leaf.size for leaf in leaves.values())
        self.total_parameters = _count(module)
        self.adapter_layers = list(adapters.adapter_layers(module))

    @property
    def trainable(self) -> Arrays:
        """The masters of the weights that are trained."""
        if self._later is not None:
            self._trainable, self._later = self._later(), None
        return self._trainable

    @trainable.setter
    def trainable(self, params: Arrays) -> None:
        self._trainable, self._later = params, None

    @property
    def head(self) -> str:
        """`chunked` where only trained positions go through the head, `full` where the model resists."""
        return "chunked" if self.split is not None else "full"

    @property
    def module(self) -> nn.Module:
        """The module with the current weights, for evaluation and generation."""
        if self._stale:
            self.bind(self.trainable)
            self._module.eval()
            self._stale = False
        return self._module

    def leaves(self, params: Arrays) -> Arrays:
        """Cast masters to the dtypes that the forward pass computes with."""
        if tensors.usable(params):
            return tensors.cast(params, self.leaf_dtype)
        return {name: value.astype(self.leaf_dtype[name]) for name, value in params.items()}

    def bind(self, params: Arrays) -> nn.Module:
        """Put weights into the module, cast to the forward dtypes; inside a trace they are its tracers."""
        self._module.update(tree_unflatten(list(self.leaves(params).items())))
        return self._module

    def train_mode(self, on: bool) -> None:
        """Switch dropout and the kernels without a gradient; `module` always comes in evaluation mode."""
        self._module.train(on)

    def adopt(self, params: Callable[[], Arrays], *, traced: bool) -> None:
        """Take an update's weights, given when they are asked for; after a trace the module holds tracers, which are
        let go."""
        self._trainable, self._later = {}, params
        self._stale = True
        if traced:
            self.release()

    def release(self) -> None:
        """Drop the module's copies of the trainable weights until `module` is asked for again."""
        empty = mx.zeros(())
        self._module.update(tree_unflatten([(name, empty) for name in self.leaf_dtype]), strict=False)
        self._stale = True

    def set_trainable(self, params: Arrays) -> None:
        """Replace the masters, from a checkpoint or after an update; raises ModelLoadFailed if they do not fit."""
        if params.keys() != self.trainable.keys():
            extra = sorted(params.keys() ^ self.trainable.keys())
            side = "the weights" if extra[0] in params else "the model"
            raise ModelLoadFailed(
                f"The weights do not fit the model's trainable set: only {side} has {extra[0]}"
                f" ({len(params)} weights, {len(self.trainable)} trainable).",
                hint="model, method, lora_rank, lora_layers and lora_keys must be those the weights come from.",
            )
        for name, value in params.items():
            if value.shape != self.trainable[name].shape:
                expected = list(self.trainable[name].shape)
                raise ModelLoadFailed(
                    f"The weight {name} has the shape {list(value.shape)}, the model {expected}.",
                    hint="model and lora_rank must be those the weights come from.",
                )
        self.trainable = {name: params[name].astype(old.dtype) for name, old in self.trainable.items()}
        self.replaced += 1
        self._stale = True

    def adapter_config(self) -> dict[str, Any]:
        """The content of mlx-lm's adapter_config.json, with `lora_alpha` beside its `scale`."""
        return {"model": str(self.folder), **self._adapter_config}

    @contextmanager
    def adapter_disabled(self) -> Iterator[nn.Module]:
        """Compute with the base model inside the block; raises Unsupported after full fine-tuning."""
        if self.method == "full":
            raise Unsupported("Full fine-tuning changes the model itself: there is no base model beside it.")
        layers = self.adapter_layers
        for layer in layers:
            layer.enabled = False
        try:
            yield self.module
        finally:
            for layer in layers:
                layer.enabled = True

    def tensors_to_save(self) -> Arrays:
        """The adapters as they are, or the whole model in its own dtype and mlx-lm's layout."""
        if self.method != "full":
            return dict(self.trainable)
        return {name: leaf.astype(self._saved_dtype[name]) for name, leaf in tree_flatten(self.module.parameters())}

    def exact_masters(self) -> Arrays:
        """The masters that `tensors_to_save` would round: what a resume needs besides it, often nothing."""
        if self.method != "full":
            return {}
        return {name: value for name, value in self.trainable.items() if value.dtype != self._saved_dtype[name]}

    def _kept_dtype(self, name: str) -> mx.Dtype:
        """The dtype the folder's weights have: a weight's own, and for an adapter the one most of them have."""
        return self._saved_dtype.get(name, self._saved_dtype_of_activations)


def load_model(config: Any) -> Model:
    """Load the config's model and prepare it for the config's method.

    Raises ModelLoadFailed for a folder that is missing, broken or of an unknown architecture, Unsupported for a
    method that the model does not take, ConfigInvalid for adapter keys that fit no layer.
    """
    folder = resolve_folder(config.model, config.revision)
    module, model_config = load_module(folder)
    model = Model(module, model_config, folder, config)
    if tensors.usable(model.trainable):
        recordings.rehearse(len(model.trainable), model.forward_dtype)
    if config.start_from:
        start_from(model, Path(config.start_from))
    return model


def start_from(model: Model, source: Path) -> None:
    """Begin from other weights: an adapter's folder or file, or a full model's folder; raises ModelLoadFailed."""
    names = ["adapters.safetensors"] if model.method != "full" else ["model*.safetensors"]
    files = [source] if source.is_file() else sorted(file for name in names for file in source.glob(name))
    if not files:
        raise ModelLoadFailed(
            f"start_from: {source} has no {names[0]}.",
            hint="Give the folder of a checkpoint or an adapter that was trained with the same method.",
            path=str(source),
        )
    weights: Arrays = {}
    try:
        for file in files:
            weights |= read_tensors(file)
    except Exception as error:
        raise ModelLoadFailed(f"start_from: {files[0]} cannot be read: {error}", path=str(files[0])) from error
    if model.method == "full":
        weights = {name: value for name, value in weights.items() if name in model.trainable}
    model.set_trainable(weights)


def _count(module: nn.Module) -> int:
    """Parameters as they count before packing."""
    total = 0
    for _, layer in module.named_modules():
        own = {name: value for name, value in layer.items() if isinstance(value, mx.array) and name[0] != "_"}
        if "scales" in own:
            total += own["weight"].size * 32 // layer.bits
            total += own["bias"].size if "bias" in own else 0
        else:
            total += sum(value.size for value in own.values())
    return total
