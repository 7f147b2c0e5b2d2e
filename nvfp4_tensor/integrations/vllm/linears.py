"""vLLM's linears with NVFP4 weights: vLLM's loaders fill their parameters, our operators multiply."""

from __future__ import annotations

from typing import Any

import torch
import vllm.envs
import vllm.platforms
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.parameter import ModelWeightParameter, PerTensorScaleParameter

from nvfp4_tensor.integrations import serving
from nvfp4_tensor.integrations.loading import COMPRESSED, MODELOPT, Loader, Names, Served
from nvfp4_tensor.integrations.serving import Setting, tell
from nvfp4_tensor.numerics.layout import BLOCK

logger = init_logger("vllm.nvfp4_tensor")  # vLLM prints the lines of its own loggers


def not_served(backend: str = "auto") -> str:
    """Return why vLLM's own kernels serve here, or "".

    backend: the kernels that the user has asked vLLM for.
    """
    platform = vllm.platforms.current_platform
    device = "cpu" if platform.is_cpu() else "cuda" if platform.is_cuda() else platform.device_type
    found = platform.get_device_capability() if device == "cuda" else None
    if why := serving.cannot_serve(device, None if found is None else (found.major, found.minor)):
        return why
    if vllm.envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT is set, and our kernels sum in an order that depends on the number of tokens"
    return "" if backend == "auto" else f"the backend {backend} was asked for"


def asked_for() -> str:
    """Return the kernels of NVFP4 linears that vLLM's options name, or "auto"."""
    config = get_current_vllm_config_or_none()
    if config is None:
        return "auto"
    by_kind = config.kernel_config.linear_backend_per_quant or {}
    return by_kind.get("nvfp4", config.kernel_config.linear_backend)


@register_weight_loader_v2_supported_method
class NVFP4TensorLinearMethod(Served, LinearMethodBase):
    """A linear whose weight vLLM's loaders fill with packed codes and scales, and which our operators multiply."""

    def __init__(self, prefix: str, names: Names, quantizes_activations: bool, has_input_scale: bool) -> None:
        """quantizes_activations: whether the checkpoint is W4A4."""
        self.prefix, self.names, self.has_input_scale = prefix, names, has_input_scale
        # Latent attention reads this weight as the product with an identity matrix, which quantization would round.
        keeps = serving.setting() is Setting.AS_CHECKPOINT and not prefix.endswith("kv_b_proj")
        self.quantizes_activations = quantizes_activations and keeps

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register what the loaders fill."""
        if input_size_per_partition % BLOCK:
            raise ValueError(
                f"{self.prefix}: {input_size_per_partition} of {input_size} columns on this rank are not a multiple "
                f"of {BLOCK}: use fewer ranks of tensor parallelism"
            )
        loader = Loader(layer, extra_weight_attrs["weight_loader"])
        rows, columns, parts = sum(output_partition_sizes), input_size_per_partition, len(output_partition_sizes)
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition = columns
        layer.output_size_per_partition = rows
        layer.params_dtype = params_dtype
        qdata = torch.empty(rows, columns // 2, dtype=torch.uint8)
        scale = torch.empty(rows, columns // BLOCK, dtype=torch.float8_e4m3fn)
        for name, data in ((self.names.qdata, qdata), (self.names.scale, scale)):
            parameter = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
            layer.register_parameter(name, parameter)
        for name in (self.names.factor, *([self.names.input_scale] if self.has_input_scale else [])):
            data = torch.empty(parts, dtype=torch.float32)
            layer.register_parameter(name, PerTensorScaleParameter(data=data, weight_loader=loader))
        self.expect(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Put the weight in our layout in place of what was loaded: see :meth:`Served.adopt`."""
        if getattr(layer, "_retain_weight_for_gather", False):
            raise NotImplementedError(
                f"{self.prefix}: this model gathers rows of the weight, which nvfp4_tensor's layout does not allow: "
                f"set {serving.SETTING}=0"
            )
        self.adopt(layer, self.prefix)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x (..., K) @ w^T + bias: (..., N)."""
        return serving.linear(x, self.weight(layer), bias)


# --- which linears ---------------------------------------------------------------------------------------------------


def build(algorithm: str, quantizes_activations: bool, config: Any, prefix: str) -> LinearMethodBase:
    """Return our method for a linear of ModelOpt's where we serve, vLLM's own elsewhere."""
    why = not_served(asked_for())
    if not why and config.group_size != BLOCK:
        why = f"group_size {config.group_size} is not {BLOCK}"
    if why:
        tell(logger, why)
        return modelopt.ModelOptLinearMethod(*modelopt.resolve(algorithm, config, prefix))
    return NVFP4TensorLinearMethod(prefix, MODELOPT, quantizes_activations, has_input_scale=True)


class NVFP4TensorCompressedTensorsConfig(CompressedTensorsConfig):
    """vLLM's configuration of compressed-tensors, with our method for NVFP4 linears where we serve."""

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Return our method for an NVFP4 linear, and vLLM's for all else."""
        if isinstance(layer, (LinearBase, ParallelLMHead)) and (scheme := self._nvfp4_scheme(layer, prefix)):
            if not (why := not_served(asked_for())):
                static = scheme.get("input_activations") is not None
                return NVFP4TensorLinearMethod(prefix, COMPRESSED, static, has_input_scale=static)
            tell(logger, why)
        return super().get_quant_method(layer, prefix)

    def _nvfp4_scheme(self, layer: Any, prefix: str) -> dict[str, Any] | None:
        """Return the layer's scheme if it is NVFP4 and nothing else: no transforms, no quantized outputs."""
        if self.transform_config is not None and self.transform_config.config_groups:
            return None
        try:
            scheme = self.get_scheme_dict(layer, prefix)
        except ValueError:  # vLLM leaves such a head dense, and reports such a linear
            return None
        if not scheme or not self._is_nvfp4_format(scheme.get("weights")) or scheme.get("output_activations"):
            return None
        inputs = scheme.get("input_activations")
        return scheme if inputs is None or self._is_nvfp4_format(inputs) else None
