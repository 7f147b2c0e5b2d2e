"""The linear with an NVFP4 weight, and which linears can become one."""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_tensor._compat.exports import refuse_export
from nvfp4_tensor._compat.modules import change_class, check_forward
from nvfp4_tensor._compat.pickles import pin
from nvfp4_tensor.dispatch.linears import linear_of_module
from nvfp4_tensor.dispatch.second_quantizer import is_foreign
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.quantization import callers
from nvfp4_tensor.quantization.conv1d import is_linear
from nvfp4_tensor.quantization.names import groups_of
from nvfp4_tensor.quantization.observer import ObservedLinear
from nvfp4_tensor.quantization.trained import dense_linear
from nvfp4_tensor.tensor.fp8 import FP8Tensor
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

PRE_SCALE = "pre_quant_scale"
"""The name of the buffer (K,) of a linear that multiplies its inputs, as ModelOpt's AWQ does."""


@functools.partial(pin, loadable=False)
class NVFP4Linear(nn.Linear):
    """An nn.Linear with an NVFP4 weight. It computes the same, in less time on the host, and has another repr.

    Linears with FP8 weights of checkpoints are of this class, too.

    If it has a buffer ``pre_quant_scale`` (K,), its inputs are multiplied by it first.
    """

    __prepare_scriptable__ = refuse_export

    def forward(self, input: Tensor) -> Tensor:
        if PRE_SCALE in self._buffers:
            input = pre_scaled(input, self._buffers[PRE_SCALE])
        return linear_of_module(self, input)

    def train(self, mode: bool = True) -> NVFP4Linear:
        if mode and "transformers.trainer" in sys.modules:
            callers.warn_of_trainer()
        return super().train(mode)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        if local_metadata.get("assign_to_params_buffers"):
            callers.warn_of_dense_weight(self._parameters.get("weight"), state_dict.get(f"{prefix}weight"))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def extra_repr(self) -> str:
        weight = getattr(self.weight, "_local_tensor", self.weight)  # the local shard of a DTensor
        kind = f"NVFP4 ({weight.describe()})" if isinstance(weight, NVFP4Tensor) else f"dense {weight.dtype}"
        kind = f"FP8 ({weight.spec})" if isinstance(weight, FP8Tensor) else kind
        scaled = f", inputs times {PRE_SCALE}" if PRE_SCALE in self._buffers else ""
        return f"{super().extra_repr()}, weight={kind}{scaled}"


def pre_scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    """Return x (..., K) times a scale (K,), in the dtype of x; x itself without a scale."""
    return x if scale is None else x * scale.to(x.dtype)


def set_pre_scale(linear: nn.Module, scale: Tensor | None) -> None:
    """Set, or with None remove, the scale (K,) that multiplies the inputs of a linear."""
    linear._buffers.pop(PRE_SCALE, None)
    if scale is not None:
        check_forward(linear)
        linear.register_buffer(PRE_SCALE, scale)


def set_weight(linear: nn.Module, weight: NVFP4Tensor | nn.Parameter) -> None:
    """Set the NVFP4 weight of a linear; a plain nn.Linear becomes an NVFP4Linear."""
    linear_of_codes(dense_linear(linear))
    linear.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)


def linear_of_codes(module: nn.Module) -> None:
    """Make a plain nn.Linear an NVFP4Linear, for a weight in NVFP4 or FP8."""
    if type(module) is nn.Linear:
        change_class(module, NVFP4Linear)


def linear_of_values(module: nn.Module) -> None:
    """Make an NVFP4Linear a plain nn.Linear, for a dense weight."""
    if type(module) is NVFP4Linear:
        change_class(module, nn.Linear)


def quantizable(module: nn.Module) -> nn.Linear:
    """Return the module if it is a linear with a dense weight that can be quantized; otherwise raise an error."""
    if not is_linear(module):
        raise TypeError(f"NVFP4 configs quantize nn.Linear, not {module}: exclude it with quantize_'s filter_fn")
    weight = module.weight
    if isinstance(module, ObservedLinear):
        raise ValueError(
            f'{module} is prepared, and its observations would be lost: finish with NVFP4Config(step="convert"), '
            "or undo the step with stop_observing() of each ObservedLinear"
        )
    if PRE_SCALE in module._buffers:
        raise ValueError(
            f"{module} multiplies its inputs by {PRE_SCALE} (AWQ), which a new weight would have to be divided by: "
            "start from the dense model, or call dequantize() of the model that from_pretrained returned"
        )
    if isinstance(weight, NVFP4Tensor):
        codes = "quantize_(model, NVFP4WeightOnlyConfig()) takes the codes that it trained, or " * weight.requires_grad
        raise ValueError(f"{module} is NVFP4 already: {codes}start from the dense model")
    if isinstance(weight, FP8Tensor):
        raise ValueError(f"{module} is FP8: exclude it, which keeps it FP8, or start from the dense model")
    if is_foreign(module):
        raise TypeError(
            f"{type(module).__name__} of torchao would go on quantizing its weight at each call, or observing it: "
            'finish with torchao\'s config first, as quantize_(model, QATConfig(base_config, step="convert")), or '
            "replace it by an nn.Linear of its weight and bias"
        )
    sources = [name for name in module._parameters if name.startswith("weight_")]
    if "weight" not in module._parameters and sources:
        raise TypeError(
            f"the weight of {module} is computed from {' and '.join(sources)}: of torch.nn.utils, "
            "prune.remove(module, 'weight'), remove_weight_norm(module) or remove_spectral_norm(module) first"
        )
    if torch.nn.utils.parametrize.is_parametrized(module, "weight"):
        raise TypeError(
            f"the weight of {module} is parametrized: remove_parametrizations(module, 'weight') of "
            "torch.nn.utils.parametrize first"
        )
    if type(weight.data) is not torch.Tensor or weight.dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(
            f"{module} has a weight of {type(weight.data).__name__}, {weight.dtype}: only plain tensors of bfloat16, "
            "float16 or float32 can be quantized, so cast the model first"
        )
    return module


def joined_linears(model: nn.Module, chosen: Collection[nn.Module]) -> dict[nn.Module, tuple[nn.Module, ...]]:
    """Return the chosen linears with which each shares a per-tensor scale, including itself, because servers join them.

    Linears that share with no other are left out.
    """
    linears = {f"{path}.weight": module for path, module in model.named_modules() if is_linear(module)}
    groups = groups_of([name for name, module in linears.items() if module in chosen], linears)
    return {linears[name]: tuple(map(linears.__getitem__, group)) for name, group in groups.items() if group[1:]}


def shared_parameters(model: nn.Module) -> dict[int, list[tuple[str, nn.Module, str]]]:
    """Return the (path, module, attribute) of all modules that share a parameter, by the parameter's id."""
    holders: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((path, module, name))
    return {key: each for key, each in holders.items() if len(each) > 1}
