"""SGLang's linears with NVFP4 weights: SGLang's loaders fill their parameters, our operators multiply."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a16_nvfp4 import (
    CompressedTensorsW4A16Fp4,
)
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4LinearMethod, ModelOptNvFp4A16LinearMethod
from torch import Tensor, nn

from nvfp4_tensor.integrations import serving
from nvfp4_tensor.integrations.loading import Loader, is_whole, loads_of
from nvfp4_tensor.integrations.serving import Activations, Loaded, Setting
from nvfp4_tensor.numerics.layout import BLOCK

logger = logging.getLogger(__name__)

MODELOPT = ("weight", "weight_scale", "weight_scale_2", "input_scale")
COMPRESSED = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")


def not_served() -> str:
    """Return why SGLang's own kernels serve on this device, or "". Not asked before a process has its device."""
    if serving.setting() is Setting.OFF:
        return f"{serving.SETTING} is 0"
    if not torch.cuda.is_available():
        return serving.cannot_serve("cpu", None)
    return serving.cannot_serve("cuda", torch.cuda.get_device_capability())


@functools.cache
def tell(why: str, what: str = "linears") -> None:
    """Log once why SGLang's own kernels serve."""
    logger.info("nvfp4_tensor leaves NVFP4 %s to SGLang's own kernels: %s", what, why)


def process(layer: Any, names: tuple[str, str, str, str], divides: bool, quantizes: bool) -> Activations:
    """Put the weight in our layout in place of what was loaded; return how activations are treated."""
    qdata, scale, factor, input_name = names
    label, parts = getattr(layer, "prefix", "") or type(layer).__name__, len(layer.logical_widths)
    for name in (qdata, scale, factor):
        if not is_whole(getattr(layer, name), parts):
            raise ValueError(
                f"{label}: {name} was not loaded, or only in part: a layer that the checkpoint keeps dense must be in "
                "`ignore` of its quantization_config"
            )
    inputs = getattr(layer, input_name, None)
    if inputs is None or not quantizes or not loads_of(inputs):
        inputs = None
    elif not is_whole(inputs, parts):
        raise ValueError(f"{label}: some input scales are missing: set {serving.SETTING}=w4a16")
    if inputs is not None and serving.differs_within(_of_file(inputs)):
        logger.warning("%s: fused weights have different input scales: the largest is used, so that none clips", label)
    weight = serving.weight_of(
        Loaded(
            name=label,
            qdata=getattr(layer, qdata).data,
            scale=getattr(layer, scale).data,
            factors=_of_file(getattr(layer, factor)),
            rows=layer.logical_widths,
            input_scales=None if inputs is None else _of_file(inputs),
            divides=divides,
            quantizes_activations=quantizes,
        ),
        layer.params_dtype,
    )
    for name in (scale, factor, input_name, qdata):
        if name in layer._parameters and name != "weight":
            delattr(layer, name)
    new = {"nvfp4_scale": weight.scale, "nvfp4_factor": weight.per_tensor_scale, "nvfp4_amax": weight.activation_amax}
    for name, data in new.items():
        if data is not None:
            layer.register_parameter(name, nn.Parameter(data, requires_grad=False))
    if qdata != "weight":
        layer.register_parameter("weight", nn.Parameter(weight.qdata, requires_grad=False))
    return Activations.of(weight)


def _of_file(scales: nn.Parameter) -> Tensor:
    """Return the scales; NaN after the first if the file has one for all of a fused weight."""
    data = scales.data.clone().reshape(-1)
    if loads_of(scales) == {None}:
        data[1:] = torch.nan
    return data


class _Served:
    """What the methods share. SGLang's own ``create_weights`` registers the parameters."""

    names = MODELOPT
    divides = False
    activations: Activations | None = None

    def _process(self, layer: Any, quantizes: bool) -> None:
        if hasattr(layer, "nvfp4_scale"):  # a second call
            return
        keeps = serving.setting() is Setting.AS_CHECKPOINT
        self.activations = process(layer, self.names, self.divides, quantizes and keeps)

    def _multiply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        assert self.activations is not None, "process_weights_after_loading comes first"
        amax = layer.nvfp4_amax if self.activations is Activations.STATIC else None
        return serving.linear(x, layer.weight, layer.nvfp4_scale, layer.nvfp4_factor, bias, self.activations, amax)


def _modelopt(original: Any, quantizes: bool) -> type:
    """Return a subclass of SGLang's method for ModelOpt's linears, of its name: SGLang's loaders go by that."""

    class Method(_Served, original):  # type: ignore[misc, valid-type]
        def __new__(cls, quant_config: Any) -> Any:
            why = not_served()
            if not why and (quant_config.is_awq or quant_config.group_size != BLOCK):
                why = "AWQ's scales of activations, or another group size"
            if why:
                tell(why)
                return original(quant_config)
            return super().__new__(cls)

        def __init__(self, quant_config: Any) -> None:
            self.quant_config = quant_config  # SGLang's own __init__ asks for its backends

        def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
            loader = Loader(layer, kwargs.pop("weight_loader"))
            original.create_weights(self, layer, *args, weight_loader=loader, **kwargs)

        def process_weights_after_loading(self, layer: Any) -> None:
            self._process(layer, quantizes)

        def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
            return self._multiply(layer, x, bias)

    Method.__name__ = Method.__qualname__ = original.__name__
    return Method


def _compressed(original: Any) -> type:
    """Return a subclass of SGLang's scheme for compressed-tensors's linears, of its name."""

    # The original is a local: SGLang's hooks replace it in the globals of every module, this one too.
    class Scheme(_Served, original):  # type: ignore[misc, valid-type]
        names = COMPRESSED
        divides = True

        def __new__(cls, has_input_global_scale: bool = False) -> Any:
            if why := not_served():
                tell(why)
                return original(has_input_global_scale)
            return super().__new__(cls)

        def create_weights(
            self,
            layer: Any,
            output_partition_sizes: list[int],
            input_size_per_partition: int,
            params_dtype: torch.dtype,
            weight_loader: Any,
            **kwargs: Any,
        ) -> None:
            sizes = output_partition_sizes, input_size_per_partition
            original.create_weights(self, layer, *sizes, params_dtype, Loader(layer, weight_loader), **kwargs)
            layer.params_dtype = params_dtype

        def process_weights_after_loading(self, layer: Any) -> None:
            self._process(layer, self.has_input_global_scale)

        def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
            return self._multiply(layer, x, bias)

    Scheme.__name__ = Scheme.__qualname__ = original.__name__
    return Scheme


REPLACEMENTS: dict[type, type] = {
    ModelOptFp4LinearMethod: _modelopt(ModelOptFp4LinearMethod, True),
    ModelOptNvFp4A16LinearMethod: _modelopt(ModelOptNvFp4A16LinearMethod, False),
    CompressedTensorsW4A16Fp4: _compressed(CompressedTensorsW4A16Fp4),
}
"""SGLang's classes, and what takes their place."""
