"""from_pretrained of a checkpoint with NVFP4 weights; and models that were quantized in memory, as if loaded by it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    apply_renamings,
)

from nvfp4_tensor.checkpoints.architectures import CACHE_SCALES
from nvfp4_tensor.checkpoints.formats import modelopt
from nvfp4_tensor.checkpoints.io.folder import FolderCheckpoint
from nvfp4_tensor.checkpoints.models.origins import Origin, gather, read_pre_scale
from nvfp4_tensor.checkpoints.models.saving import ModelCheckpoint
from nvfp4_tensor.checkpoints.parts import LinearParts, tensor_of
from nvfp4_tensor.checkpoints.wrappers import View
from nvfp4_tensor.integrations.transformers.config import CheckpointConfig, ModelOptConfig
from nvfp4_tensor.integrations.transformers.experts import keep_origin, missing_joins, quantized_origins
from nvfp4_tensor.integrations.transformers.quantizer import NVFP4HfQuantizer, check_complete, parameter_of, with_reason
from nvfp4_tensor.quantization.conv1d import as_linear
from nvfp4_tensor.quantization.experts import is_transposed
from nvfp4_tensor.quantization.linear import PRE_SCALE, set_pre_scale
from nvfp4_tensor.tensor.fp8 import FP8Tensor
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor


class CheckpointQuantizer(NVFP4HfQuantizer):
    """The quantizer of a CheckpointConfig, for all formats.

    Attributes:
        origins: by NVFP4 parameter, the weights of the checkpoint that it is made of.
    """

    quantization_config: CheckpointConfig

    def __init__(self, quantization_config: CheckpointConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._operation: Deserialize | None = None
        self.origins: dict[str, Origin] = {}
        self._joins: list[WeightConverter] = []
        self._pre_scales: dict[str, Tensor | None] = {}

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        if not checkpoint_files:
            raise ValueError("an NVFP4 checkpoint cannot be loaded from a state_dict: pass its folder")
        checkpoint = self.quantization_config.checkpoint_format.read(Path(checkpoint_files[0]).parent)
        self.origins = quantized_origins(model, checkpoint)
        self._joins = missing_joins(model, checkpoint.entries)
        self.weights = set(self.origins)
        self.fp8 = {name for name, each in self.origins.items() if checkpoint.entries[each.names[0]].fp8}
        for module in [module for path, module in model.named_modules() if f"{path}.weight" in self.weights]:
            as_linear(module)
        with torch.device("cpu"):  # transformers makes models on the meta device
            self._pre_scales = {name: read_pre_scale(origin, checkpoint) for name, origin in self.origins.items()}
        self._operation = Deserialize(self, checkpoint)
        renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
        for name in [origin.names[0] for origin in self.origins.values() if origin.is_whole]:
            for full, key in self.quantization_config.keys_of(name).items():
                self._operation.keys[apply_renamings(full, renamings)] = apply_renamings(name, renamings), key
        # Scales of an FP8 cache belong to no parameter of the model, and transformers' caches do not use them. Those of
        # inputs are set at the end.
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        others = [rf"{re.escape(suffix)}$" for suffix in (*CACHE_SCALES, f".{PRE_SCALE}")]
        model._keys_to_ignore_on_load_unexpected = {*ignored, *others}

    def get_weight_conversions(self) -> list[WeightConverter]:
        """Return the converter to NVFP4 weights, for linears and for experts that are one tensor in the checkpoint."""
        assert self._operation is not None
        return [Tensors(sorted({key for _, key in self._operation.keys.values()}), "weight", [self._operation])]

    def update_weight_conversions(
        self, weight_conversions: list[WeightTransform], model: PreTrainedModel
    ) -> list[WeightTransform]:
        """Let converters that join weights also collect the tensors of NVFP4 weights."""
        conversions = [*weight_conversions, *self._joins]
        if not all(origin.is_whole for origin in self.origins.values()):
            conversions = [self._with_tensors(each) for each in conversions]
        return [*conversions, *self.get_weight_conversions()]

    def _with_tensors(self, usual: WeightTransform) -> WeightTransform:
        if not isinstance(usual, WeightConverter) or not all(each.endswith("weight") for each in usual.source_patterns):
            return usual
        assert self._operation is not None
        suffixes = self.quantization_config.tensor_names
        sources = [re.sub("weight$", suffix, source) for source in usual.source_patterns for suffix in suffixes]
        operation = Deserialize(self, self._operation.checkpoint, usual)
        return usual.copy(sources, usual._original_target_patterns, operations=[operation])

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        conversions: Any = model._weight_conversions
        # Saving writes plain tensors, so the conversions of NVFP4 weights must not be reverted; others must be.
        kept = [usual for each in conversions for usual in _for_saving(each)]
        model._weight_conversions = [each for each in kept if not any(each is join for join in self._joins)]  # type: ignore
        self._operation, self._joins = None, []
        for name, scale in self._pre_scales.items():
            if scale is not None:
                linear = model.get_submodule(name.rpartition(".")[0])
                device: Any = linear.weight.device
                set_pre_scale(linear, scale if device.type == "meta" else scale.to(device))
        self._pre_scales = {}
        check_complete(model)


def _for_saving(conversion: WeightTransform) -> list[WeightTransform]:
    ours = [each for each in getattr(conversion, "operations", ()) if isinstance(each, Deserialize)]
    return [each.usual for each in ours if each.usual is not None] if ours else [conversion]


class Tensors(WeightConverter):
    """Collect the tensors of NVFP4 weights by full name, because suffixes also match names like ``in_proj_weight``."""

    __slots__ = ()

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return (weight name, tensor name), or (source_key, None) for other tensors than those of NVFP4 weights."""
        (operation,) = self.operations
        assert isinstance(operation, Deserialize)
        return operation.keys.get(source_key, (source_key, None))


