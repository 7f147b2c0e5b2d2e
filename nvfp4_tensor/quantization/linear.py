"""The handlers of quantize_ for our configs, and the linear with an NVFP4 weight."""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization.quantize_.common.quantization_step import QuantizationStep
from torchao.quantization.transform_module import register_quantize_module_handler

from nvfp4_tensor._compat.exports import refuse_export
from nvfp4_tensor._compat.frames import user_level
from nvfp4_tensor._compat.pickles import pin
from nvfp4_tensor.dispatch.linears import linear_of_module
from nvfp4_tensor.dispatch.second_quantizer import is_foreign
from nvfp4_tensor.matmul.backends import check_backend, check_installed
from nvfp4_tensor.numerics.choices import ProductBackend
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.ops.composite.quantization import own_amax
from nvfp4_tensor.quantization import callers, experts, observed_experts
from nvfp4_tensor.quantization.accuracy.weighted import quantize_weighted
from nvfp4_tensor.quantization.config import NVFP4Config, NVFP4WeightOnlyConfig
from nvfp4_tensor.quantization.conv1d import as_linear, is_linear
from nvfp4_tensor.quantization.observer import ObservedLinear, check_observable
from nvfp4_tensor.quantization.plan import Plan, plan_of
from nvfp4_tensor.quantization.shards import refuse_shards
from nvfp4_tensor.quantization.trained import dense_linear, trained_in_nvfp4, warn_of_training
from nvfp4_tensor.tensor.arguments import stored_spec
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor, quantize


@functools.partial(pin, loadable=False)
class NVFP4Linear(nn.Linear):
    """An nn.Linear with an NVFP4 weight. It computes the same, in less time on the host, and has another repr."""

    __prepare_scriptable__ = refuse_export

    def forward(self, input: Tensor) -> Tensor:
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
        return f"{super().extra_repr()}, weight={kind}"


@register_quantize_module_handler(NVFP4WeightOnlyConfig)
@register_quantize_module_handler(NVFP4Config)
def _quantize_module(module: nn.Module, config: NVFP4WeightOnlyConfig) -> nn.Module:
    check = _is_observed if config.step == QuantizationStep.CONVERT else _is_ready
    if config.step is None:
        config._check_calibrated()
    plan = plan_of(module, config, functools.partial(check, config=config), functools.partial(_start, config=config))
    if config.step == QuantizationStep.CONVERT:
        return _convert(module, plan, config) if isinstance(module, ObservedLinear) else module
    dense_linear(module)
    if config.step == QuantizationStep.PREPARE:
        if module in plan.dense:
            return module
        return ObservedLinear.observe(as_linear(module), _observed_spec(config))
    return _quantize_linear(module, plan, config, None)


def _start(model: nn.Module, chosen: list[nn.Module] | None, config: NVFP4WeightOnlyConfig) -> None:
    """Observe or quantize the experts of the model, or warn once that they stay dense, before its first linear."""
    refuse_shards(model, _changed(model, chosen or [], config))
    if chosen is not None:
        warn_of_training(model, chosen, bool(config.experts))
        _warn_of_codes(chosen, config)
    if config.step == QuantizationStep.CONVERT and config.experts:
        observed_experts.check_observed(model, config)
    if config.experts is None and config.step != QuantizationStep.PREPARE and (line := experts.left_dense(model)):
        warnings.warn(line, stacklevel=user_level())
    if config.experts:
        experts.stop_training(model)
    if config.step == QuantizationStep.PREPARE and config.experts:
        observed_experts.observe(model, _observed_spec(config))
    elif config.step != QuantizationStep.PREPARE:
        if config.experts:
            observed_experts.quantize_all(model, config)
        observed_experts.finish(model)


def _changed(model: nn.Module, chosen: list[nn.Module], config: NVFP4WeightOnlyConfig) -> set[nn.Module]:
    """Return the linears, and with ``experts=True`` the experts, that a call changes."""
    converts = config.step == QuantizationStep.CONVERT
    linears = {each for each in chosen if not converts or isinstance(each, ObservedLinear)}
    return linears | {each for each in model.modules() if config.experts and experts.is_experts(each)}


def _warn_of_codes(chosen: list[nn.Module], config: NVFP4WeightOnlyConfig) -> None:
    """Warn once of weights that trained in NVFP4 by another spec than the config's, because they keep their codes."""
    spec = stored_spec(config.weight)
    other = [each for each in chosen if trained_in_nvfp4(each) and each.weight.spec != spec]  # type: ignore[union-attr]
    if other:
        warnings.warn(
            f"{len(other)} weights trained in NVFP4 and keep their codes: the config's settings for weights have no "
            "effect on them",
            stacklevel=user_level(),
        )


def _observed_spec(config: NVFP4WeightOnlyConfig) -> QuantizeSpec:
    return config.activation or config.weight


def _is_ready(module: nn.Module, config: NVFP4WeightOnlyConfig) -> bool:
    """Return True if the linear can be quantized, or observed in the prepare step; otherwise raise an error."""
    linear = _checked_codes(module, config) if trained_in_nvfp4(module) else quantizable(module)
    if config.step == QuantizationStep.PREPARE:
        check_observable(linear)
    _check_backend(linear.weight, _backend(config))  # before a calibration starts
    return True


def _checked_codes(module: nn.Module, config: NVFP4WeightOnlyConfig) -> nn.Linear:
    """Return a linear whose weight trained in NVFP4, and keeps its codes; raise a ValueError if they do not fit."""
    assert isinstance(module, nn.Linear) and isinstance(module.weight, NVFP4Tensor)
    if config.weighted or config.weight.hadamard_sign != module.weight.spec.hadamard_sign:
        raise ValueError(
            f"{module} trained in NVFP4 and keeps its codes, so that a scale search or a Hadamard transform of the "
            "weight is not possible: leave them out of the config, or give the linear dequantize() of its weight first"
        )
    return module


