"""The HfQuantizer of models with NVFP4 weights, wherever the weights come from: what transformers asks about them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer

from nvfp4_tensor.integrations.transformers.config import CheckpointConfig, NVFP4TensorConfig
from nvfp4_tensor.integrations.transformers.saving import plain_state_dict
from nvfp4_tensor.numerics.layout import BLOCK, ceil_to
from nvfp4_tensor.quantization import NVFP4Linear
from nvfp4_tensor.quantization.experts import is_transposed
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor


class NVFP4HfQuantizer(HfQuantizer):
    """Plans by true sizes, refuses what cannot work, saves in ModelOpt's layout.

    Attributes:
        weights: names of the parameters that are NVFP4, or become it when they are loaded.
        knows_specs: whether the weights say how they were quantized; those of a file say only what a file can.
        weight_only: whether what is saved leaves out the quantization of activations.
    """

    requires_calibration = False
    quantization_config: NVFP4TensorConfig | CheckpointConfig

    def __init__(self, quantization_config: NVFP4TensorConfig | CheckpointConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.weights: set[str] = set()
        self.knows_specs = not self.pre_quantized
        self.weight_only = False

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raises a ValueError for weights on a disk, and where what is loaded would be thrown away at once."""
        if _registers_on_meta():
            raise ValueError(
                "accelerate.init_empty_weights() throws away what from_pretrained reads: call from_pretrained outside "
                "of it, where no more than a few weights are dense at a time. For a model without values, "
                "AutoModelForCausalLM.from_config inside; checkpoints.load(model, folder) fills it"
            )
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError(
                "NVFP4 weights cannot be offloaded to a disk: give device_map (or max_memory) room on a GPU and in "
                "memory ('cpu'), where they take 4.5 bits each"
            )

    def update_parallel_plan(self, model: PreTrainedModel, plan: dict[str, str]) -> None:
        """Raises a ValueError for transformers' own tensor parallelism, which cuts weights before they are whole."""
        distributed = getattr(model.config, "distributed_config", None)
        if (getattr(distributed, "tp_size", None) or 1) > 1:
            raise ValueError("NVFP4 weights are not loaded in shards: load the model without tensor parallelism")

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Whether a parameter is NVFP4, or will be."""
        return param_name in self.weights

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Tensor) -> float:
        """Bytes of an element as it will be stored, scales and padding included: what device_map="auto" plans by."""
        if param_name not in self.weights or isinstance(param, NVFP4Tensor):
            return param.element_size()
        shape = list(param.shape)
        if len(shape) == 3 and is_transposed(model.get_submodule(param_name.rpartition(".")[0])):
            shape[-2:] = shape[-1], shape[-2]
        *leading, columns = shape
        rows = torch.Size(leading).numel()
        codes = rows * ceil_to(columns, BLOCK) // 2
        scales = ceil_to(rows, 128) * ceil_to(columns, 64) // BLOCK
        matrices = leading[0] if len(leading) > 1 else 1  # each has a per-tensor scale
        return (codes + scales + 4 * matrices) / param.numel()

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """What save_pretrained writes: ModelOpt's tensors. Of a model with adapters, it writes the adapters alone.

        Raises:
            ValueError: the model holds what that layout cannot, by name.
        """
        if getattr(model, "_hf_peft_config_loaded", False):
            return None, {}
        return plain_state_dict(model, self.weight_only), {}

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | str | None = None) -> PreTrainedModel:
        # A string is what a model's config has once the model was saved.
        wanted: torch.dtype | None = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        for module in model.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                if isinstance(weight, NVFP4Tensor):
                    setattr(module, name, nn.Parameter(weight.dequantize(wanted), requires_grad=False))
            if type(module) is NVFP4Linear:
                module.__class__ = nn.Linear  # type: ignore[assignment]
        return model

    def is_serializable(self) -> bool:
        """True: as ModelOpt's layout."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: adapters train beside the weights, which stay as they are."""
        return True

    @property
    def is_compileable(self) -> bool:
        """True, without a graph break."""
        return True


def _registers_on_meta() -> bool:
    """Whether parameters go to the meta device when a module takes them, as under accelerate's init_empty_weights."""
    module = nn.Module()
    module.register_parameter("probe", nn.Parameter(torch.empty(0, device="cpu")))
    return bool(module.probe.is_meta)  # type: ignore[union-attr]


def parameter_of(model: PreTrainedModel, name: str, weight: NVFP4Tensor) -> nn.Parameter:
    """The parameter of an NVFP4 weight; the linear that it is for prints as what it becomes."""
    linear = model.get_submodule(name.rpartition(".")[0])
    if type(linear) is nn.Linear:
        linear.__class__ = NVFP4Linear
    return nn.Parameter(weight, requires_grad=False)
