"""from_pretrained of a checkpoint with NVFP4 weights; and models that were quantized in memory, as if loaded by it."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, WeightTransform, apply_renamings

from nvfp4_tensor.checkpoints.architectures import CACHE_SCALES
from nvfp4_tensor.checkpoints.checkpoint import read
from nvfp4_tensor.checkpoints.formats import modelopt
from nvfp4_tensor.checkpoints.io.folder import FolderCheckpoint
from nvfp4_tensor.checkpoints.models.loading import read_tensor, slot_of
from nvfp4_tensor.checkpoints.models.origins import Origin, Value, read_pre_scale
from nvfp4_tensor.checkpoints.models.saving import ModelCheckpoint
from nvfp4_tensor.checkpoints.parts import LinearParts
from nvfp4_tensor.integrations.transformers.config import CheckpointConfig
from nvfp4_tensor.integrations.transformers.experts import keep_origin, origins_to_read
from nvfp4_tensor.integrations.transformers.quantizer import NVFP4HfQuantizer, check_complete, parameter_of
from nvfp4_tensor.quantization.conv1d import as_linear
from nvfp4_tensor.quantization.linear import PRE_SCALE, set_pre_scale
from nvfp4_tensor.quantization.names import some
from nvfp4_tensor.tensor.description import CodedTensor
from nvfp4_tensor.tensor.fp8 import FP8Tensor
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor


class CheckpointQuantizer(NVFP4HfQuantizer):
    """The quantizer of a CheckpointConfig, for all formats."""

    quantization_config: CheckpointConfig
    _conversion: NamedTensors | None = None

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        if not checkpoint_files:
            raise ValueError("an NVFP4 checkpoint cannot be loaded from a state_dict: pass its folder")
        checkpoint = read(Path(checkpoint_files[0]).parent, self.quantization_config.quant_method)
        assert isinstance(checkpoint, FolderCheckpoint)
        read_from = {each.name for each in checkpoint.shards.files}
        if unlike := {Path(each).name for each in checkpoint_files} ^ read_from:
            raise ValueError(
                f"{checkpoint.path}: transformers loads {some(sorted(unlike))}, but the folder's model is in "
                f"{some(sorted(read_from))}: a variant of an NVFP4 checkpoint needs a folder of its own"
            )
        origins, names = origins_to_read(model, checkpoint)
        first = {name: checkpoint.entries[each.names[0]] for name, each in origins.items()}
        self.weights = {name for name, entry in first.items() if entry.is_coded}
        self.fp8 = {name for name, entry in first.items() if entry.fp8}
        for module in [module for path, module in model.named_modules() if f"{path}.weight" in self.weights]:
            as_linear(module)
        targets = {key: target for name, target in names.items() for key in checkpoint.keys_of(name)}
        renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
        self._conversion = NamedTensors(self, checkpoint, origins, targets, renamings)
        # Scales of an FP8 cache belong to no parameter of the model, and transformers' caches do not use them. Those of
        # inputs are set with the weights.
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        others = [rf"{re.escape(suffix)}$" for suffix in (*CACHE_SCALES, f".{PRE_SCALE}")]
        model._keys_to_ignore_on_load_unexpected = {*ignored, *others}

    def update_weight_conversions(
        self, weight_conversions: list[WeightTransform], model: PreTrainedModel
    ) -> list[WeightTransform]:
        """Add our converter, as the first: of those that match a tensor, transformers takes one."""
        return [*([self._conversion] if self._conversion else []), *weight_conversions]

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        # Saving writes plain tensors, so ours must not be reverted; others must be.
        conversions: Any = model._weight_conversions
        model._weight_conversions = [each for each in conversions if each is not self._conversion]  # type: ignore
        self._conversion = None
        check_complete(model)


class NamedTensors(WeightConverter):
    """Collect the tensors of each parameter with an origin by their full names, and convert them as :func:`load` does.

    Errors leave from_pretrained as they are; of those in a ConversionOps, transformers says that there were some.
    """

    __slots__ = ("checkpoint", "keys", "origins", "weight_only")

    def __init__(
        self,
        quantizer: CheckpointQuantizer,
        checkpoint: FolderCheckpoint,
        origins: Mapping[str, Origin],
        targets: Mapping[str, str],
        renamings: list[WeightRenaming],
    ) -> None:
        """targets: the parameter of each tensor. The model's renamings run before this converter."""
        operation: Any = SimpleNamespace(hf_quantizer=quantizer)  # with one, transformers does not cast the tensors
        super().__init__("nvfp4_tensor", "weight", [operation])
        self.source_patterns.extend(targets)  # without a regular expression, which could have thousands of branches
        self.keys = {apply_renamings(key, renamings): (target, key) for key, target in targets.items()}
        self.checkpoint, self.origins = checkpoint, origins
        self.weight_only = not quantizer.quantization_config.quantize_activations

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return (parameter, tensor name), or (source_key, None) for other tensors."""
        return self.keys.get(source_key, (source_key, None))

    def __deepcopy__(self, memo: dict) -> NamedTensors:
        """Return a copy without tensors, which shares the names: transformers makes one for every tensor."""
        copied = copy.copy(self)
        copied.collected_tensors, copied.layer_targets = defaultdict(list), defaultdict(set)
        return copied

    @torch.no_grad()
    def convert(self, layer_name: str, model: PreTrainedModel, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the parameter of this name."""
        slot, origin = slot_of(model, layer_name), self.origins[layer_name]
        tensors = {name: collected[0] for name, collected in self.materialize_tensors().items()}

        def decoded(name: str) -> Value:
            value = self.checkpoint.decoded(name, tensors)
            return value.weight_only() if self.weight_only and isinstance(value, LinearParts | FP8Tensor) else value

        weight, origin = read_tensor(slot, origin, self.checkpoint.entries[origin.names[0]], decoded)
        if not isinstance(weight, CodedTensor):
            return {layer_name: weight}
        if not origin.is_whole:
            keep_origin(model, layer_name, origin)
        scale = read_pre_scale(origin, self.checkpoint)
        if scale is not None:
            set_pre_scale(model.get_submodule(layer_name.rpartition(".")[0]), scale.to(weight.device))
        return {layer_name: parameter_of(model, layer_name, weight)}


def attach_quantizer(model: PreTrainedModel) -> PreTrainedModel:
    """Attach a quantizer to a model whose NVFP4 weights were set by ``quantize_``, ``calibrate`` or ``load``.

    Afterwards, ``save_pretrained``, ``dequantize``, peft and Trainer treat it like a model from ``from_pretrained``.

    Returns:
        The model.

    Raises:
        ValueError: the model has no NVFP4 weights.
    """
    checkpoint = ModelCheckpoint(model, {})
    names = {name for name, weight in model.named_parameters() if isinstance(weight, NVFP4Tensor | FP8Tensor)}
    if not names:
        raise ValueError("the model has no NVFP4 weights: call quantize_(model, NVFP4WeightOnlyConfig()) first")
    config = CheckpointConfig(**modelopt.FORMAT.config_of(checkpoint))
    quantizer = CheckpointQuantizer(config, pre_quantized=True)
    quantizer.weights, quantizer.knows_specs = names, True
    attributes: Any = model
    attributes.hf_quantizer = quantizer
    attributes.quantization_method = config.quant_method
    attributes.is_quantized = True
    attributes.config.quantization_config = config
    attributes.config._is_quantized = True
    return model
