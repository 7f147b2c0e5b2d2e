"""SGLang's linears with NVFP4 weights: SGLang's loaders fill their parameters, our operators multiply."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a16_nvfp4 import (
    CompressedTensorsW4A16Fp4,
)
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4LinearMethod, ModelOptNvFp4A16LinearMethod
from torch import Tensor

from nvfp4_tensor.integrations import serving
from nvfp4_tensor.integrations.loading import COMPRESSED, Loader, Served
from nvfp4_tensor.integrations.serving import Setting, tell
from nvfp4_tensor.numerics.layout import BLOCK

logger = logging.getLogger(__name__)


def not_served() -> str:
    """Return why SGLang's own kernels serve on this device, or "". Not asked before a process has its device."""
    if not torch.cuda.is_available():
        return serving.cannot_serve("cpu", None)
    return serving.cannot_serve("cuda", torch.cuda.get_device_capability())


class _Served(Served):
    """What the methods share. SGLang's own ``create_weights`` registers the parameters."""

    def _process(self, layer: Any, quantizes: bool) -> None:
        self.quantizes_activations = quantizes and serving.setting() is Setting.AS_CHECKPOINT
        self.adopt(layer, getattr(layer, "prefix", "") or type(layer).__name__)

    def _multiply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return serving.linear(x, self.weight(layer), bias)


def _modelopt(original: Any, quantizes: bool) -> type:
    """Return a subclass of SGLang's method for ModelOpt's linears, of its name: SGLang's loaders go by that."""

    class Method(_Served, original):  # type: ignore[misc, valid-type]
        def __new__(cls, quant_config: Any) -> Any:
            why = not_served()
            if not why and (quant_config.is_awq or quant_config.group_size != BLOCK):
                why = "AWQ's scales of activations, or another group size"
            if why:
                tell(logger, why)
                return original(quant_config)
            return super().__new__(cls)

        def __init__(self, quant_config: Any) -> None:
            self.quant_config = quant_config  # SGLang's own __init__ asks for its backends

        def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
            loader = Loader(layer, kwargs.pop("weight_loader"))
            original.create_weights(self, layer, *args, weight_loader=loader, **kwargs)
            self.expect(layer)

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

        def __new__(cls, has_input_global_scale: bool = False) -> Any:
            if why := not_served():
                tell(logger, why)
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
            self.expect(layer)

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
