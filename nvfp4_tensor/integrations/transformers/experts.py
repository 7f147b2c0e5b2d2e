"""Join the experts of a checkpoint, which has one tensor per expert, to the parameters (E, N, K) of transformers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.quantizers import HfQuantizer

from nvfp4_tensor.checkpoints.checkpoint import Checkpoint
from nvfp4_tensor.checkpoints.io.folder import FolderCheckpoint
from nvfp4_tensor.checkpoints.models.loading import ORIGINS
from nvfp4_tensor.checkpoints.models.origins import Origin, gather, shape_of
from nvfp4_tensor.checkpoints.parts import LinearParts, tensor_of
from nvfp4_tensor.checkpoints.wrappers import View


def origins_in_model(model: PreTrainedModel, names: Iterable[str], checkpoint: Checkpoint) -> dict[str, Origin]:
    """Return the origin of each parameter of the model: the weights among ``names`` that it is made of.

    Raises:
        ValueError: the model joins weights other than by stacking experts and concatenating gate and up.
    """
    names = list(names)
    conversions = [*get_model_conversion_mapping(model), *missing_joins(model, names)]
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    known = model.state_dict()
    parts: dict[str, dict[str | None, list[str]]] = {}
    for name in names:
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        parts.setdefault(target, {}).setdefault(pattern, []).append(name)
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    return {target: _origin(target, found, by_pattern, checkpoint) for target, found in parts.items()}


def missing_joins(model: PreTrainedModel, names: Iterable[str]) -> list[WeightConverter]:
    """Return converters of experts that are one tensor each among ``names``, if transformers has none for the model.

    The files of GraniteMoE, JetMoE and others have one dense tensor for all experts, so transformers joins none.
    ModelOpt's layout, which ``save_pretrained`` writes, has one NVFP4 weight per expert.
    """
    conversions = get_model_conversion_mapping(model)
    if any(isinstance(op, MergeModulelist) for each in conversions for op in getattr(each, "operations", None) or ()):
        return []
    if not any(_EXPERT.search(name) for name in names):
        return []
    gate_up = WeightConverter(
        source_patterns=[".experts.*.gate_proj.weight", ".experts.*.up_proj.weight"],
        target_patterns=".experts.gate_up_proj",
        operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
    )
    down = WeightConverter(
        source_patterns=".experts.*.down_proj.weight",
        target_patterns=".experts.down_proj",
        operations=[MergeModulelist(dim=0)],
    )
    return [gate_up, down]


def check_placed(model: PreTrainedModel, origins: Mapping[str, Origin]) -> None:
    """Raise a ValueError for weights of a checkpoint that belong to a module of the model, but to no parameter of it.

    transformers would leave the parameters of this module at random values, with a warning. Weights of modules that the
    model does not have (an output layer, a vision tower, layers for prediction of several tokens) are left out.
    """
    known = model.state_dict()
    for target in origins.keys() - known.keys():
        path = target
        while path := path.rpartition(".")[0]:
            module = _submodule(model, path)
            if module is None:
                continue
            if any(parameter is not None for parameter in module._parameters.values()):
                raise ValueError(
                    f"{origins[target].names[0]} of the checkpoint belongs to no parameter of {path}, a "
                    f"{type(module).__name__}: its weights would keep random values. Load the dense model"
                )
            break


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _origin(
    target: str,
    found: Mapping[str | None, list[str]],
    converters: Mapping[str, WeightConverter],
    checkpoint: Checkpoint,
) -> Origin:
    if None in found:
        return Origin((tuple(found[None]),))
    converter = converters[next(pattern for pattern in found if pattern is not None)]
    patterns = [pattern for pattern in converter.source_patterns if pattern in found]
    kinds = tuple(type(operation) for operation in converter.operations)
    counts = {len(found[pattern]) for pattern in patterns}
    if kinds not in _STACKED or len(patterns) < len(converter.source_patterns) or len(counts) > 1:
        raise ValueError(
            f"{target} is made of {found} by an operation that NVFP4 weights do not support: load the dense model"
        )
    groups = tuple(zip(*(found[pattern] for pattern in patterns), strict=True))
    rows = tuple(checkpoint.entries[name].shape[0] for name in groups[0])
    origin = Origin(groups, rows, stacked=True)
    shape_of(origin, checkpoint.entries)
    return origin


def keep_origin(model: PreTrainedModel, parameter: str, origin: Origin) -> None:
    """Store the names in files of a parameter's weights, which are used when the model is saved."""
    path, _, name = parameter.rpartition(".")
    module = model.get_submodule(path)
    setattr(module, ORIGINS, {**getattr(module, ORIGINS, {}), name: dataclasses.asdict(origin)})


