"""Calibration: observe the inputs of each linear, then compute static activation scales or weighted scale searches.

``calibrate(model, batches)`` does both steps. torchao's two-step flow is also supported: call
``quantize_(model, NVFP4Config(step="prepare"))``, run the model, then call
``quantize_(model, NVFP4Config(step="convert"))``.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.quantization.accuracy.gptq.stages import call_model, check_batches
from nvfp4_tensor.quantization.callers import selected, warn_of_dense_attention
from nvfp4_tensor.quantization.config import NVFP4Config, NVFP4WeightOnlyConfig
from nvfp4_tensor.quantization.conv1d import as_linear
from nvfp4_tensor.quantization.conversion import Conversion
from nvfp4_tensor.quantization.experts import names_of_experts
from nvfp4_tensor.quantization.observed_experts import finish, routed_tokens, summary_of
from nvfp4_tensor.quantization.observer import ObservedLinear
from nvfp4_tensor.quantization.trained import restored, to_dense
from nvfp4_tensor.quantization.whole_model import PlannedFilter, plan_model


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    config: NVFP4WeightOnlyConfig | None = None,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    progress: bool = True,
) -> nn.Module:
    """Quantize a model in place, using the inputs that its linears receive over ``batches``.

    With an NVFP4Config, the model becomes W4A4 with static activation scales. With a ``weighted`` config, the scale
    search of each weight weighs its errors by these inputs.

    With ``experts=True``, experts are observed too: all tokens of a layer pass through each of its experts for the
    statistics, while the outputs that flow on are those of the router's choice. In the sums of squares of a weighted
    search, tokens that the router sent elsewhere count little. The products of one weight (E, N, K)
    share a static scale, the largest of its experts. :func:`routed_tokens` tells how many tokens chose each expert.

    A model that trained is taken as :func:`training.to_dense` would leave it. Weights that trained in NVFP4 keep their
    codes.

    If the model or the batches raise an exception, or a weight is refused, the model is restored. Then weights are
    quantized one at a time, and each dense one is freed. If that is interrupted, those left are dense linears again.

    Args:
        model: the model whose linears are replaced in place.
        batches: the inputs of the model. Each is a tensor, a tuple of arguments or a mapping of keyword arguments.
        config: an NVFP4Config (the default), whose ``percentile`` and ``headroom`` choose the amax from the observed
            inputs, or an NVFP4WeightOnlyConfig with ``weighted=True``.
        filter_fn: selects modules by (module, name), as in ``quantize_``. By default, those of ``quantize_model``.
        progress: show a progress bar over the batches, and over the weights.

    Raises:
        TypeError: config or batches has another type, the filter selects a module that is not an nn.Linear, or a weight
            is sharded.
        ValueError: the filter selects no module.
        RuntimeError: a selected module received no input, or only NaN and infinities.
    """
    config = NVFP4Config() if config is None else config
    if not isinstance(config, NVFP4Config) and not getattr(config, "weighted", False):
        raise TypeError(
            "calibrate observes activations: config must be an NVFP4Config, or an NVFP4WeightOnlyConfig with "
            f"weighted=True, not {type(config).__name__}"
        )
    check_batches(batches)
    chosen = PlannedFilter(model, plan_model(model, filter_fn))
    linears: list[nn.Module] = chosen.linears
    if filter_fn is not None:
        warn_of_dense_attention(model, filter_fn)
        linears = list(selected(model, filter_fn))  # the first that is no linear is refused by name
    experts = names_of_experts(model) if config.experts else set()
    if not linears and not experts:
        raise ValueError(f"nothing to quantize in {type(model).__name__}: experts=True in the config selects experts")
    quantize_by_inputs(model, batches, config, linears, experts, progress=progress)
    return model


def quantize_by_inputs(
    model: nn.Module,
    batches: Iterable[Any],
    config: NVFP4WeightOnlyConfig,
    linears: Sequence[nn.Module],
    experts: Collection[str],
    *,
    progress: bool,
) -> None:
    """Do what :func:`calibrate` does with these linears and experts' weights, by name."""
    convert = dataclasses.replace(config, step="convert")
    unused: dict[str, Any] = {"percentile": None, "headroom": False} if isinstance(config, NVFP4Config) else {}
    prepare = dataclasses.replace(config, step="prepare", **unused)
    with restored(model, only_on_error=True):  # also on an interrupt: a partly prepared model is useless
        for module in linears:
            as_linear(module)
        to_dense(model)
        Conversion(model, linears, prepare, experts=experts).run(model)
        with torch.no_grad():
            for batch in tqdm(batches, desc="calibrating", unit="batch", disable=not progress):
                call_model(model, batch)
        conversion = Conversion(model, linears, convert, experts=experts)
        if names := [name for name, each in conversion.observed.items() if each.activation_nonfinite > 0]:
            warn_user(
                f"some inputs of {', '.join(names)} were NaN or infinite and were ignored in the calibration: check "
                "the batches"
            )
    try:  # not within restored(), which keeps the dense weights
        conversion.run(model, progress=progress)
    except BaseException:
        for module in linears:
            if isinstance(module, ObservedLinear):
                module.stop_observing()
        finish(model)
        raise
    if progress and (routed := routed_tokens(model)):
        tqdm.write(summary_of(routed), file=sys.stderr)
