"""from_pretrained of a dense model that is quantized to NVFP4 weight by weight."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.logging import is_progress_bar_enabled

from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.checkpoints.formats.dense import FORMAT as DENSE
from nvfp4_tensor.checkpoints.formats.table import entries_of
from nvfp4_tensor.checkpoints.io.safetensors import Shards
from nvfp4_tensor.checkpoints.models.origins import origins_in_model
from nvfp4_tensor.checkpoints.understood import check_understood
from nvfp4_tensor.integrations.transformers.config import NVFP4TensorConfig
from nvfp4_tensor.integrations.transformers.experts import keep_origin
from nvfp4_tensor.integrations.transformers.quantizer import NVFP4HfQuantizer, check_complete, parameter_of
from nvfp4_tensor.numerics.layout import BLOCK
from nvfp4_tensor.quantization.conv1d import as_linear, was_conv1d
from nvfp4_tensor.quantization.model_plan import Matrix, ModelPlan
from nvfp4_tensor.quantization.names import joined_with
from nvfp4_tensor.quantization.weights import WeightRef, shared_amax
from nvfp4_tensor.quantization.whole_model import matrices_of, plan_model, without_experts


class WhileLoadingQuantizer(NVFP4HfQuantizer):
    """The quantizer of an NVFP4TensorConfig."""

    quantization_config: NVFP4TensorConfig

    def __init__(self, quantization_config: NVFP4TensorConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._waiting: dict[str, Tensor] = {}
        self._tied: tuple[str, ...] = ()

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Check the environment, and raise a ValueError if config.json has the settings of an NVFP4TensorConfig."""
        super().validate_environment(*args, **kwargs)
        if self.pre_quantized:
            raise ValueError(
                "config.json has the settings of an NVFP4TensorConfig, which apply to dense weights, not to quantized "
                "ones: save the model with model.save_pretrained, or delete quantization_config from config.json"
            )

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        plan = plan_of(model, self.quantization_config, model.all_tied_weights_keys)
        self.weights = {name for name in plan.quantized if plan[name].shape[-1] % BLOCK == 0}
        if self.quantization_config.quantize_lm_head:
            self._select_head(model)
        files = [Path(file) for file in checkpoint_files or () if str(file).endswith(".safetensors")]
        if files:
            check_understood(dict(each for file in files for each in entries_of(Shards(file)).items()), files[0].parent)
        for name in self.weights:
            as_linear(model.get_submodule(name.rpartition(".")[0]))
        if checkpoint_files and any(len(plan[name].shape) == 3 for name in self.weights & plan.keys()):
            self._keep_expert_names(model, checkpoint_files[0])

    def _select_head(self, model: PreTrainedModel) -> None:
        """Select the output layer. If it shares the embedding's weight, it gets its own."""
        head = name_of_head(model)
        self.weights.add(head)
        embedding = model.all_tied_weights_keys.pop(head, None)
        if embedding is not None:
            self._tied = (head, embedding)
            for config in (model.config, model.config.get_text_config()):
                config.tie_word_embeddings = False

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Return whether a parameter becomes NVFP4, or is tied to a quantized output layer."""
        return param_name in self.weights or param_name in self._tied

    def _keep_expert_names(self, model: PreTrainedModel, file: str) -> None:
        """Store the names of experts in the files, under which they are saved again."""
        if not file.endswith(".safetensors"):
            return
        with DENSE.read(Path(file).parent) as checkpoint:
            weights = {name: t for name, t in model.named_parameters() if name in self.weights and t.dim() == 3}
            for parameter, origin in origins_in_model(model, weights, checkpoint.entries).items():
                if not origin.is_whole:
                    keep_origin(model, parameter, origin)

    def get_quantize_ops(self) -> ConversionOps:
        """Return the operation that quantizes a dense weight of the checkpoint."""
        return Quantize(self.quantization_config, self.weights, self._waiting, self._tied)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if self._waiting:
            present = sorted(self._waiting)
            absent = sorted({name for each in present for name in joined_with(each, self.weights)} - {*present})
            raise RuntimeError(
                f"the checkpoint has {', '.join(present)}, but not {', '.join(absent)}: it is incomplete, download it "
                "again"
            )
        check_complete(model)


def plan_of(model: nn.Module, config: NVFP4TensorConfig, ties: Mapping[str, str]) -> ModelPlan:
    """Plan what a config quantizes in a model without values, and print what stays dense.

    ties: as in :func:`matrices_of`.
    """
    chosen, matrices, selected = config.modules_to_not_convert, matrices_of(model, ties), None
    if config.config.experts is False:
        matrices = without_experts(matrices, "experts=False")
    if chosen is not None:
        _check_patterns(model, matrices, chosen)
        selected = lambda name: should_convert_module(name.removesuffix(".weight"), chosen)  # noqa: E731
    plan = plan_model(model, matrices=matrices, selected=selected)
    if is_progress_bar_enabled() and (dense := plan.left_dense()):
        print(dense, file=sys.stderr)
    return plan


class _Failed(dict[str, Any]):
    """What a conversion that failed returns. Reading it raises the error, which then leaves from_pretrained."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def items(self) -> Any:
        raise self.error


