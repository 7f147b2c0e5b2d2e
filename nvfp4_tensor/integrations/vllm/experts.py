"""vLLM's experts with NVFP4 weights, which our grouped product multiplies."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import FusedMoEConfig, FusedMoEMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as ct_experts,
)
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config, ModelOptNvFp4FusedMoE
from vllm.model_executor.utils import set_weight_attrs

from nvfp4_tensor.integrations import serving
from nvfp4_tensor.integrations.loading import Loader, has_all_experts, loads_of
from nvfp4_tensor.integrations.serving import Activations, Combine, Loaded, Projection, Setting
from nvfp4_tensor.integrations.vllm.linears import COMPRESSED, MODELOPT, Names, not_served, replace, tell
from nvfp4_tensor.numerics.layout import BLOCK

COMBINES = {each.value for each in Combine}
"""vLLM's names of activations that we have."""

_CompressedTensorsExperts: Any = ct_experts.CompressedTensorsW4A4Nvfp4MoEMethod


def experts_not_served(moe: FusedMoEConfig) -> str:
    """Return why vLLM's own kernels serve experts of this configuration, or ""."""
    if why := not_served(moe.moe_backend):
        return why
    if moe.activation.value not in COMBINES:
        return f"experts with the activation {moe.activation.value}"
    if moe.swiglu_limit is not None or moe.swiglu_alpha is not None or moe.swiglu_beta is not None:
        return "experts with a clamped activation"
    if moe.has_bias:
        return "experts with a bias"
    if moe.is_lora_enabled:
        return "experts with LoRA adapters"
    parallel = moe.moe_parallel_config
    if parallel.use_all2all_kernels or parallel.enable_eplb:
        return "experts that are exchanged between ranks"
    if moe.intermediate_size_per_partition % BLOCK or moe.hidden_dim % BLOCK:
        return f"experts of {moe.hidden_dim} x {moe.intermediate_size_per_partition}, not multiples of {BLOCK}"
    return ""


