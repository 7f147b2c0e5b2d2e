"""Take models that trained: what trains in NVFP4 becomes dense before it is quantized, observed or fitted.

A module that trains offers ``to_dense()``, which converts it in place to a plain nn.Linear with the same parameters.
The class of training linears is in a room above this one, so its method is asked for by name. Experts of transformers
train by an implementation, which their config names: see :mod:`nvfp4_tensor.quantization.experts`. Weights that
trained in NVFP4 stay as they are: rounding them a second time would only add to their error.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator

from torch import nn

from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.quantization import experts
from nvfp4_tensor.quantization.conv1d import is_conv1d
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor


def trains(module: nn.Module) -> bool:
    """Return whether a module is a linear that trains in NVFP4."""
    return isinstance(module, nn.Linear) and hasattr(type(module), "to_dense")


def dense_linear(module: nn.Module) -> nn.Module:
    """Convert a linear that trains to a plain nn.Linear in place; return any module."""
    if trains(module):
        module.to_dense()  # type: ignore[operator]
    return module


def to_dense(model: nn.Module) -> nn.Module:
    """Convert a model's NVFP4 training linears back to nn.Linear, in place; weights do not change.

    Experts of transformers that train in NVFP4 run by its default implementation again. Configs for inference,
    :func:`calibrate` and :func:`gptq` do the same.
    """
    for module in list(model.modules()):
        dense_linear(module)
    experts.stop_training(model)
    return model


def trained_in_nvfp4(module: nn.Module) -> bool:
    """Return whether the weight of a linear is a trainable parameter in NVFP4 (training.to_nvfp4_parameters)."""
    weight = getattr(module, "weight", None)
    return isinstance(module, nn.Linear) and isinstance(weight, NVFP4Tensor) and weight.requires_grad


def warn_of_training(model: nn.Module, chosen: Iterable[nn.Module], with_experts: bool) -> None:
    """Warn of linears and experts that still train, if they are not quantized: they quantize activations silently."""
    names = {module: name for name, module in model.named_modules()}
    taken = set(chosen)
    left = [name for module, name in names.items() if trains(module) and module not in taken]
    if not with_experts and experts.training_configs(model):
        left += [name for name, module in model.named_modules() if experts.is_experts(module)]
    if left:
        warn_user(
            f"{left[0]}{f' and {len(left) - 1} more modules' if left[1:] else ''} still train in NVFP4, and quantize "
            "their inputs at each call: training.to_dense(model) makes them dense, for inference"
        )


@contextlib.contextmanager
def restored(model: nn.Module, *, only_on_error: bool) -> Iterator[None]:
    """Restore the classes and attributes of all modules of a model after the block; values of tensors stay.

    Until then, all parameters that the block replaces stay in memory.
    """
    before = [(module, type(module), _attributes(module)) for module in model.modules()]
    implementations = [(config, config._experts_implementation) for config in experts.experts_configs(model)]
    failed = True
    try:
        yield
        failed = False
    finally:
        if failed or not only_on_error:
            for module, kind, attributes in before:
                was_converted = type(module) is not kind
                module.__class__ = kind
                module.__dict__.clear()
                module.__dict__.update(attributes)
                if was_converted and is_conv1d(module) and (weight := module._parameters["weight"]) is not None:
                    weight.data = weight.data.t().contiguous()
            for config, implementation in implementations:
                config._experts_implementation_internal = implementation


def _attributes(module: nn.Module) -> dict[str, object]:
    """Return the attributes of a module, with copies of its tables of parameters, buffers and hooks."""
    return {name: copy.copy(own) if isinstance(own, dict | set) else own for name, own in module.__dict__.items()}
