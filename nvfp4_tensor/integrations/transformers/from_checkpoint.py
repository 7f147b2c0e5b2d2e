"""from_pretrained of a checkpoint whose weights are NVFP4 already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    apply_renamings,
)
from transformers.quantizers import HfQuantizer

from nvfp4_tensor.checkpoints.formats import modelopt
from nvfp4_tensor.checkpoints.io.folder import FolderCheckpoint
from nvfp4_tensor.checkpoints.models.origins import Origin
from nvfp4_tensor.checkpoints.parts import tensor_of
from nvfp4_tensor.integrations.transformers.config import CheckpointConfig
from nvfp4_tensor.integrations.transformers.experts import DeserializeExperts, origins_in_model
from nvfp4_tensor.integrations.transformers.quantizer import NVFP4HfQuantizer, parameter_of
from nvfp4_tensor.quantization.experts import is_transposed


class CheckpointQuantizer(NVFP4HfQuantizer):
    """That of a CheckpointConfig, whatever the format."""

    quantization_config: CheckpointConfig

    def __init__(self, quantization_config: CheckpointConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._operation: Deserialize | None = None
        self._origins: dict[str, Origin] = {}

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        if not checkpoint_files:
            raise ValueError("an NVFP4 checkpoint is loaded from its folder, not from a state_dict")
        checkpoint = self.quantization_config.checkpoint_format.read(Path(checkpoint_files[0]).parent)
        quantized = [name for name, entry in checkpoint.entries.items() if entry.quantized]
        self._origins = origins_in_model(model, quantized, checkpoint)
        self.weights = set(self._origins)
        stored = {name: origin.names[0] for name, origin in self._origins.items() if origin.is_whole}
        self._operation = Deserialize(self, checkpoint, stored, self.quantization_config.quantize_activations)
        renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
        for name in stored.values():
            for full, key in self.quantization_config.keys_of(name).items():
                self._operation.keys[apply_renamings(full, renamings)] = apply_renamings(name, renamings), key
        # An FP8 cache's scales, which belong to no parameter of the model, and which transformers' caches do not use.
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = {*ignored, r"[kv]_proj\.[kv]_scale$"}

    def get_weight_conversions(self) -> list[WeightConverter]:
        """What makes NVFP4 weights of a checkpoint's tensors: of experts that are one tensor there, and of linears."""
        assert self._operation is not None
        return [Tensors(sorted({key for _, key in self._operation.keys.values()}), "weight", [self._operation])]

    def update_weight_conversions(
        self, weight_conversions: list[WeightTransform], model: PreTrainedModel
    ) -> list[WeightTransform]:
        """Converters that join experts collect the tensors of NVFP4 weights too."""
        return [self._of_experts(each) for each in weight_conversions] + self.get_weight_conversions()

    def _of_experts(self, conversion: WeightTransform) -> WeightTransform:
        stacked = any(not origin.is_whole for origin in self._origins.values())
        sources = conversion.source_patterns
        if not (
            stacked and isinstance(conversion, WeightConverter) and all(each.endswith("weight") for each in sources)
        ):
            return conversion
        assert self._operation is not None
        activations = self.quantization_config.quantize_activations
        operation = DeserializeExperts(self, self._operation.checkpoint, self._origins, activations, conversion)
        return operation.converter(self.quantization_config.tensor_names)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        conversions: Any = model._weight_conversions
        # What is saved has plain tensors already, whose names nothing has to take apart again; but dense experts do.
        model._weight_conversions = [kept for each in conversions for kept in _for_saving(each)]  # type: ignore
        self._operation = None


def _for_saving(conversion: WeightTransform) -> list[WeightTransform]:
    operations = getattr(conversion, "operations", ())
    if any(isinstance(operation, Deserialize) for operation in operations):
        return []
    return [next((each.usual for each in operations if isinstance(each, DeserializeExperts)), conversion)]


class Tensors(WeightConverter):
    """Collects the tensors of NVFP4 weights by their full names: a dense parameter may be called ``in_proj_weight``."""

    __slots__ = ()

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """(the weight's name, the tensor's own); the key as it is, and None, for a tensor of no NVFP4 weight."""
        (operation,) = self.operations
        assert isinstance(operation, Deserialize)
        return operation.keys.get(source_key, (source_key, None))


class Deserialize(ConversionOps):
    """The plain tensors of a weight become an NVFP4Tensor.

    Attributes:
        hf_quantizer: transformers casts nothing on its way to an operation that has one.
        checkpoint: where the tensors come from.
        stored: the quantized weights' names there, by those in the model.
        activations: whether they are quantized where the checkpoint says so.
        keys: by the name of each of their tensors: the weight's name, and the tensor's own. Both as the model's other
            conversions leave them, which come first.
    """

    def __init__(
        self, hf_quantizer: HfQuantizer, checkpoint: FolderCheckpoint, stored: dict[str, str], activations: bool
    ) -> None:
        self.keys: dict[str, tuple[str, str]] = {}
        self.hf_quantizer, self.checkpoint, self.stored, self.activations = (
            hf_quantizer,
            checkpoint,
            stored,
            activations,
        )

    def __deepcopy__(self, memo: dict) -> Deserialize:
        """Itself: transformers copies the operation for every weight."""
        return self

    @torch.no_grad()
    def convert(  # type: ignore[override]  # all that transformers hands over comes by name
        self, input_dict: dict[str, list[Tensor]], *, model: PreTrainedModel, full_layer_name: str, **kwargs: Any
    ) -> dict[str, Tensor]:
        module, _, name = full_layer_name.rpartition(".")
        holder = model.get_submodule(module)
        dtype = getattr(holder, name).dtype
        stored = self.stored[full_layer_name]
        prefix = stored[: stored.rfind(".") + 1]
        tensors = {f"{prefix}{key}": tensors[0] for key, tensors in input_dict.items()}
        weight = tensor_of(self.checkpoint.decoded(stored, tensors), dtype)
        if is_transposed(holder):
            weight = weight.transpose(-2, -1)
        if not self.activations:
            weight = weight._replace(activation_spec=None, activation_amax=None)
        return {full_layer_name: parameter_of(model, full_layer_name, weight)}


def config_of(path: str | Path, **kwargs: Any) -> PretrainedConfig:
    """The config of a checkpoint of ModelOpt whose config.json says nothing of NVFP4, but hf_quant_config.json does.

    Args:
        path: a folder.
        kwargs: of AutoConfig.from_pretrained.

    Example::

        model = AutoModelForCausalLM.from_pretrained(path, config=nvfp4.config_of(path))

    Raises:
        ValueError: neither says it, or it is no NVFP4.
    """
    config = AutoConfig.from_pretrained(path, **kwargs)
    if getattr(config, "quantization_config", None) is None:
        found = modelopt.FORMAT.quantization(Path(path), {})
        config.quantization_config = {**found, "quant_method": "modelopt"}
    return config