class _Experts(FusedMoEMethodBase):
    """What both formats share. The parameters are those of vLLM's own method, which this class is mixed into."""

    names: ClassVar[Names]
    use_global_sf = False
    """The static scales are those of the experts of this rank."""
    supports_pre_processed_weights = False

    def _start(self, moe: FusedMoEConfig, use_a16: bool) -> None:
        FusedMoEMethodBase.__init__(self, moe)  # vLLM's own __init__ chooses kernels
        self.use_a16 = use_a16
        self.quantizes_activations = not use_a16 and serving.setting() is Setting.AS_CHECKPOINT
        self.combine = Combine(moe.activation.value)
        self.activations: dict[str, Activations] = {}

    @property
    def supports_eplb(self) -> bool:
        """False: balancing moves experts between ranks, and swizzled scales of several experts can share a tile."""
        return False

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Register vLLM's own parameters. Scales are NaN until they are loaded."""
        if any(getattr(layer, f"swiglu_{name}", None) is not None for name in ("limit", "alpha", "beta")):
            raise NotImplementedError(
                f"{layer.layer_name}: nvfp4_tensor has no clamped activation of experts: set {serving.SETTING}=0"
            )
        loader = Loader(layer, kwargs.pop("weight_loader"), experts=True)
        super().create_weights(layer, *args, weight_loader=loader, **kwargs)  # type: ignore[safe-super]  # vLLM's
        for which in ("w13", "w2"):
            for name, dummy in ((self.names.scale, 1.0), (self.names.factor, 1e-3), (self.names.input_scale, 1e-3)):
                parameter = getattr(layer, f"{which}_{name}")
                parameter.data.fill_(torch.nan)
                if not hasattr(parameter, "dummy_weight_value"):
                    value = 1 / dummy if self.names.divides else dummy
                    set_weight_attrs(parameter, {"dummy_weight_value": value})

    def process_weights_after_loading(self, layer: Any) -> None:
        """Put the weights in our layout in place of what was loaded. A second call does nothing.

        Raises:
            ValueError: see :func:`serving.weight_of`; or a reload changes how activations are quantized.
        """
        if f"w13_{self.names.scale}" not in layer._parameters and hasattr(layer, "nvfp4_w13_scale"):
            return
        weights = {which: self._weight(layer, which) for which in ("w13", "w2")}
        for which, weight in weights.items():
            for name in (self.names.scale, self.names.factor, self.names.input_scale):
                delattr(layer, f"{which}_{name}")
            if self.names.qdata != "weight":
                delattr(layer, f"{which}_{self.names.qdata}")
            replace(layer, f"{which}_weight", weight.qdata)
            replace(layer, f"nvfp4_{which}_scale", weight.scale)
            replace(layer, f"nvfp4_{which}_factor", weight.per_tensor_scale)
            if weight.activation_amax is not None:
                replace(layer, f"nvfp4_{which}_amax", weight.activation_amax)

    def _weight(self, layer: Any, which: str) -> Any:
        names = self.names
        qdata, scale, factor, inputs = (
            getattr(layer, f"{which}_{name}").data
            for name in (names.qdata, names.scale, names.factor, names.input_scale)
        )
        shards = ["w2"] if which == "w2" else ["w1", "w3"] if self.moe.is_act_and_mul else ["w1"]
        parts, count = len(shards), qdata.shape[0]
        name = f"{layer.layer_name}.{which}"
        inputs = self._check_loads(layer, which, shards, count, inputs)
        weight = serving.weight_of(
            Loaded(
                name=name,
                qdata=qdata,
                scale=scale,
                factors=factor.reshape(count, parts),
                rows=[qdata.shape[1] // parts] * parts,
                input_scales=None if inputs is None else inputs.reshape(count, parts),
                divides=names.divides,
                quantizes_activations=self.quantizes_activations,
            ),
            layer.params_dtype,
        )
        activations = Activations.of(weight)
        if self.activations.setdefault(which, activations) is not activations:
            raise ValueError(
                f"{name}: activations were {self.activations[which].value}, and are {activations.value} in the "
                "checkpoint that is loaded now: start the server anew"
            )
        return weight

    def _check_loads(self, layer: Any, which: str, shards: list[str], count: int, inputs: Tensor) -> Tensor | None:
        """Return the input scales, or None if the checkpoint has none; raise a ValueError if a part is missing."""
        parameters = {
            name: getattr(layer, f"{which}_{name}") for name in (self.names.qdata, self.names.scale, self.names.factor)
        }
        if not any(loads_of(each) for each in parameters.values()):  # dummy weights, which nothing loads
            return inputs
        for name, parameter in parameters.items():
            if not has_all_experts(parameter, shards, count):
                raise ValueError(
                    f"{layer.layer_name}: {which}_{name} was not loaded for all of {count} experts: experts that the "
                    "checkpoint keeps dense must be in `ignore` of its quantization_config"
                )
        scales = getattr(layer, f"{which}_{self.names.input_scale}")
        if not loads_of(scales) or not self.quantizes_activations:
            return None
        if not has_all_experts(scales, shards, count):
            raise ValueError(
                f"{layer.layer_name}: the input scales of {which} were not loaded for all of {count} experts: "
                f"calibrate the model again, or set {serving.SETTING}=w4a16 to keep activations dense"
            )
        return inputs

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Return None: none of vLLM's kernels runs."""
        return None

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """Return the weighted sum of each token's experts of this rank. vLLM runs shared experts itself."""
        return serving.experts(
            x,
            topk_weights,
            topk_ids,
            self._projection(layer, "w13"),
            self._projection(layer, "w2"),
            self.combine,
            layer.expert_map,
            layer.apply_router_weight_on_input,
        )

    def _projection(self, layer: Any, which: str) -> Projection:
        return Projection(
            getattr(layer, f"{which}_weight"),
            getattr(layer, f"nvfp4_{which}_scale"),
            getattr(layer, f"nvfp4_{which}_factor"),
            self.activations[which],
            getattr(layer, f"nvfp4_{which}_amax", None),
        )


class ModelOptNVFP4TensorExperts(_Experts, ModelOptNvFp4FusedMoE):
    """Experts of a ModelOpt checkpoint. Where we do not serve, an instance is vLLM's own method."""

    names = MODELOPT

    def __new__(cls, quant_config: ModelOptNvFp4Config, moe_config: FusedMoEConfig) -> Any:
        why = experts_not_served(moe_config)
        if not why and quant_config.moe_activation_override is not None:
            why = "quantization_config.moe.activation was given"
        if not why and quant_config.group_size != BLOCK:
            why = f"group_size {quant_config.group_size} is not {BLOCK}"
        if why:
            tell(why)
            return ModelOptNvFp4FusedMoE(quant_config, moe_config)
        return super().__new__(cls)

    def __init__(self, quant_config: ModelOptNvFp4Config, moe_config: FusedMoEConfig) -> None:
        self._start(moe_config, quant_config.quant_method == "W4A16_NVFP4")
        self.quant_config = quant_config
        self.per_token_activation = False


class CompressedTensorsNVFP4TensorExperts(_Experts, _CompressedTensorsExperts):
    """Experts of a compressed-tensors checkpoint. Where we do not serve, an instance is vLLM's own method."""

    names = COMPRESSED

    def __new__(cls, moe: FusedMoEConfig, layer_name: str | None = None, use_a16: bool = False) -> Any:
        if why := experts_not_served(moe):
            tell(why)
            return _CompressedTensorsExperts(moe, layer_name, use_a16)
        return super().__new__(cls)

    def __init__(self, moe: FusedMoEConfig, layer_name: str | None = None, use_a16: bool = False) -> None:
        self._start(moe, use_a16)
        self.group_size = BLOCK
