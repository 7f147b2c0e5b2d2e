"""vLLM's linears with NVFP4 weights: vLLM's loaders fill their parameters, our operators multiply."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
import vllm.envs
import vllm.platforms
from torch import Tensor, nn
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
from vllm.model_executor.utils import set_weight_attrs

from nvfp4_tensor.integrations import serving
from nvfp4_tensor.integrations.loading import Loader, is_recorded, is_whole, loads_of
from nvfp4_tensor.integrations.serving import Activations, Loaded, Setting
from nvfp4_tensor.numerics.layout import BLOCK
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

logger = init_logger("vllm.nvfp4_tensor")  # vLLM prints the lines of its own loggers


@dataclasses.dataclass(frozen=True)
class Names:
    """The parameters' names in a checkpoint, and whether scales are divisors."""

    qdata: str
    scale: str
    factor: str
    input_scale: str
    divides: bool


MODELOPT = Names("weight", "weight_scale", "weight_scale_2", "input_scale", False)
COMPRESSED = Names("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", True)


def not_served(backend: str = "auto") -> str:
    """Return why vLLM's own kernels serve here, or "".

    backend: the kernels that the user has asked vLLM for.
    """
    if serving.setting() is Setting.OFF:
        return f"{serving.SETTING} is 0"
    if vllm.envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT is set, and our kernels sum in an order that depends on the number of tokens"
    platform = vllm.platforms.current_platform
    device = "cpu" if platform.is_cpu() else "cuda" if platform.is_cuda() else platform.device_type
    found = platform.get_device_capability() if device == "cuda" else None
    why = serving.cannot_serve(device, None if found is None else (found.major, found.minor))
    return why or ("" if backend == "auto" else f"the backend {backend} was asked for")


def asked_for() -> str:
    """Return the kernels of NVFP4 linears that vLLM's options name, or "auto"."""
    config = get_current_vllm_config_or_none()
    if config is None:
        return "auto"
    by_kind = config.kernel_config.linear_backend_per_quant or {}
    return by_kind.get("nvfp4", config.kernel_config.linear_backend)


