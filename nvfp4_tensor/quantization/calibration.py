"""Static activation scales, weighted scale searches: observe what each linear is fed, then quantize by that.

``calibrate(model, batches)`` does it in one go; ``quantize_(model, NVFP4Config(step="prepare"))``, running the model
by hand and ``quantize_(model, NVFP4Config(step="convert"))`` is torchao's two-step flow over the same parts.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torchao.quantization import quantize_
from tqdm import tqdm

from nvfp4_tensor.quantization.config import NVFP4Config, NVFP4WeightOnlyConfig
from nvfp4_tensor.quantization.experts import dense_experts, nothing_matched
from nvfp4_tensor.quantization.observer import ObservedLinear, is_observable

_LATER_CHOICES: dict[str, Any] = {"percentile": None, "headroom": False}
"""What the prepare step has no use for, and refuses."""


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    config: NVFP4WeightOnlyConfig | None = None,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    progress: bool = True,
) -> nn.Module:
    """Quantize a model in place by what its linears are fed over ``batches``.

    With an NVFP4Config to W4A4 with static activation scales; with a ``weighted`` config the weights' scales are
    searched for these inputs.

    After any exception, of its own or from the model or the batches, the linears are as they were. For that the dense
    weights are kept until all are quantized.

    Args:
        model: its linears are replaced in place.
        batches: what the model is called with: a tensor, a tuple of arguments or a mapping of keyword arguments each.
        config: an NVFP4Config (by default; its ``percentile`` and ``headroom`` say how an amax comes of what was seen),
            or an NVFP4WeightOnlyConfig with ``weighted=True``.
        filter_fn: which modules, as quantize_ takes it.
        progress: show a progress bar over the batches.

    Raises:
        TypeError: config is of another kind, or a module that the filter selects is no nn.Linear.
        ValueError: the filter selects nothing.
        RuntimeError: a module that the filter selects saw no input, or nothing but NaN and infinities.
    """
    config = NVFP4Config() if config is None else config
    if not isinstance(config, NVFP4Config) and not getattr(config, "weighted", False):
        raise TypeError(
            "calibrate observes activations, so it takes an NVFP4Config, or an NVFP4WeightOnlyConfig with "
            f"weighted=True, not {type(config).__name__}"
        )
    convert = dataclasses.replace(config, step="convert")
    prepare = dataclasses.replace(config, step="prepare", **_LATER_CHOICES if isinstance(config, NVFP4Config) else {})
    dense = {module: (type(module), module.weight) for module in model.modules() if is_observable(module)}
    experts = [(module, name, module._parameters[name]) for _, module, name in dense_experts(model)]
    try:
        quantize_(model, prepare, filter_fn=filter_fn)
        if not any(isinstance(module, ObservedLinear) for module in dense):
            raise ValueError(nothing_matched(model, filter_fn))
        _run(model, batches, progress)
        _check_all_observed({name: module for name, module in model.named_modules() if module in dense})
        quantize_(model, convert, filter_fn=lambda module, name: module in dense)
    except BaseException:  # an interrupt too: calibration takes long, and a model half prepared can only be thrown away
        for module, (kind, weight) in dense.items():
            if isinstance(module, ObservedLinear):
                module.stop_observing()
            module.__class__ = kind
            module.weight = weight
        for holder, name, parameter in experts:
            holder._parameters[name] = parameter
        raise
    return model


@torch.no_grad()
def _run(model: nn.Module, batches: Iterable[Any], progress: bool) -> None:
    for batch in tqdm(batches, desc="calibrating", unit="batch", disable=not progress):
        if isinstance(batch, Mapping):
            model(**batch)
        elif isinstance(batch, tuple | list):
            model(*batch)
        else:
            model(batch)


def _check_all_observed(linears: dict[str, nn.Module]) -> None:
    """A linear without a finite input is an error; one that had others beside them is worth a warning."""
    observed = {name: module for name, module in linears.items() if isinstance(module, ObservedLinear)}
    unseen = [name for name, module in observed.items() if module.activation_histogram.sum() == 0]
    nonfinite = [name for name, module in observed.items() if module.activation_nonfinite > 0]
    if broken := [name for name in unseen if name in nonfinite]:
        raise RuntimeError(
            f"the batches gave {', '.join(broken)} nothing but NaN and infinities: the model is as it was; look for "
            "NaN in the batches and in the dense model's weights, and for an overflow where it runs in float16"
        )
    if unseen:
        raise RuntimeError(
            f"no batch reached {', '.join(unseen)}: the model is as it was; leave them out with filter_fn, "
            "or calibrate on batches that use them"
        )
    if nonfinite:
        warnings.warn(
            f"some inputs of {', '.join(nonfinite)} were NaN or infinite, and were left out of the calibration: look "
            "for them in the batches",
            stacklevel=3,
        )
