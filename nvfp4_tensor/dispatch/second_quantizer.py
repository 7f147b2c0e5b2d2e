"""Refuse torchao's quantizers over NVFP4: they would quantize decoded values again, without a word.

All of them end in one of two assignments: a parameter of a class of torchao in place of ours (or ours in a module of
torchao), or a module of torchao in place of one that quantizes. torch calls hooks at both.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from nvfp4_tensor.tensor.fp8 import FP8Tensor
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

TRAINED_EXPERTS = "nvfp4_"
"""The start of the names of transformers' implementations of experts that train them in NVFP4."""

_FORMATS = ("torchao", "torch.sparse")
"""Packages whose tensors and modules encode a weight."""


def holds_nvfp4(weight: object) -> bool:
    """Return whether a parameter is NVFP4, or a shard of NVFP4."""
    return isinstance(getattr(weight, "_local_tensor", weight), NVFP4Tensor)


def is_foreign(value: Tensor | nn.Module | None) -> bool:
    """Return whether a tensor or a module is one of another format."""
    local = getattr(value, "_local_tensor", value)
    own = isinstance(local, NVFP4Tensor | FP8Tensor)
    return not own and any(base.__module__.startswith(_FORMATS) for base in type(local).__mro__)


def _why_ours(module: nn.Module) -> str | None:
    """Return what a module has to do with NVFP4, by its class, its experts or its weights; None if nothing."""
    if (why := getattr(module, "use_of_nvfp4", None)) is not None:
        return why
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if hasattr(module, "is_transposed") and str(implementation).startswith(TRAINED_EXPERTS):  # of experts only
        return "trains experts in NVFP4"
    return "is NVFP4 already" if any(map(holds_nvfp4, module._parameters.values())) else None


def _refuse(what: object, why: str, foreign: Tensor | nn.Module) -> None:
    raise TypeError(
        f"{what} {why}, and {type(foreign).__name__} would quantize it again: exclude it with quantize_'s filter_fn, "
        "or make it dense first: training.to_dense(model) if it trains, else "
        "module.weight = torch.nn.Parameter(module.weight.dequantize())"
    )


def _check_parameter(module: nn.Module, name: str, new: nn.Parameter) -> None:
    if torch.compiler.is_dynamo_compiling():  # it knows no classes of parameters that a graph creates
        return
    if is_foreign(new):
        if name in module._parameters and (why := _why_ours(module)):
            _refuse(module, why, new)
    elif holds_nvfp4(new) and is_foreign(module):
        _refuse(f"the {name} of shape {tuple(new.shape)}", "is NVFP4 already", module)


def _check_module(parent: nn.Module, name: str, new: nn.Module | None) -> None:
    if torch.compiler.is_dynamo_compiling():
        return
    old = parent._modules.get(name)
    if old is None or new is None or not any(map(is_foreign, (new, *new._parameters.values()))):
        return
    if all(each is not old for each in new.modules()) and (why := _why_ours(old)):
        _refuse(old, why, new)


register_module_parameter_registration_hook(_check_parameter)
register_module_module_registration_hook(_check_module)
