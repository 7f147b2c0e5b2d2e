"""Experts of transformers models, which are parameters (E, N, K) of one module instead of linears."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor, quantize_experts

_NAMES = ("gate_up_proj", "up_proj", "gate_proj", "down_proj")
"""The names of experts' weights in transformers."""


def is_transposed(module: object) -> bool:
    """Return whether a transformers module stores its experts' weights as (E, K, N), like gpt-oss and Llama 4."""
    return getattr(module, "is_transposed", False) is True or holds_llama4_experts(module)


def holds_llama4_experts(module: object) -> bool:
    """Return whether the module is Llama 4's experts, for which transformers does not declare the memory layout."""
    return any(each.__name__ == "Llama4TextExperts" for each in type(module).__mro__)


def dense_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (name, module, attribute) of each dense experts' weight in a transformers model."""
    for path, module in model.named_modules():
        if not hasattr(module, "is_transposed") and not holds_llama4_experts(module):
            continue
        for name in _NAMES:
            weight = module._parameters.get(name)
            if weight is None or weight.dim() != 3 or type(weight.data) is not Tensor:
                continue
            if weight.dtype in HIGH_PRECISION_DTYPES:
                yield f"{path}.{name}".lstrip("."), module, name


def quantized_experts(
    module: nn.Module, weight: Tensor, spec: QuantizeSpec, activation_spec: QuantizeSpec | None = None
) -> NVFP4Tensor:
    """Quantize an experts' weight of the module, with blocks along the dimension that products sum over."""
    if not is_transposed(module):
        return quantize_experts(weight, spec, activation_spec=activation_spec)
    transposed = weight.transpose(-2, -1).contiguous()
    quantized = quantize_experts(transposed, spec, activation_spec=activation_spec).transpose(-2, -1)
    assert isinstance(quantized, NVFP4Tensor)
    return quantized


@torch.no_grad()
def quantize_all(model: nn.Module, spec: QuantizeSpec, activation_spec: QuantizeSpec | None) -> None:
    """Quantize the weights of all dense experts of a model in place."""
    for _, module, name in list(dense_experts(model)):
        weight = quantized_experts(module, getattr(module, name).detach(), spec, activation_spec)
        setattr(module, name, nn.Parameter(weight, requires_grad=False))


def left_dense(model: nn.Module) -> str | None:
    """Return a one-line warning about experts that stay dense, or None if the model has none."""
    names = [name for name, _, _ in dense_experts(model)]
    if not names:
        return None
    total = sum(parameter.numel() for parameter in model.parameters())
    share = sum(getattr(module, name).numel() for _, module, name in dense_experts(model)) / total
    return (
        f"the experts stay dense, {share:.0%} of the model's weights ({names[0]}, {len(names)} in all): experts=True "
        "in the config also quantizes them, experts=False silences this warning"
    )


def nothing_matched(model: nn.Module, filter_fn: object) -> str:
    """Return the error message for a model in which nothing is selected."""
    kinds: dict[str, int] = {}
    for module in model.modules():
        if any(p is not None and p.dim() > 1 for p in module._parameters.values()):
            kinds[type(module).__name__] = kinds.get(type(module).__name__, 0) + 1
    found = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "no module with a matrix"
    fix = "filter_fn selects none of them" if filter_fn is not None else "replace the others by nn.Linear first"
    return (
        f"nothing to quantize in {type(model).__name__}: nn.Linear and transformers' experts can be quantized, and the "
        f"model has {found} ({fix}; GPT-2's Conv1D is not an nn.Linear)"
    )