class Quantize(ConversionOps):
    """Quantize dense weights while they are loaded. Weights that servers fuse wait until all of their group are loaded.

    At most one group is dense at a time, for instance q, k and v of one layer.

    Attributes:
        config: the config of the model.
        names: the parameters to quantize.
        waiting: dense weights whose group is incomplete, by name.
        tied: the names of the output layer's and the embedding's weight, if the file has one weight for both.
    """

    def __init__(
        self, config: NVFP4TensorConfig, names: set[str], waiting: dict[str, Tensor], tied: tuple[str, ...] = ()
    ) -> None:
        self.config, self.names, self.waiting, self.tied = config, names, waiting, tied

    @torch.no_grad()
    def convert(  # type: ignore[override]  # transformers passes only keyword arguments
        self, input_dict: dict[str, Any], *, model: PreTrainedModel, full_layer_name: str, **kwargs: Any
    ) -> dict[str, Tensor]:
        if len(input_dict) == 1:  # of any name
            input_dict = {full_layer_name: next(iter(input_dict.values()))}
        loaded: dict[str, Tensor] = {}
        try:
            for name, value in input_dict.items():  # several if the file has them in one tensor, such as q, k and v
                loaded |= self.load(model, name, value[0] if isinstance(value, list) else value)
        except Exception as error:  # transformers would log it, and raise a RuntimeError without the reason
            return _Failed(error)
        return loaded

    def load(self, model: nn.Module, name: str, value: Tensor) -> dict[str, Tensor]:
        """Return the parameters that are complete with this one."""
        if name in self.tied:
            head, embedding = self.tied
            return {embedding: value, **self._quantized(model, {head: value})}
        if name not in self.names:
            return {name: value}
        module = model.get_submodule(name.rpartition(".")[0])
        self.waiting[name] = value.t().contiguous() if was_conv1d(module) else value
        group = joined_with(name, self.names) if self.config.share_scales else (name,)
        if not self.waiting.keys() >= set(group):
            return {}
        return self._quantized(model, {each: self.waiting.pop(each) for each in group})

    def _quantized(self, model: nn.Module, group: dict[str, Tensor]) -> dict[str, Tensor]:
        """Quantize weights with their common amax. Each expert has its own amax, common to its gate and up."""
        config, amax = self.config.config, None
        quantized: dict[str, Tensor] = {}
        if all(weight.dim() == 2 for weight in group.values()):
            amax = shared_amax(group.values(), config.weight)
        for name, dense in group.items():
            path, _, attribute = name.rpartition(".")
            weight = WeightRef(name, model.get_submodule(path), attribute, dense)
            quantized[name] = parameter_of(model, name, weight.quantized(config, amax=amax))
        return quantized


def name_of_head(model: PreTrainedModel) -> str:
    """Return the name of the output layer's weight.

    Raises:
        ValueError: the model has no output layer, or one that cannot be quantized.
    """
    head = model.get_output_embeddings()
    for path, module in model.named_modules():
        if module is head and type(module) is nn.Linear and module.in_features % BLOCK == 0:
            return f"{path}.weight"
    raise ValueError(
        f"quantize_lm_head=True quantizes an output layer, an nn.Linear whose inputs are a multiple of {BLOCK}: "
        f"{type(model).__name__} has {head}"
    )


def _check_patterns(model: nn.Module, matrices: Sequence[Matrix], patterns: Iterable[str]) -> None:
    """Warn of each pattern of modules_to_not_convert that leaves nothing dense."""
    names = [*(name for name, _ in model.named_modules()), *(each.name.removesuffix(".weight") for each in matrices)]
    for pattern in patterns:
        if all(should_convert_module(name, [pattern]) for name in names):
            warn_user(f"modules_to_not_convert: {pattern!r} matches no module of {type(model).__name__}")
