"""What quantize_ does to a linear, by each config."""

from __future__ import annotations

import functools

import torch
from torchao.quantization.quantize_.common.quantization_step import QuantizationStep
from torchao.quantization.transform_module import register_quantize_module_handler

from nvfp4_tensor.matmul.backends import check_backend, check_installed
from nvfp4_tensor.numerics.choices import ProductBackend
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.pickles import pin
from nvfp4_tensor.quantization.config import NVFP4Config, NVFP4WeightOnlyConfig
from nvfp4_tensor.quantization.observer import ObservedLinear
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor, quantize


@functools.partial(pin, loadable=False)
class NVFP4Linear(torch.nn.Linear):
    """An nn.Linear with an NVFP4 weight; only its repr is its own."""

    def extra_repr(self) -> str:
        weight = self.weight
        kind = f"NVFP4 ({weight.describe()})" if isinstance(weight, NVFP4Tensor) else f"dense {weight.dtype}"
        return f"{super().extra_repr()}, weight={kind}"


@register_quantize_module_handler(NVFP4WeightOnlyConfig)
def _quantize_weight(module: torch.nn.Module, config: NVFP4WeightOnlyConfig) -> torch.nn.Module:
    return _quantize_linear(module, config.weight, None)


@register_quantize_module_handler(NVFP4Config)
def _quantize_weight_and_activation(module: torch.nn.Module, config: NVFP4Config) -> torch.nn.Module:
    assert isinstance(config.product_backend, ProductBackend)
    if config.step == QuantizationStep.PREPARE:
        linear = quantizable(module)
        _check_backend(linear.weight, config.product_backend)  # now, not after the calibration
        return ObservedLinear.observe(linear, config.activation)
    if config.step == QuantizationStep.CONVERT:
        if not isinstance(module, ObservedLinear):
            return module
        _check_same_transform(module, config.activation)
        _check_backend(module.weight, config.product_backend)  # before stop_observing drops what was observed
        fields = {"activation_amax": module.amax_at(config.percentile), "product_backend": config.product_backend}
        return _quantize_linear(module.stop_observing(), config.weight, config.activation, **fields)
    config._check_percentile_is_used()
    return _quantize_linear(module, config.weight, config.activation, product_backend=config.product_backend)


def _quantize_linear(
    module: torch.nn.Module, weight_spec: QuantizeSpec, activation_spec: QuantizeSpec | None, **fields
) -> torch.nn.Module:
    linear = quantizable(module)
    _check_backend(linear.weight, fields.get("product_backend", ProductBackend.AUTO))
    quantized = quantize(linear.weight.detach(), weight_spec)._replace(activation_spec=activation_spec, **fields)
    linear.weight = torch.nn.Parameter(quantized, requires_grad=False)
    if type(linear) is torch.nn.Linear:
        linear.__class__ = NVFP4Linear
    return linear


def _check_same_transform(module: ObservedLinear, spec: QuantizeSpec) -> None:
    """The amax observed is of the numbers behind the transform: those of another could clip."""
    prepared, now = ("None" if s is None else f"{s:#06x}" for s in (module.hadamard_sign, spec.hadamard_sign))
    if prepared != now:
        raise ValueError(
            f"{module} was prepared with hadamard_sign {prepared}, and its amax does not hold for {now}: convert with "
            "the specs of the prepare step, or prepare and calibrate the dense model again with these"
        )


def _check_backend(weight: torch.Tensor, backend: ProductBackend) -> None:
    """What is known before the first product: a weight still on a CPU may yet move to another device."""
    if weight.device.type == "cuda":
        check_backend(backend, weight.device, weight.dtype)
    elif weight.device.type != "meta":
        check_installed(backend)


def quantizable(module: torch.nn.Module) -> torch.nn.Linear:
    """The module, if it is a linear with a dense weight that NVFP4 takes."""
    if not isinstance(module, torch.nn.Linear):
        raise TypeError(f"NVFP4 configs quantize nn.Linear, not {module}: leave it out with quantize_'s filter_fn")
    weight = module.weight
    if isinstance(module, ObservedLinear):
        raise ValueError(
            f'{module} is prepared, and what it observed would be lost: finish with NVFP4Config(step="convert"), '
            "or undo it with stop_observing() of each ObservedLinear"
        )
    if isinstance(weight, NVFP4Tensor):
        raise ValueError(f"{module} is NVFP4 already: start from the dense model")
    if torch.nn.utils.parametrize.is_parametrized(module, "weight"):
        raise TypeError(
            f"the weight of {module} is parametrized: remove_parametrizations(module, 'weight') of "
            "torch.nn.utils.parametrize first"
        )
    if type(weight.data) is not torch.Tensor or weight.dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(
            f"{module} has a weight of {type(weight.data).__name__}, {weight.dtype}: NVFP4 takes plain tensors of "
            "bfloat16, float16 or float32, so cast the model first"
        )
    return module