def _is_observed(module: nn.Module, config: NVFP4WeightOnlyConfig) -> bool:
    """Return whether the convert step applies to the module; raise an error if it cannot convert it."""
    if not isinstance(module, ObservedLinear):
        return False
    refuse_shards(module, [module])
    _check_same_transform(module, _observed_spec(config))
    _check_backend(module.weight, _backend(config))
    module.check_observed()
    if config.weighted:
        module.check_squares(module)
    return True


def _backend(config: NVFP4WeightOnlyConfig) -> ProductBackend:
    backend = config.product_backend if isinstance(config, NVFP4Config) else ProductBackend.AUTO
    assert isinstance(backend, ProductBackend)
    return backend


def _convert(module: ObservedLinear, plan: Plan, config: NVFP4WeightOnlyConfig) -> nn.Module:
    """Quantize an observed linear. Linears that share a weight use their largest amax, so that none of them clips."""
    if module in plan.dense:
        return module.stop_observing()
    group = [each for each in plan.tied.get(module, [module]) if isinstance(each, ObservedLinear)]
    fields = {}
    if isinstance(config, NVFP4Config) and not config.activation.row_scaled:
        fields["activation_amax"] = torch.stack([each.amax_for(config) for each in group]).amax()
    squares = torch.stack([each.activation_squares for each in group]).sum(dim=0)
    for each in group:
        each.stop_observing()
    return _quantize_linear(module, plan, config, squares if config.weighted else None, **fields)


def _quantize_linear(
    module: nn.Module, plan: Plan, config: NVFP4WeightOnlyConfig, squares: Tensor | None, **fields: Any
) -> nn.Module:
    """Quantize the weight of the module and of all modules that share it, unless it is done or left dense.

    A weight that trained in NVFP4 keeps its codes.

    squares: weights of the columns' errors in the scale search: the sum of squares of each column's inputs.
    """
    if module in plan.dense or module in plan.done:
        return module
    fields |= config.fields
    if trained_in_nvfp4(module):
        quantized = _checked_codes(module, config).weight.detach()
        assert isinstance(quantized, NVFP4Tensor)
    else:
        amax = _shared_amax(module, plan, config.weight)
        weight = quantizable(as_linear(module)).weight.detach()
        quantized = (
            quantize(weight, config.weight, amax=amax)
            if squares is None
            else quantize_weighted(weight, config.weight, squares, amax)
        )
    parameter = nn.Parameter(quantized._replace(**fields), requires_grad=False)
    for linear in plan.tied.get(module, [module]):
        set_weight(linear, parameter)
        plan.done.add(linear)
    return module


def _shared_amax(module: nn.Module, plan: Plan, spec: QuantizeSpec) -> Tensor | None:
    """Return the largest amax of the weights that share a per-tensor scale with a module's; None if none does."""
    group = plan.groups.get(module)
    if group is None or spec.row_scaled or any(trained_in_nvfp4(each) for each in group):
        return None
    if module not in plan.amax:
        weights = [as_linear(each).weight.detach() for each in group]
        amax = torch.stack([own_amax(weight, spec, None, 0).to(weights[0].device) for weight in weights]).amax()
        plan.amax.update(dict.fromkeys(group, amax))
    return plan.amax[module]


def set_weight(linear: nn.Module, weight: NVFP4Tensor | nn.Parameter) -> None:
    """Set the NVFP4 weight of a linear; a plain nn.Linear becomes an NVFP4Linear."""
    dense_linear(linear)
    linear.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
    if type(linear) is nn.Linear:
        linear.__class__ = NVFP4Linear


def _check_same_transform(module: ObservedLinear, spec: QuantizeSpec) -> None:
    """Raise a ValueError for another transform than the observed one, under which the observed amax could clip."""
    prepared, now = ("None" if s is None else f"{s:#06x}" for s in (module.hadamard_sign, spec.hadamard_sign))
    if prepared != now:
        raise ValueError(
            f"{module} was prepared with hadamard_sign {prepared}, and its amax is not valid for {now}: convert with "
            "the specs of the prepare step, or prepare and calibrate the dense model again with these specs"
        )


def _check_backend(weight: torch.Tensor, backend: ProductBackend) -> None:
    """Check the backend before the first product. A weight on the CPU may still move to another device."""
    if weight.device.type == "cuda":
        check_backend(backend, weight.device, weight.dtype)
    elif weight.device.type != "meta":
        check_installed(backend)


def quantizable(module: nn.Module) -> nn.Linear:
    """Return the module if it is a linear with a dense weight that can be quantized; otherwise raise an error."""
    if not is_linear(module):
        raise TypeError(f"NVFP4 configs quantize nn.Linear, not {module}: exclude it with quantize_'s filter_fn")
    refuse_shards(module, [module])
    weight = module.weight
    if isinstance(module, ObservedLinear):
        raise ValueError(
            f'{module} is prepared, and its observations would be lost: finish with NVFP4Config(step="convert"), '
            "or undo the step with stop_observing() of each ObservedLinear"
        )
    if isinstance(weight, NVFP4Tensor):
        codes = "quantize_(model, NVFP4WeightOnlyConfig()) takes the codes that it trained, or " * weight.requires_grad
        raise ValueError(f"{module} is NVFP4 already: {codes}start from the dense model")
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
