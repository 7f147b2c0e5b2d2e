"""SGLang's experts with NVFP4 weights: SGLang's loaders fill their parameters, our grouped product multiplies.

Where we do not serve a layer, its method behaves as SGLang's own, which it is a subclass of. To SGLang ours is the
Marlin backend: that one has local ids of experts, and multiplies by the routed scaling factor itself.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.moe import MoeRunnerBackend, MoeRunnerConfig, get_moe_a2a_backend, get_moe_runner_backend
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.quantization import modelopt_quant
from sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a16_nvfp4_moe import (
    CompressedTensorsW4A16Nvfp4MoE,
)
from sglang.srt.runtime_context import get_context
from torch import nn

from nvfp4_tensor.integrations import serving
from nvfp4_tensor.integrations.loading import COMPRESSED, EXPERTS, Loader, Served
from nvfp4_tensor.integrations.serving import Combine, Setting, tell
from nvfp4_tensor.integrations.sglang.linears import logger, not_served
from nvfp4_tensor.numerics.layout import BLOCK

_COMBINES = {
    ("silu", True): Combine.SILU,
    ("silu", False): Combine.SILU_NO_MUL,
    ("relu2", False): Combine.RELU2_NO_MUL,
}
"""Ours by SGLang's activation and ``is_gated``: those of its Marlin kernels."""

_MOVE_EXPERTS = ("enable_eplb", "ep_num_redundant_experts", "enable_paged_experts", "kt_weight_path")
"""SGLang's options with which weights of experts move between ranks, or between memories."""


def process_not_served() -> str:
    """Return why SGLang's own kernels serve the experts of this process, or ""."""
    if why := not_served():
        return why
    if not get_moe_runner_backend().is_auto():
        return f"--moe-runner-backend {get_moe_runner_backend().value} was named"
    if not get_moe_a2a_backend().is_none():
        return "experts that are exchanged between ranks (--moe-a2a-backend)"
    option = get_context().config_leaf
    for name in _MOVE_EXPERTS:
        if option(name):
            return f"experts that move (--{name.replace('_', '-')})"
    if (option("dwdp_size") or 1) > 1:
        return "experts that move (--dwdp-size)"
    return "experts with LoRA adapters" if option("enable_lora") or option("lora_paths") else ""


def layer_not_served(layer: Any) -> str:
    """Return why SGLang's own kernels serve the experts of this layer, or ""."""
    config: MoeRunnerConfig = layer.moe_runner_config
    if (config.activation, config.is_gated) not in _COMBINES:
        return f"experts with the activation {config.activation}{'' if config.is_gated else ', not gated'}"
    if any(getattr(config, name) is not None for name in ("gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit")):
        return "experts with a clamped activation"
    if layer.with_bias:
        return "experts with a bias"
    if config.no_combine:
        return "experts whose results SGLang sums itself"
    if config.num_fused_shared_experts:
        return "shared experts that are fused with others"
    if config.hidden_size % BLOCK or layer.intermediate_size_per_partition % BLOCK:
        return f"experts of {config.hidden_size} x {layer.intermediate_size_per_partition}, not multiples of {BLOCK}"
    return ""


def _elsewhere(layer: Any, parameter: nn.Parameter, expert: int | None) -> bool:
    """Return whether an expert is on another rank: SGLang's loader does not say which it has skipped."""
    if expert is None or getattr(parameter, "_sglang_require_global_experts", False):
        return False
    return layer._map_global_expert_id_to_local_expert_id(expert) == -1