class Deserialize(ConversionOps):
    """Convert the plain tensors of a weight, or of those that are joined to a parameter, to an NVFP4Tensor.

    Attributes:
        hf_quantizer: the quantizer; transformers does not cast the inputs of an operation that has one.
        checkpoint: the source of the tensors.
        usual: the converter that joins dense weights to such a parameter; None for weights that are not joined.
        keys: (weight name, tensor name) by the full name of each tensor, after the model's renamings, which run first.
    """

    def __init__(
        self, hf_quantizer: CheckpointQuantizer, checkpoint: FolderCheckpoint, usual: WeightConverter | None = None
    ) -> None:
        self.hf_quantizer, self.checkpoint, self.usual = hf_quantizer, checkpoint, usual
        self.keys: dict[str, tuple[str, str]] = {}

    def __deepcopy__(self, memo: dict) -> Deserialize:
        """Return the operation itself: transformers copies it for every weight."""
        return self

    @with_reason
    @torch.no_grad()
    def convert(  # type: ignore[override]  # transformers passes only keyword arguments
        self, input_dict: dict[str, list[Tensor]], *, model: PreTrainedModel, full_layer_name: str, **kwargs: Any
    ) -> dict[str, Any]:
        dtype = model.get_parameter(full_layer_name).dtype
        if full_layer_name not in self.hf_quantizer.origins:
            return self._as_usual(input_dict, dtype, model=model, full_layer_name=full_layer_name, **kwargs)
        origin = self.hf_quantizer.origins[full_layer_name]
        parts, origin = gather(origin, _Collected(self.checkpoint, self._by_name(origin, input_dict)))
        assert isinstance(parts, LinearParts | FP8Tensor)
        if not self.hf_quantizer.quantization_config.quantize_activations:
            parts = parts.weight_only()
        weight: Tensor = parts.to(dtype) if isinstance(parts, FP8Tensor) else tensor_of(parts, dtype)
        if is_transposed(model.get_submodule(full_layer_name.rpartition(".")[0])):
            weight = weight.transpose(-2, -1)
        if not origin.is_whole:
            keep_origin(model, full_layer_name, origin)
        return {full_layer_name: parameter_of(model, full_layer_name, weight)}

    def _as_usual(self, collected: dict[str, Any], dtype: torch.dtype, **kwargs: Any) -> dict[str, Any]:
        assert self.usual is not None
        collected = {source: [tensor.to(dtype) for tensor in tensors] for source, tensors in collected.items()}
        patterns = {"source_patterns": self.usual.source_patterns, "target_patterns": self.usual.target_patterns}
        for operation in self.usual.operations:
            collected = operation.convert(collected, **{**kwargs, **patterns})
        return collected

    def _by_name(self, origin: Origin, collected: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
        """Return the tensors by their names in the checkpoint. Collected tensors are in the order of experts."""
        if self.usual is None:
            path = origin.names[0][: origin.names[0].rfind(".") + 1]
            return {f"{path}{key}": tensors[0] for key, tensors in collected.items()}
        found: dict[str, Tensor] = {}
        for source, names in zip(self.usual.source_patterns, zip(*origin.groups, strict=True), strict=True):
            stem = source.removesuffix("weight")
            for pattern, tensors in collected.items():
                if pattern.startswith(stem):
                    key = pattern.removeprefix(stem)
                    found |= {n.removesuffix("weight") + key: t for n, t in zip(names, tensors, strict=True)}
        return found


class _Collected(View):
    """A checkpoint some of whose tensors have already been read."""

    source: FolderCheckpoint

    def __init__(self, source: FolderCheckpoint, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(source)
        self.tensors = tensors

    def linear(self, name: str) -> LinearParts:
        return self.source.decoded(name, self.tensors)

    def fp8(self, name: str) -> FP8Tensor:
        return self.source.decoded_fp8(name, self.tensors)


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
    config = ModelOptConfig(**modelopt.flat_config(checkpoint))
    quantizer = CheckpointQuantizer(config, pre_quantized=True)
    quantizer.weights, quantizer.knows_specs = names, True
    attributes: Any = model
    attributes.hf_quantizer = quantizer
    attributes.quantization_method = config.quant_method
    attributes.is_quantized = True
    attributes.config.quantization_config = config
    attributes.config._is_quantized = True
    return model
