"""Calibration: observe the inputs of each linear, then compute static activation scales or weighted scale searches.

``calibrate(model, batches)`` does both steps. torchao's two-step flow is also supported: call
``quantize_(model, NVFP4Config(step="prepare"))``, run the model, then call
``quantize_(model, NVFP4Config(step="convert"))``.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torchao.quantization import quantize_
from tqdm import tqdm

from nvfp4_tensor._compat.frames import user_level
from nvfp4_tensor.quantization.config import NVFP4Config, NVFP4WeightOnlyConfig
from nvfp4_tensor.quantization.conv1d import as_linear
from nvfp4_tensor.quantization.experts import nothing_matched
from nvfp4_tensor.quantization.observed_experts import finish, observed_weights, routed_tokens, summary_of
from nvfp4_tensor.quantization.observer import InputStatistics, ObservedLinear, is_observable
from nvfp4_tensor.quantization.shards import refuse_shards
from nvfp4_tensor.quantization.trained import restored, to_dense
from nvfp4_tensor.quantization.whole_model import PlannedFilter, plan_model

_CONVERT_ONLY: dict[str, Any] = {"percentile": None, "headroom": False}
"""Defaults of the fields that only the convert step uses. The prepare step raises an error if they are set."""


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
        progress: show a progress bar over the batches.

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
    if isinstance(batches, torch.Tensor | Mapping):
        raise TypeError(f"batches must be an iterable of batches, not one {type(batches).__name__}: pass [batch]")
    convert = dataclasses.replace(config, step="convert")
    prepare = dataclasses.replace(config, step="prepare", **_CONVERT_ONLY if isinstance(config, NVFP4Config) else {})
    chosen = PlannedFilter(model, plan_model(model, filter_fn))
    refuse_shards(model, chosen.linears | (chosen.experts if config.experts else set()))
    chosen.experts = set()  # config.experts has them observed
    with restored(model, only_on_error=True):  # also on an interrupt: a partly prepared model is useless
        for module in chosen.linears:
            as_linear(module)
        linears = {module for module in model.modules() if is_observable(module)}
        to_dense(model)
        quantize_(model, prepare, filter_fn=chosen if filter_fn is None else filter_fn)
        if not any(isinstance(module, ObservedLinear) for module in linears):
            raise ValueError(nothing_matched(model, filter_fn))
        _run(model, batches, progress)
        own = {
            name: each for name, each in model.named_modules() if isinstance(each, ObservedLinear) and each in linears
        }
        _check_all_observed(own | observed_weights(model), config.weighted)
    try:  # not within restored(), which keeps the dense weights
        quantize_(model, convert, filter_fn=chosen)
    except BaseException:
        for each in linears:
            if isinstance(each, ObservedLinear):
                each.stop_observing()
        finish(model)
        raise
    if progress and (routed := routed_tokens(model)):
        tqdm.write(summary_of(routed), file=sys.stderr)
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


def _check_all_observed(observed: Mapping[str, InputStatistics], weighted: bool) -> None:
    """Raise an error for linears and experts without any finite input, or with inputs that are too large for a weighted
    search; warn of those with some nonfinite inputs."""
    unseen = [name for name, each in observed.items() if each.activation_histogram.sum() == 0]
    nonfinite = [name for name, each in observed.items() if each.activation_nonfinite > 0]
    if broken := [name for name in unseen if name in nonfinite]:
        raise RuntimeError(
            f"all inputs of {', '.join(broken)} were NaN or infinite, and the model is unchanged: look for NaN in the "
            "batches and in the dense model's weights, and for overflow if the model runs in float16"
        )
    if unseen:
        raise RuntimeError(
            f"no batch reached {', '.join(unseen)}, and the model is unchanged: exclude them with filter_fn, or "
            "calibrate on batches that use them"
        )
    for name, each in observed.items() if weighted else ():
        each.check_squares(name)
    if nonfinite:
        warnings.warn(
            f"some inputs of {', '.join(nonfinite)} were NaN or infinite and were ignored in the calibration: check "
            "the batches",
            stacklevel=user_level(),
        )
