"""SGLang's experts with NVFP4 weights: SGLang's loaders fill their parameters, our grouped product multiplies.

Where we do not serve a layer, its method behaves as SGLang's own, which it is a subclass of. To SGLang ours is the
Marlin backend: that one has local ids of experts, and multiplies by the routed scaling factor itself.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.moe import MoeRunnerBackend, MoeRunnerConfig, get_moe_a2a_backend, get_moe_runner_backend
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.quantization import modelopt_quant
from sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a16_nvfp4_moe import (
    CompressedTensorsW4A16Nvfp4MoE,
)
from sglang.srt.runtime_context import get_context
from torch import Tensor, nn

from nvfp4_tensor.integrations import serving
from nvfp4_tensor.integrations.loading import Loader, has_all_experts, loads_of
from nvfp4_tensor.integrations.serving import Activations, Combine, Loaded, Projection, Setting
from nvfp4_tensor.integrations.sglang.linears import COMPRESSED, MODELOPT, not_served, tell
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


class _Loader(Loader):
    """Records only experts of this rank, for SGLang's loader does not say which it has skipped."""

    def __call__(self, param: nn.Parameter, loaded_weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self._layer()
        expert = kwargs.get("expert_id", args[2] if len(args) > 2 else None)
        elsewhere = (
            expert is not None
            and not getattr(param, "_sglang_require_global_experts", False)
            and layer._map_global_expert_id_to_local_expert_id(expert) == -1
        )
        before = loads_of(param)
        result = super().__call__(param, loaded_weight, *args, **kwargs)
        if elsewhere:
            self.record(param, before)
        return result


class _ServedExperts:
    """What both formats share. The class behind it is SGLang's, which registers the parameters."""

    names = MODELOPT
    divides = False
    served = False
    """Whether this plug-in serves the layer."""
    quantizes = False
    activations: dict[str, Activations]

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        if self.served and (why := layer_not_served(layer)):
            tell(why, "experts")
            self.served = False
            self._leave_to_sglang()
        if not self.served:
            super().create_weights(layer, *args, **kwargs)  # type: ignore[misc]
            return
        loader = _Loader(layer, kwargs.pop("weight_loader"), experts=True)
        super().create_weights(layer, *args, weight_loader=loader, **kwargs)  # type: ignore[misc]
        _, scale, factor, input_scale = self.names
        for which in ("w13", "w2"):
            for name in (scale, factor, input_scale):
                parameter = getattr(layer, f"{which}_{name}", None)
                if parameter is not None:
                    parameter.data.fill_(torch.nan)  # until it is loaded
            layer._parameters.pop(f"{which}_blockscale_swizzled", None)

    def _leave_to_sglang(self) -> None:
        """Make up for what SGLang's own __init__ would have done."""

    def create_moe_runner(self, layer: Any, moe_runner_config: MoeRunnerConfig) -> None:
        if self.served:
            self.moe_runner_config, self.runner = moe_runner_config, None
        else:
            super().create_moe_runner(layer, moe_runner_config)  # type: ignore[misc]

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.served:
            self._process(layer)
        else:
            super().process_weights_after_loading(layer)  # type: ignore[misc]

    def _process(self, layer: Any) -> None:
        """Put the weights in our layout in place of what was loaded. A second call does nothing.

        Raises:
            ValueError: see :func:`serving.weight_of`; or experts were not loaded.
        """
        if hasattr(layer, "nvfp4_w13_scale"):
            return
        self.activations = {}
        weights = {which: self._weight(layer, which) for which in ("w13", "w2")}
        for which, weight in weights.items():
            self.activations[which] = Activations.of(weight)
            for name in self.names:
                layer._parameters.pop(f"{which}_{name}", None)
            new = {
                f"{which}_weight": weight.qdata,
                f"nvfp4_{which}_scale": weight.scale,
                f"nvfp4_{which}_factor": weight.per_tensor_scale,
                f"nvfp4_{which}_amax": weight.activation_amax,
            }
            for name, data in new.items():
                if data is not None:
                    layer.register_parameter(name, nn.Parameter(data, requires_grad=False))

    def _weight(self, layer: Any, which: str) -> Any:
        name, codes_name, scale_name, factor_name, input_name = self._names(layer, which)
        codes = getattr(layer, codes_name)
        shards = ["w2"] if which == "w2" else ["w1", "w3"] if layer.moe_runner_config.is_gated else ["w1"]
        count, parts = codes.shape[0], len(shards)
        if not has_all_experts(codes, shards, count):
            raise ValueError(
                f"{name}: {codes_name} was not loaded for all of {count} experts: experts that the checkpoint keeps "
                "dense must be in `ignore` of its quantization_config"
            )
        inputs = getattr(layer, input_name, None)
        quantizes = self.quantizes and serving.setting() is Setting.AS_CHECKPOINT
        if inputs is not None and (not quantizes or not loads_of(inputs)):
            inputs = None
        return serving.weight_of(
            Loaded(
                name=name,
                qdata=codes.data,
                scale=getattr(layer, scale_name).data,
                factors=getattr(layer, factor_name).data.reshape(count, parts),
                rows=[codes.shape[1] // parts] * parts,
                # of all ranks' experts where SGLang has those: the largest is the same on each rank
                input_scales=None if inputs is None else inputs.data.reshape(-1, parts),
                divides=self.divides,
                quantizes_activations=quantizes,
            ),
            layer.params_dtype,
        )

    def _names(self, layer: Any, which: str) -> list[str]:
        return [f"{getattr(layer, 'layer_name', '') or type(layer).__name__}.{which}"] + [
            f"{which}_{name}" for name in self.names
        ]

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
        y = serving.experts(
            dispatched.hidden_states,
            weights,
            ids,
            self._projection(layer, "w13"),
            self._projection(layer, "w2"),
            _COMBINES[config.activation, config.is_gated],
            weights_on_input=on_input,
        )
        return StandardCombineInput(hidden_states=y * factor if factor is not None and on_input else y)

    def _projection(self, layer: Any, which: str) -> Projection:
        return Projection(
            getattr(layer, f"{which}_weight"),
            getattr(layer, f"nvfp4_{which}_scale"),
            getattr(layer, f"nvfp4_{which}_factor"),
            self.activations[which],
            getattr(layer, f"nvfp4_{which}_amax", None),
        )


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
                tell(why, "experts")
                original.__init__(self, quant_config)
                return
            self.served, self.quant_config = True, quant_config  # SGLang's own __init__ chooses kernels
            self.quantizes = not getattr(quant_config, "is_w4a16", False)
            self._lora_marlin = self.enable_flashinfer_trtllm_moe = self.use_flashinfer_trtllm_weight_layout = False

        def _leave_to_sglang(self) -> None:
            original.__init__(self, self.quant_config)

        def create_moe_runner(self, layer: Any, moe_runner_config: MoeRunnerConfig) -> None:
            super().create_moe_runner(layer, moe_runner_config)
            if self.served:
                self._moe_runner_backend = MoeRunnerBackend.MARLIN

        def _process(self, layer: Any) -> None:
            interleaved = getattr(layer, "inference_moe_w13_interleaved", False)
            if interleaved and not hasattr(layer, "nvfp4_w13_scale"):
                for name in ("w13_weight", "w13_weight_scale"):
                    parameter = getattr(layer, name)
                    parameter.data = modelopt_quant.deinterleave_w13(parameter.data, up_first=False)
            super()._process(layer)

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
        divides = True

        def __init__(self, has_input_global_scale: bool = False) -> None:
            original.__init__(self, has_input_global_scale)
            self.quantizes = has_input_global_scale
            if why := process_not_served():
                tell(why, "experts")
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
