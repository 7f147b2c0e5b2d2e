"""transformers' Conv1D (GPT-2), a linear that stores its weight as (K, N)."""

from __future__ import annotations

import functools
from typing import Any, TypeGuard

from torch import Tensor, nn

from nvfp4_tensor._compat.modules import change_class
from nvfp4_tensor._compat.pickles import pin


def is_conv1d(module: nn.Module) -> bool:
    """Return whether the module is transformers' Conv1D, without importing transformers."""
    return isinstance(getattr(module, "nf", None), int) and any(
        each.__name__ == "Conv1D" and each.__module__.startswith("transformers.") for each in type(module).__mro__
    )


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether the module is an nn.Linear, or a Conv1D that :func:`as_linear` makes one of."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def as_linear(module: nn.Module) -> Any:
    """Make a Conv1D an nn.Linear in place, and return it; return any other module as it is.

    Its parameters stay the same objects, with the weight transposed to (N, K). Its state_dict keeps Conv1D's layout, so
    that files of the model can be read and written as before.
    """
    if not is_conv1d(module):
        return module
    out_features, in_features = module.nf, module.nx
    weight = module._parameters["weight"]
    if weight is not None:
        grad, weight.grad = weight.grad, None
        weight.data = weight.data.t().contiguous()
        weight.grad = None if grad is None else grad.t().contiguous()
    del module.nf, module.nx
    change_class(module, nn.Linear)
    module.in_features, module.out_features = in_features, out_features  # type: ignore[assignment]
    module.register_state_dict_post_hook(_stored_as_conv1d)
    module.register_load_state_dict_pre_hook(_loaded_from_conv1d)
    return module


def was_conv1d(module: nn.Module) -> bool:
    """Return whether :func:`as_linear` made this linear of a Conv1D, whose state_dict has its weight as (K, N)."""
    return any(hook is _stored_as_conv1d for hook in module._state_dict_hooks.values())


@functools.partial(pin, loadable=False)
def _stored_as_conv1d(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Transpose the weight of a state_dict to (K, N)."""
    if isinstance(weight := state_dict.get(f"{prefix}weight"), Tensor):
        state_dict[f"{prefix}weight"] = weight.t()


@functools.partial(pin, loadable=False)
def _loaded_from_conv1d(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *others: Any
) -> None:
    """Transpose the weight (K, N) of a state_dict to (N, K)."""
    if isinstance(weight := state_dict.get(f"{prefix}weight"), Tensor) and weight.dim() == 2:
        assigned = type(weight) in (Tensor, nn.Parameter) and local_metadata.get("assign_to_params_buffers", False)
        state_dict[f"{prefix}weight"] = weight.t().contiguous() if assigned else weight.t()
