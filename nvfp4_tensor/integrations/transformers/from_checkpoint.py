"""from_pretrained of a checkpoint with NVFP4 weights."""

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
from nvfp4_tensor.integrations.transformers.experts import (
    DeserializeExperts,
    missing_joins,
    quantized_origins,
)
from nvfp4_tensor.integrations.transformers.quantizer import NVFP4HfQuantizer, check_complete, parameter_of, with_reason
from nvfp4_tensor.quantization.conv1d import as_linear
from nvfp4_tensor.quantization.experts import is_transposed


class CheckpointQuantizer(NVFP4HfQuantizer):
    """The quantizer of a CheckpointConfig, for all formats."""

    quantization_config: CheckpointConfig

    def __init__(self, quantization_config: CheckpointConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._operation: Deserialize | None = None
        self._origins: dict[str, Origin] = {}
        self._joins: list[WeightConverter] = []

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        if not checkpoint_files:
            raise ValueError("an NVFP4 checkpoint cannot be loaded from a state_dict: pass its folder")
        checkpoint = self.quantization_config.checkpoint_format.read(Path(checkpoint_files[0]).parent)
        self._origins = quantized_origins(model, checkpoint)
        self._joins = missing_joins(model, checkpoint.entries)
        self.weights = set(self._origins)
        for module in [module for path, module in model.named_modules() if f"{path}.weight" in self.weights]:
            as_linear(module)
        stored = {name: origin.names[0] for name, origin in self._origins.items() if origin.is_whole}
        self._operation = Deserialize(self, checkpoint, stored, self.quantization_config.quantize_activations)
        renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
        for name in stored.values():
            for full, key in self.quantization_config.keys_of(name).items():
                self._operation.keys[apply_renamings(full, renamings)] = apply_renamings(name, renamings), key
        # Scales of an FP8 cache belong to no parameter of the model, and transformers' caches do not use them.
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = {*ignored, r"[kv]_proj\.[kv]_scale$"}

    def get_weight_conversions(self) -> list[WeightConverter]:
        """Return the converter to NVFP4 weights, for linears and for experts that are one tensor in the checkpoint."""
        assert self._operation is not None
        return [Tensors(sorted({key for _, key in self._operation.keys.values()}), "weight", [self._operation])]

    def update_weight_conversions(
        self, weight_conversions: list[WeightTransform], model: PreTrainedModel
    ) -> list[WeightTransform]:
        """Let converters that join experts also collect the tensors of NVFP4 weights."""
        conversions = [*weight_conversions, *self._joins]
        return [self._expert_conversion(each) for each in conversions] + self.get_weight_conversions()

    def _expert_conversion(self, conversion: WeightTransform) -> WeightTransform:
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
        # Saving writes plain tensors, so the conversions of NVFP4 weights must not be reverted; others must be.
        kept = [usual for each in conversions for usual in _for_saving(each)]
        model._weight_conversions = [each for each in kept if not any(each is join for join in self._joins)]  # type: ignore
        self._operation, self._joins = None, []
        check_complete(model)


def _for_saving(conversion: WeightTransform) -> list[WeightTransform]:
    operations = getattr(conversion, "operations", ())
    if any(isinstance(operation, Deserialize) for operation in operations):
        return []
    return [next((each.usual for each in operations if isinstance(each, DeserializeExperts)), conversion)]


class Tensors(WeightConverter):
    """Collect the tensors of NVFP4 weights by full name, because suffixes also match names like ``in_proj_weight``."""

    __slots__ = ()

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return (weight name, tensor name), or (source_key, None) for other tensors than those of NVFP4 weights."""
        (operation,) = self.operations
        assert isinstance(operation, Deserialize)
        return operation.keys.get(source_key, (source_key, None))


class Deserialize(ConversionOps):
    """Convert the plain tensors of a weight to an NVFP4Tensor.

    Attributes:
        hf_quantizer: a quantizer; transformers does not cast the inputs of an operation that has one.
        checkpoint: the source of the tensors.
        stored: the names of quantized weights in the checkpoint, by their names in the model.
        activations: whether to quantize activations if the checkpoint does.
        keys: (weight name, tensor name) by the full name of each tensor, after the model's renamings, which run first.
    """

    def __init__(
        self, hf_quantizer: HfQuantizer, checkpoint: FolderCheckpoint, stored: dict[str, str], activations: bool
    ) -> None:
        self.keys: dict[str, tuple[str, str]] = {}
        self.hf_quantizer, self.checkpoint = hf_quantizer, checkpoint
        self.stored, self.activations = stored, activations

    def __deepcopy__(self, memo: dict) -> Deserialize:
        """Return the operation itself: transformers copies it for every weight."""
        return self

    @with_reason
    @torch.no_grad()
    def convert(  # type: ignore[override]  # transformers passes only keyword arguments
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
    """Return the config of a ModelOpt checkpoint whose quantization is described only in hf_quant_config.json.

    Args:
        path: the folder of the checkpoint.
        kwargs: arguments of AutoConfig.from_pretrained.

    Example::

        model = AutoModelForCausalLM.from_pretrained(path, config=nvfp4.config_of(path))

    Raises:
        ValueError: neither config.json nor hf_quant_config.json describes a quantization, or it is not NVFP4.
    """
    config = AutoConfig.from_pretrained(path, **kwargs)
    if getattr(config, "quantization_config", None) is None:
        found = modelopt.FORMAT.quantization(Path(path), {})
        config.quantization_config = {**found, "quant_method": "modelopt"}
    return config
