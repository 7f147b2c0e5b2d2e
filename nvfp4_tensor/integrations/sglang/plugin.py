"""Check that SGLang is what the plug-in was written for, and hook our linears and experts in place of its own."""

from __future__ import annotations

from collections.abc import Iterator

import sglang
from sglang.srt.layers.quantization import modelopt_quant
from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a16_nvfp4 as compressed
from sglang.srt.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w4a16_nvfp4_moe as compressed_moe,
)
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from nvfp4_tensor.integrations.serving import Setting, other_arguments, refuse_unread, setting, why_not

WRITTEN_FOR = "0.5.23"
_installed = False


def install() -> str:
    """Register the hooks; return why they were not registered, or "" if they are or the setting is 0."""
    global _installed
    if _installed or setting() is Setting.OFF:
        return ""
    if why := why_not(differences(), f"SGLang {WRITTEN_FOR}"):
        return why
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

    from nvfp4_tensor.integrations.sglang import experts, linears  # read names of SGLang's that were just checked

    for original, replacement in (linears.REPLACEMENTS | experts.REPLACEMENTS).items():
        HookRegistry.register(f"{original.__module__}.{original.__name__}", replacement, HookType.REPLACE)
    mixed, layers = modelopt_quant.ModelOptMixedPrecisionConfig, (LinearBase, ParallelLMHead, FusedMoE)
    mixed.get_quant_method = refuse_unread(mixed.get_quant_method, layers, modelopt_quant.UnquantizedLinearMethod)
    _installed = True
    return ""


def differences() -> Iterator[str]:
    """Yield what the plug-in relies on and this SGLang does not have."""
    if sglang.__version__ != WRITTEN_FOR:
        yield f"this is SGLang {sglang.__version__}"
    create = "self layer input_size_per_partition output_partition_sizes input_size output_size"
    scheme = "self layer output_partition_sizes input_size_per_partition params_dtype weight_loader"
    experts = "self layer num_experts hidden_size intermediate_size_per_partition params_dtype"
    x, dispatched = "self layer x bias", "self layer dispatch_output"
    for name in ("get_quant_method", "_resolve_quant_algo", "is_layer_excluded"):
        if not hasattr(modelopt_quant.ModelOptMixedPrecisionConfig, name):
            yield f"ModelOptMixedPrecisionConfig has no {name}"
    for owner, name, start, forward, taken in (
        (modelopt_quant, "ModelOptFp4LinearMethod", create, "apply", x),
        (modelopt_quant, "ModelOptNvFp4A16LinearMethod", create, "apply", x),
        (modelopt_quant, "ModelOptNvFp4FusedMoEMethod", experts, "apply", dispatched),
        (compressed, "CompressedTensorsW4A16Fp4", scheme, "apply_weights", x),
        (compressed_moe, "CompressedTensorsW4A16Nvfp4MoE", experts, "apply_weights", dispatched),
    ):
        found = getattr(owner, name, None)
        if found is None:
            yield f"{owner.__name__} has no {name}"
            continue
        for method, expected in (("create_weights", start), (forward, taken)):
            yield from other_arguments(f"{name}.{method}", getattr(found, method), expected)
