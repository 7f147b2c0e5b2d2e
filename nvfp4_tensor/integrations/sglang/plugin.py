"""Check that SGLang is what the plug-in was written for, and hook our linears and experts in place of its own."""

from __future__ import annotations

from collections.abc import Iterator

import sglang
from sglang.srt.layers.quantization import modelopt_quant
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from nvfp4_tensor.integrations.serving import Setting, refuse_unread, setting, why_not

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
    """Yield what the plug-in relies on and this SGLang does not have. Other releases have other methods of layers."""
    if sglang.__version__ != WRITTEN_FOR:
        yield f"this is SGLang {sglang.__version__}"
