"""Check that SGLang is what the plug-in was written for, and hook our linears in place of its own."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import sglang
from sglang.srt.layers.quantization import modelopt_quant
from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a16_nvfp4 as compressed
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from nvfp4_tensor.integrations.serving import SETTING, Setting, setting

WRITTEN_FOR = "0.5.23"
_SCHEMES = "sglang.srt.layers.quantization.compressed_tensors"
_installed = False


def install() -> str:
    """Register the hooks; return why they were not registered, or "" if they are or the setting is 0."""
    global _installed
    if _installed or setting() is Setting.OFF:
        return ""
    if found := list(differences()):
        return f"{'; '.join(found)}. This plug-in was written for SGLang {WRITTEN_FOR}: set {SETTING}=0 to silence this"
    from nvfp4_tensor.integrations.sglang import linears  # reads names of SGLang's that were just checked

    module = modelopt_quant.__name__
    for original, replacement in linears.REPLACEMENTS.items():
        HookRegistry.register(f"{original.__module__}.{original.__name__}", replacement, HookType.REPLACE)
    for target in (
        f"{module}.ModelOptNvFp4FusedMoEMethod.__init__",
        f"{_SCHEMES}.schemes.compressed_tensors_w4a16_nvfp4_moe.CompressedTensorsW4A16Nvfp4MoE.__init__",
    ):
        if _is_there(target):
            HookRegistry.register(target, tell_of_experts, HookType.BEFORE)
    _installed = True
    return ""


def _is_there(target: str) -> bool:
    import importlib

    path, name, _ = target.rsplit(".", 2)
    return hasattr(importlib.import_module(path), name)


def tell_of_experts(*_: Any, **__: Any) -> None:
    """Warn, once, that experts stay with SGLang."""
    warnings.warn("nvfp4_tensor serves linears in SGLang: its NVFP4 experts stay with its own kernels", stacklevel=3)


def differences() -> Iterator[str]:
    """Yield what the plug-in relies on and this SGLang does not have."""
    if sglang.__version__ != WRITTEN_FOR:
        yield f"this is SGLang {sglang.__version__}"
    create = ["self", "layer", "input_size_per_partition", "output_partition_sizes", "input_size", "output_size"]
    scheme = ["self", "layer", "output_partition_sizes", "input_size_per_partition", "params_dtype", "weight_loader"]
    for owner, name, start, forward in (
        (modelopt_quant, "ModelOptFp4LinearMethod", create, "apply"),
        (modelopt_quant, "ModelOptNvFp4A16LinearMethod", create, "apply"),
        (compressed, "CompressedTensorsW4A16Fp4", scheme, "apply_weights"),
    ):
        found = getattr(owner, name, None)
        if found is None:
            yield f"{owner.__name__} has no {name}"
            continue
        for method, expected in (("create_weights", start), (forward, ["self", "layer", "x", "bias"])):
            arguments = list(inspect.signature(getattr(found, method)).parameters)
            if arguments[: len(expected)] != expected:
                yield f"{name}.{method} takes {', '.join(arguments)} in place of {', '.join(expected)}"