class _ServedExperts(Served):
    """What both formats share. The class behind it is SGLang's, which registers the parameters."""

    served = False
    """Whether this plug-in serves the layer."""

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        if self.served and (why := layer_not_served(layer)):
            tell(logger, why, "experts")
            self.served = False
            self._leave_to_sglang()
        if not self.served:
            super().create_weights(layer, *args, **kwargs)  # type: ignore[misc]
            return
        self.quantizes_activations &= serving.setting() is Setting.AS_CHECKPOINT
        loader = Loader(layer, kwargs.pop("weight_loader"), experts=True, elsewhere=_elsewhere)
        super().create_weights(layer, *args, weight_loader=loader, **kwargs)  # type: ignore[misc]
        self.expect(layer, EXPERTS)
        for prefix in EXPERTS:
            layer._parameters.pop(f"{prefix}blockscale_swizzled", None)

    def _leave_to_sglang(self) -> None:
        """Make up for what SGLang's own __init__ would have done."""

    def create_moe_runner(self, layer: Any, moe_runner_config: MoeRunnerConfig) -> None:
        if self.served:
            self.moe_runner_config, self.runner = moe_runner_config, None
        else:
            super().create_moe_runner(layer, moe_runner_config)  # type: ignore[misc]

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.served:
            label = getattr(layer, "layer_name", "") or type(layer).__name__
            self.adopt_experts(layer, label, layer.moe_runner_config.is_gated)
        else:
            super().process_weights_after_loading(layer)  # type: ignore[misc]

    def _multiply(self, layer: Any, dispatched: Any) -> StandardCombineInput:
        topk, config = dispatched.topk_output, layer.moe_runner_config
        if hasattr(topk, "topk_weights"):
            ids, weights = topk.topk_ids, topk.topk_weights
        else:
            from sglang.srt.layers.moe.moe_runner.marlin import _fused_unpack_packed_topk

            ids, weights = _fused_unpack_packed_topk(topk.packed_topk_ids)
        factor, on_input = config.routed_scaling_factor, config.apply_router_weight_on_input
        if factor is not None and not on_input:
            weights = weights * factor
        combine = _COMBINES[config.activation, config.is_gated]
        y = self.sum_experts(layer, dispatched.hidden_states, weights, ids, combine, weights_on_input=on_input)
        return StandardCombineInput(hidden_states=y * factor if factor is not None and on_input else y)


def _modelopt(original: Any) -> type:
    """Return a subclass of SGLang's method for ModelOpt's experts, of its name: SGLang's loaders go by that."""

    class Method(_ServedExperts, original):  # type: ignore[misc, valid-type]
        def __init__(self, quant_config: Any) -> None:
            why = process_not_served()
            if type(self) is not Method:
                why = "experts of a method of SGLang's own"
            elif not why and not quant_config.is_checkpoint_nvfp4_serialized:
                why = "experts that SGLang quantizes itself"
            elif not why and quant_config.group_size != BLOCK:
                why = f"group_size {quant_config.group_size} is not {BLOCK}"
            if why:
                tell(logger, why, "experts")
                original.__init__(self, quant_config)
                return
            self.served, self.quant_config = True, quant_config  # SGLang's own __init__ chooses kernels
            self.quantizes_activations = not getattr(quant_config, "is_w4a16", False)
            self._lora_marlin = self.enable_flashinfer_trtllm_moe = self.use_flashinfer_trtllm_weight_layout = False

        def _leave_to_sglang(self) -> None:
            original.__init__(self, self.quant_config)

        def create_moe_runner(self, layer: Any, moe_runner_config: MoeRunnerConfig) -> None:
            super().create_moe_runner(layer, moe_runner_config)
            if self.served:
                self._moe_runner_backend = MoeRunnerBackend.MARLIN

        def process_weights_after_loading(self, layer: Any) -> None:
            interleaved = getattr(layer, "inference_moe_w13_interleaved", False)
            if self.served and interleaved and not hasattr(layer, "nvfp4_w13_scale"):
                for name in ("w13_weight", "w13_weight_scale"):
                    parameter = getattr(layer, name)
                    parameter.data = modelopt_quant.deinterleave_w13(parameter.data, up_first=False)
            super().process_weights_after_loading(layer)

        def apply(self, layer: Any, dispatch_output: Any) -> Any:
            if not self.served:
                return original.apply(self, layer, dispatch_output)
            return self._multiply(layer, dispatch_output)

    Method.__name__ = Method.__qualname__ = original.__name__
    return Method


def _compressed(original: Any) -> type:
    """Return a subclass of SGLang's scheme for compressed-tensors's experts, of its name."""

    class Scheme(_ServedExperts, original):  # type: ignore[misc, valid-type]
        names = COMPRESSED

        def __init__(self, has_input_global_scale: bool = False) -> None:
            original.__init__(self, has_input_global_scale)
            self.quantizes_activations = has_input_global_scale
            if why := process_not_served():
                tell(logger, why, "experts")
            self.served = not why

        def get_moe_runner_backend(self, layer: Any) -> Any:
            return MoeRunnerBackend.MARLIN if self.served else original.get_moe_runner_backend(self, layer)

        def apply_weights(self, layer: Any, dispatch_output: Any) -> Any:
            if not self.served:
                return original.apply_weights(self, layer, dispatch_output)
            return self._multiply(layer, dispatch_output)

    Scheme.__name__ = Scheme.__qualname__ = original.__name__
    return Scheme


REPLACEMENTS: dict[type, type] = {
    modelopt_quant.ModelOptNvFp4FusedMoEMethod: _modelopt(modelopt_quant.ModelOptNvFp4FusedMoEMethod),
    CompressedTensorsW4A16Nvfp4MoE: _compressed(CompressedTensorsW4A16Nvfp4MoE),
}
"""SGLang's classes, and what takes their place."""