class NVFP4TensorLinearMethod(LinearMethodBase):
    """A linear whose weight vLLM's loaders fill with packed codes and scales, and which our operators multiply.

    After loading, a layer has its codes as ``weight``, and ``nvfp4_scale`` and ``nvfp4_factor``, with static
    activations also ``nvfp4_amax``. The checkpoint's own names are gone, so that nothing else reads them by mistake.
    """

    names: ClassVar[Names]

    def __init__(self, prefix: str, quantizes_activations: bool, has_input_scale: bool) -> None:
        """quantizes_activations: whether the checkpoint is W4A4 and the setting keeps it so."""
        self.prefix = prefix
        # Latent attention reads this weight as the product with an identity matrix, which quantization would round.
        self.quantizes_activations = quantizes_activations and not prefix.endswith("kv_b_proj")
        self.has_input_scale = has_input_scale
        self.activations: Activations | None = None

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
        """Register what the loaders fill. Scales are NaN until they are loaded."""
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
        by_row: dict[str, Any] = {"input_dim": 1, "output_dim": 0, "weight_loader": loader}
        qdata = torch.empty(rows, columns // 2, dtype=torch.uint8)
        layer.register_parameter(self.names.qdata, ModelWeightParameter(data=qdata, **by_row))
        scale = torch.full((rows, columns // BLOCK), torch.nan, dtype=torch.float32).to(torch.float8_e4m3fn)
        layer.register_parameter(self.names.scale, ModelWeightParameter(data=scale, **by_row))
        scalars = [self.names.factor, *([self.names.input_scale] if self.has_input_scale else [])]
        for name in scalars:
            data = torch.full((parts,), torch.nan, dtype=torch.float32)
            layer.register_parameter(name, PerTensorScaleParameter(data=data, weight_loader=loader))
        # What `--load-format dummy` writes.
        small = 1e3 if self.names.divides else 1e-3
        for name, value in ((self.names.scale, 1.0), *((name, small) for name in scalars)):
            set_weight_attrs(getattr(layer, name), {"dummy_weight_value": value})

    def process_weights_after_loading(self, layer: Any) -> None:
        """Put the weight in our layout in place of what was loaded. A second call does nothing.

        Raises:
            ValueError: see :func:`serving.weight_of`; or a reload changes how activations are quantized.
        """
        if self.names.scale not in layer._parameters and hasattr(layer, "nvfp4_scale"):
            return
        if getattr(layer, "_retain_weight_for_gather", False):
            raise NotImplementedError(
                f"{self.prefix}: this model gathers rows of the weight, which nvfp4_tensor's layout does not allow: "
                f"set {serving.SETTING}=0"
            )
        names = self.names
        factors, inputs = self._scales(layer)
        if self.quantizes_activations and serving.differs_within(inputs):
            logger.warning_once(
                "nvfp4_tensor: fused weights have different input scales (%s): their common input is quantized with "
                "the largest, so that none clips",
                self.prefix,
            )
        weight = serving.weight_of(
            Loaded(
                name=self.prefix,
                qdata=getattr(layer, names.qdata).data,
                scale=getattr(layer, names.scale).data,
                factors=factors,
                rows=layer.logical_widths,
                input_scales=inputs,
                divides=names.divides,
                quantizes_activations=self.quantizes_activations,
            ),
            layer.params_dtype,
        )
        activations = Activations.of(weight)
        if self.activations not in (None, activations):
            raise ValueError(
                f"{self.prefix}: activations were {self.activations.value}, and are {activations.value} in the "
                "checkpoint that is loaded now: start the server anew"
            )
        self.activations = activations
        for name in (names.scale, names.factor, names.input_scale):
            if name in layer._parameters:
                delattr(layer, name)
        if names.qdata != "weight":
            delattr(layer, names.qdata)
        replace(layer, "weight", weight.qdata)
        replace(layer, "nvfp4_scale", weight.scale)
        replace(layer, "nvfp4_factor", weight.per_tensor_scale)
        if weight.activation_amax is not None:
            replace(layer, "nvfp4_amax", weight.activation_amax)

    def _scales(self, layer: Any) -> tuple[Tensor, Tensor | None]:
        """Return the per-tensor scales and the input scales, NaN where the checkpoint has none.

        Raises:
            ValueError: a part of the weight was not loaded.
        """
        names, parts = self.names, len(layer.logical_widths)
        parameters = {name: getattr(layer, name) for name in (names.qdata, names.scale, names.factor)}
        factors, inputs = parameters[names.factor], getattr(layer, names.input_scale, None)
        if not any(loads_of(each) for each in parameters.values()):  # dummy weights, which nothing loads
            return factors.data, None if inputs is None else inputs.data
        for name, parameter in parameters.items():
            if not is_whole(parameter, parts):
                raise ValueError(
                    f"{self.prefix}: {name} was not loaded, or only in part: a layer that the checkpoint keeps dense "
                    "must be in `ignore` of its quantization_config"
                )
        if inputs is None or not self.quantizes_activations or (is_recorded(inputs) and not loads_of(inputs)):
            return _of_file(factors), None
        if not is_whole(inputs, parts):
            raise ValueError(
                f"{self.prefix}: input scales are missing for some of its fused weights: calibrate the model again, or "
                f"set {serving.SETTING}=w4a16 to keep activations dense"
            )
        return _of_file(factors), _of_file(inputs)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x (..., K) @ w^T + bias: (..., N)."""
        assert self.activations is not None, "process_weights_after_loading comes first"
        amax = layer.nvfp4_amax if self.activations is Activations.STATIC else None
        return serving.linear(x, layer.weight, layer.nvfp4_scale, layer.nvfp4_factor, bias, self.activations, amax)


@register_weight_loader_v2_supported_method
class ModelOptNVFP4TensorLinearMethod(NVFP4TensorLinearMethod):
    """A linear of a ModelOpt checkpoint, or of ours."""

    names = MODELOPT


@register_weight_loader_v2_supported_method
class CompressedTensorsNVFP4TensorLinearMethod(NVFP4TensorLinearMethod):
    """A linear of a compressed-tensors checkpoint."""

    names = COMPRESSED


def _of_file(scales: nn.Parameter) -> Tensor:
    """Return the scales; NaN after the first if the file has one for all, as then the others have arbitrary values."""
    if loads_of(scales) != {None}:
        return scales.data
    data = scales.data.clone()
    data[1:] = torch.nan
    return data


def replace(layer: Any, name: str, data: Tensor) -> None:
    """Set a parameter that does not train."""
    if name in layer._parameters:
        getattr(layer, name).data = data
    else:
        layer.register_parameter(name, nn.Parameter(data, requires_grad=False))


def weight_of(layer: Any) -> NVFP4Tensor:
    """Return the weight that a served linear multiplies with, sharing its memory: (N, K).

    Raises:
        TypeError: the layer is not one of ours, or has not been loaded yet.
    """
    method = getattr(layer, "quant_method", None)
    if not isinstance(method, NVFP4TensorLinearMethod) or method.activations is None:
        raise TypeError(f"{type(layer).__name__} is not served by nvfp4_tensor, or was not loaded yet")
    by_token = method.activations is Activations.BY_TOKEN
    return NVFP4Tensor(
        layer.weight.data,
        layer.nvfp4_scale.data,
        layer.nvfp4_factor.data,
        layer.input_size_per_partition,
        layer.params_dtype,
        QuantizeSpec(),
        None if method.activations is Activations.DENSE else QuantizeSpec(row_scaled=by_token),
        activation_amax=layer.nvfp4_amax.data if method.activations is Activations.STATIC else None,
    )


# --- which linears ---------------------------------------------------------------------------------------------------


class Builder:
    """An entry of ModelOpt's ``LINEAR_METHOD_BUILDERS``: our method where we serve, vLLM's own elsewhere."""

    def __init__(self, algorithm: str, quantizes_activations: bool) -> None:
        self.algorithm = algorithm
        self.quantizes_activations = quantizes_activations

    def __call__(self, config: Any, prefix: str) -> LinearMethodBase:
        why = not_served(asked_for())
        if not why and config.group_size != BLOCK:
            why = f"group_size {config.group_size} is not {BLOCK}"
        if why:
            tell(why)
            return modelopt.ModelOptLinearMethod(*modelopt.resolve(self.algorithm, config, prefix))
        activations = self.quantizes_activations and serving.setting() is Setting.AS_CHECKPOINT
        return ModelOptNVFP4TensorLinearMethod(prefix, activations, has_input_scale=True)


class NVFP4TensorCompressedTensorsConfig(CompressedTensorsConfig):
    """vLLM's configuration of compressed-tensors, with our method for NVFP4 linears where we serve."""

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Return our method for an NVFP4 linear, and vLLM's for all else."""
        if isinstance(layer, (LinearBase, ParallelLMHead)) and (scheme := self._nvfp4_scheme(layer, prefix)):
            if not (why := not_served(asked_for())):
                static = scheme.get("input_activations") is not None
                activations = static and serving.setting() is Setting.AS_CHECKPOINT
                return CompressedTensorsNVFP4TensorLinearMethod(prefix, activations, has_input_scale=static)
            tell(why)
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


def tell(why: str) -> None:
    """Log once why vLLM's own kernels serve."""
    logger.info_once("nvfp4_tensor leaves NVFP4 layers to vLLM's own kernels: %s", why)
