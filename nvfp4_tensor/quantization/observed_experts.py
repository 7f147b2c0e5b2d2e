"""Observe the inputs of experts, all tokens of their layer through every expert, and quantize experts by them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_tensor._compat.pickles import pin
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.quantization import experts
from nvfp4_tensor.quantization.observer import InputStatistics
from nvfp4_tensor.quantization.shards import refuse_dtensors
from nvfp4_tensor.quantization.weights import WeightRef

_ATTRIBUTE = "observed_inputs"
ROUTED = "routed_tokens"
"""The attribute of an experts' module with the tokens per expert that :func:`calibrate` or :func:`gptq` counted."""


@functools.partial(pin, loadable=False)
class ObservedExperts(nn.Module):
    """The statistics of an experts' module, which owns it as ``observed_inputs`` until it is converted.

    Attributes:
        statistics: the inputs of each weight, by its name.
        tokens: int64 (E,), the tokens that the router sent to each expert. The statistics are of all tokens.
    """

    tokens: Tensor

    def __init__(self, module: nn.Module, spec: QuantizeSpec) -> None:
        super().__init__()
        self.statistics = nn.ModuleDict()
        for name in experts.expert_weights(module):
            weight = getattr(module, name)
            columns, device = experts.matrix_of(module, weight, 0).shape[1], weight.device
            self.statistics[name] = own = InputStatistics()
            own._start(columns, device, spec, experts=(len(weight),))
        self.register_buffer("tokens", torch.zeros(len(weight), dtype=torch.int64, device=device))


def observe(weights: Iterable[WeightRef], spec: QuantizeSpec) -> None:
    """Start observing the inputs of dense experts, which then take about E / k times as long."""
    for module in dict.fromkeys(each.module for each in weights):
        if observed_inputs(module) is None:
            setattr(module, _ATTRIBUTE, ObservedExperts(module, spec))
            module.register_forward_pre_hook(_observe_experts, with_kwargs=True)


def observed_inputs(module: nn.Module) -> ObservedExperts | None:
    """Return the statistics of an experts' module, or None if it is not observed."""
    found = module._modules.get(_ATTRIBUTE)
    return found if isinstance(found, ObservedExperts) else None


def observed_weights(model: nn.Module) -> dict[str, InputStatistics]:
    """Return the statistics of each observed experts' weight, by the weight's name."""
    return {
        f"{path}.{name}".lstrip("."): each
        for path, module in model.named_modules()
        if (own := observed_inputs(module)) is not None
        for name, each in own.statistics.items()
        if isinstance(each, InputStatistics)
    }


@functools.partial(pin, loadable=False)
@torch.no_grad()
def _observe_experts(module: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
    """Record what every expert gets from all tokens of a call. The call itself goes on by the router's choice."""
    own = observed_inputs(module)
    assert own is not None
    refuse_dtensors(module)
    hidden, chosen = experts.arguments_of(args, keywords)
    own.tokens += experts.tokens_of(len(own.tokens), hidden, chosen)
    for name, of_experts, x, weights in experts.inputs_of(module, hidden, chosen):
        own.statistics[name].record(x, of_experts, weights)  # type: ignore[operator]


def finish(model: nn.Module) -> None:
    """Stop observing the experts of a model, and keep how many tokens the router sent to each."""
    for module in list(model.modules()):
        if (own := observed_inputs(module)) is None:
            continue
        setattr(module, ROUTED, own.tokens.tolist())
        delattr(module, _ATTRIBUTE)
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is _observe_experts]:
            del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]


def routed_tokens(model: nn.Module) -> dict[str, list[int]]:
    """Return how many tokens of a calibration the router sent to each expert, by the name of the experts' module.

    :func:`calibrate` and :func:`gptq` count them. Statistics are those of all tokens, whatever the router chose, so an
    expert without a token is calibrated too; but the text then says little about how it is used.
    """
    return {name: getattr(module, ROUTED) for name, module in model.named_modules() if hasattr(module, ROUTED)}


def summary_of(routed: Mapping[str, list[int]]) -> str:
    """Return one line: the tokens per expert, and which experts the router never chose."""
    counts = sorted(count for each in routed.values() for count in each)
    unused = [f"{name}.{e}" for name, each in routed.items() for e, count in enumerate(each) if not count]
    line = f"{len(counts)} experts saw all tokens; the router sent {counts[0]} to {counts[-1]} to each"
    return f"{line}, none to {len(unused)} of them ({', '.join(unused[:4])})" if unused else line
