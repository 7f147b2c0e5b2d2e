"""vLLM's experts with NVFP4 weights, which our grouped product multiplies."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.layers.fused_moe import FusedMoEConfig, FusedMoEMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as ct_experts,
)
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config, ModelOptNvFp4FusedMoE

from nvfp4_tensor.integrations import serving
from nvfp4_tensor.integrations.loading import COMPRESSED, EXPERTS, Loader, Served
from nvfp4_tensor.integrations.serving import Combine, Setting, tell
from nvfp4_tensor.integrations.vllm.linears import logger, not_served
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


class _Experts(Served, FusedMoEMethodBase):
    """What both formats share. The parameters are those of vLLM's own method, which this class is mixed into."""

    use_global_sf = False
    """The static scales are those of the experts of this rank."""
    supports_pre_processed_weights = False

    def _start(self, moe: FusedMoEConfig, use_a16: bool) -> None:
        FusedMoEMethodBase.__init__(self, moe)  # vLLM's own __init__ chooses kernels
        self.use_a16 = use_a16
        self.quantizes_activations = not use_a16 and serving.setting() is Setting.AS_CHECKPOINT
        self.combine = Combine(moe.activation.value)

    @property
    def supports_eplb(self) -> bool:
        """False: balancing moves experts between ranks, and swizzled scales of several experts can share a tile."""
        return False

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Register vLLM's own parameters."""
        if any(getattr(layer, f"swiglu_{name}", None) is not None for name in ("limit", "alpha", "beta")):
            raise NotImplementedError(
                f"{layer.layer_name}: nvfp4_tensor has no clamped activation of experts: set {serving.SETTING}=0"
            )
        loader = Loader(layer, kwargs.pop("weight_loader"), experts=True)
        super().create_weights(layer, *args, weight_loader=loader, **kwargs)  # type: ignore[safe-super]  # vLLM's
        self.expect(layer, EXPERTS)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Put the weights in our layout in place of what was loaded: see :meth:`Served.adopt`."""
        self.adopt_experts(layer, layer.layer_name, self.moe.is_act_and_mul)

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
        on_input = layer.apply_router_weight_on_input
        options = {"expert_map": layer.expert_map, "weights_on_input": on_input}
        return self.sum_experts(layer, x, topk_weights, topk_ids, self.combine, **options)


class ModelOptNVFP4TensorExperts(_Experts, ModelOptNvFp4FusedMoE):
    """Experts of a ModelOpt checkpoint. Where we do not serve, an instance is vLLM's own method."""

    def __new__(cls, quant_config: ModelOptNvFp4Config, moe_config: FusedMoEConfig) -> Any:
        why = experts_not_served(moe_config)
        if not why and quant_config.moe_activation_override is not None:
            why = "quantization_config.moe.activation was given"
        if not why and quant_config.group_size != BLOCK:
            why = f"group_size {quant_config.group_size} is not {BLOCK}"
        if why:
            tell(logger, why, "experts")
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
            tell(logger, why, "experts")
            return _CompressedTensorsExperts(moe, layer_name, use_a16)
        return super().__new__(cls)

    def __init__(self, moe: FusedMoEConfig, layer_name: str | None = None, use_a16: bool = False) -> None:
        self._start(moe, use_a16)
        self.group_size = BLOCK