_EXPERT = re.compile(r"\.experts\.\d+\.(gate|up|down)_proj\.weight$")
_STACKED = ((MergeModulelist,), (MergeModulelist, Concatenate))


class DeserializeExperts(ConversionOps):
    """Convert the plain tensors of a layer's experts to one NVFP4Tensor (E, N, K), and join dense ones as usual.

    Attributes:
        hf_quantizer: a quantizer; transformers does not cast the inputs of an operation that has one.
        checkpoint: the source of the tensors.
        origins: the names of experts in the checkpoint, by parameter of the model.
        activations: whether to quantize activations if the checkpoint does.
        usual: the converter of dense experts.
    """

    def __init__(
        self,
        hf_quantizer: HfQuantizer,
        checkpoint: FolderCheckpoint,
        origins: Mapping[str, Origin],
        activations: bool,
        usual: WeightConverter,
    ) -> None:
        self.hf_quantizer = hf_quantizer
        self.checkpoint = checkpoint
        self.origins = origins
        self.activations = activations
        self.usual = usual

    def __deepcopy__(self, memo: dict) -> DeserializeExperts:
        """Return the operation itself: transformers copies it for every parameter."""
        return self

    def converter(self, suffixes: Iterable[str]) -> WeightConverter:
        """Return the converter that collects all tensors of each weight."""
        sources = [re.sub("weight$", suffix, source) for source in self.usual.source_patterns for suffix in suffixes]
        return self.usual.copy(sources, self.usual._original_target_patterns, operations=[self])

    @torch.no_grad()
    def convert(  # type: ignore[override]  # transformers passes only keyword arguments
        self, input_dict: dict[str, list[Tensor]], *, model: PreTrainedModel, full_layer_name: str, **kwargs: Any
    ) -> dict[str, Any]:
        dtype = model.get_parameter(full_layer_name).dtype
        if full_layer_name not in self.origins:
            return self._as_usual(input_dict, dtype, model=model, full_layer_name=full_layer_name, **kwargs)
        origin = self.origins[full_layer_name]
        value, origin = gather(origin, _Collected(self.checkpoint, self._by_name(origin, input_dict)))
        assert isinstance(value, LinearParts)
        if not self.activations:
            value = value.replace(quantizes_activations=False, input_scale=None)
        keep_origin(model, full_layer_name, origin)
        return {full_layer_name: nn.Parameter(tensor_of(value, dtype), requires_grad=False)}

    def _as_usual(self, collected: dict[str, Any], dtype: torch.dtype, **kwargs: Any) -> dict[str, Any]:
        collected = {source: [tensor.to(dtype) for tensor in tensors] for source, tensors in collected.items()}
        patterns = {"source_patterns": self.usual.source_patterns, "target_patterns": self.usual.target_patterns}
        for operation in self.usual.operations:
            collected = operation.convert(collected, **{**kwargs, **patterns})
        return collected

    def _by_name(self, origin: Origin, collected: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
        """Return the tensors by their names in the checkpoint. Collected tensors are in the order of experts."""
        tensors = {}
        for source, names in zip(self.usual.source_patterns, zip(*origin.groups, strict=True), strict=True):
            stem = source.removesuffix("weight")
            for pattern, each in collected.items():
                key = pattern.removeprefix(stem)
                if pattern.startswith(stem):
                    for name, tensor in zip(names, each, strict=True):
                        tensors[name.removesuffix("weight") + key] = tensor
        return tensors


class _Collected(View):
    """A checkpoint some of whose tensors have already been read."""

    source: FolderCheckpoint

    def __init__(self, source: FolderCheckpoint, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(source)
        self.tensors = tensors

    def linear(self, name: str) -> LinearParts:
        return self.source.decoded(name, self.tensors)
