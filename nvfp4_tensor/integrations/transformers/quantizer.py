"""The HfQuantizer of models with NVFP4 weights, the common base for loading checkpoints and quantizing."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer

from nvfp4_tensor.checkpoints.names import some
from nvfp4_tensor.integrations.transformers.config import CheckpointConfig, NVFP4TensorConfig
from nvfp4_tensor.integrations.transformers.saving import keep_names, plain_state_dict
from nvfp4_tensor.quantization.experts import is_transposed
from nvfp4_tensor.quantization.linear import PRE_SCALE, linear_of_codes, linear_of_values, pre_scaled, set_pre_scale
from nvfp4_tensor.tensor.description import CodedTensor
from nvfp4_tensor.tensor.nvfp4 import quantize


class NVFP4HfQuantizer(HfQuantizer):
    """Report stored sizes to transformers, reject unsupported options, and save in ModelOpt's layout.

    Attributes:
        weights: names of the parameters that are NVFP4 or FP8, or become so when loaded.
        fp8: names of those that become FP8.
        knows_specs: whether the weights have the specs of their quantization. Files do not store complete specs.
        weight_only: whether saving omits the quantization of activations.
    """

    requires_calibration = False
    quantization_config: NVFP4TensorConfig | CheckpointConfig

    def __init__(self, quantization_config: NVFP4TensorConfig | CheckpointConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.weights: set[str] = set()
        self.fp8: set[str] = set()
        self.knows_specs = not self.pre_quantized
        self.weight_only = False

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raise a ValueError for weights offloaded to disk, and inside accelerate.init_empty_weights()."""
        if _registers_on_meta():
            raise ValueError(
                "accelerate.init_empty_weights() discards the weights that from_pretrained reads: call from_pretrained "
                "outside of it, where only a few weights are dense at a time. For a model without values, call "
                "AutoModelForCausalLM.from_config inside; checkpoints.load(model, folder) fills it"
            )
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError(
                "NVFP4 weights cannot be offloaded to a disk: give device_map (or max_memory) enough room on a GPU and "
                "in memory ('cpu'), where weights have 4.5 bits per element"
            )

    def update_parallel_plan(self, model: PreTrainedModel, plan: dict[str, str]) -> None:
        """Raise a ValueError for transformers' tensor parallelism, which shards weights before they are complete."""
        distributed = getattr(model.config, "distributed_config", None)
        if (getattr(distributed, "tp_size", None) or 1) > 1:
            raise ValueError("NVFP4 weights cannot be loaded as shards: load the model without tensor parallelism")

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Return whether a parameter is, or becomes, NVFP4."""
        return param_name in self.weights

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Tensor) -> float:
        """Return the stored bytes per element, including scales and padding, which device_map="auto" uses."""
        if param_name not in self.weights or isinstance(param, CodedTensor):
            return param.element_size()
        if param_name in self.fp8:
            return 1 + 4 / param.shape[-1]  # with a scale per row, at most
        dense, experts = torch.empty(param.shape, dtype=torch.bfloat16, device="meta"), 1
        if dense.dim() == 3:
            experts = len(dense)
            if is_transposed(model.get_submodule(param_name.rpartition(".")[0])):
                dense = dense.mT
        return (quantize(dense.flatten(0, -2)).nbytes + 4 * (experts - 1)) / param.numel()  # a per-tensor scale each

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """Return ModelOpt's tensors for save_pretrained. For a model with adapters, only the adapters are saved.

        Raises:
            ValueError: the layout cannot represent a weight of the model. The message has its name.
        """
        if getattr(model, "_hf_peft_config_loaded", False):
            return None, {}
        keep_names(model)
        return plain_state_dict(model, self.weight_only), {}

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | str | None = None) -> PreTrainedModel:
        # After a model was saved, its config has the dtype as a string.
        wanted: torch.dtype | None = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        decode_weights(model, wanted)
        return model

    def is_serializable(self) -> bool:
        """Return True: models are saved in ModelOpt's layout."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: adapters can be trained; the NVFP4 weights stay frozen."""
        return True

    @property
    def is_compileable(self) -> bool:
        """True: the model compiles without a graph break."""
        return True


def _registers_on_meta() -> bool:
    """Return whether registered parameters move to the meta device, as under accelerate.init_empty_weights()."""
    module = nn.Module()
    module.register_parameter("probe", nn.Parameter(torch.empty(0, dtype=torch.float32, device="cpu")))
    return bool(module.probe.is_meta)  # type: ignore[union-attr]


def decode_weights(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replace the NVFP4 and FP8 weights of a model by dense ones."""
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if isinstance(weight, CodedTensor):
                dense = pre_scaled(weight.dequantize(dtype), module._buffers.get(PRE_SCALE))
                setattr(module, name, nn.Parameter(dense, requires_grad=False))
                set_pre_scale(module, None)
        linear_of_values(module)


def parameter_of(model: nn.Module, name: str, weight: Tensor) -> nn.Parameter:
    """Return the parameter of a weight in NVFP4 or FP8, whose nn.Linear becomes an NVFP4Linear."""
    linear_of_codes(model.get_submodule(name.rpartition(".")[0]))
    return nn.Parameter(weight, requires_grad=False)


def check_complete(model: PreTrainedModel) -> None:
    """Raise a ValueError if from_pretrained left parameters at random values: those that no file has.

    The head of another task (a classifier), or a pooler, is new in any case, and transformers warns of it.
    """
    parameters = {n: p for n, p in model.named_parameters() if not p.is_meta}  # meta: offloaded after it was loaded
    loaded = {name for name, parameter in parameters.items() if hasattr(parameter, _LOADED)}
    if not loaded:
        return
    ignored = [*(model._keys_to_ignore_on_load_missing or ()), r"\bpooler\b"]
    head, base = model.get_output_embeddings(), model.base_model_prefix
    heads = {id(each) for each in head.parameters()} if isinstance(head, nn.Module) else set()
    missing = [
        name
        for name, parameter in parameters.items()
        if name not in loaded
        and (not hasattr(model, base) or name.startswith(f"{base}.") or id(parameter) in heads)
        and not any(re.search(pattern, name) for pattern in ignored)
    ]
    if missing:
        raise ValueError(
            f"the checkpoint has no tensors for {some(missing)} of {type(model).__name__}, which would keep random "
            "values: it is incomplete, or of another model"
        )


_LOADED = "_is_hf_initialized"
"""The attribute that transformers sets on each parameter that it has loaded or tied."""
