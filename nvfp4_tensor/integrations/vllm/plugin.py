"""Check that vLLM is what the plug-in was written for, and put our linears and experts in place of its own."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import vllm
import vllm.envs
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.quantization import modelopt, register_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors as ct
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as ct_experts,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from nvfp4_tensor import __version__
from nvfp4_tensor.integrations.serving import SETTING, Setting, other_arguments, refuse_unread, setting, why_not

WRITTEN_FOR = "0.33."
ALGORITHMS = {"NVFP4": True, "W4A16_NVFP4": False}
"""ModelOpt's names, and whether each quantizes activations."""

_installed = False


def install() -> str:
    """Install the plug-in; return why it was not installed, or "" if it is or the setting is 0."""
    global _installed
    if _installed:
        return ""
    _enter_hash()
    if setting() is Setting.OFF:
        return ""
    if why := why_not(differences(), f"vLLM {WRITTEN_FOR}x"):
        return why
    # These modules read names of vLLM's that were just checked.
    from nvfp4_tensor.integrations.vllm import experts, linears

    register_quantization_config("compressed-tensors")(linears.NVFP4TensorCompressedTensorsConfig)
    for algorithm, activations in ALGORITHMS.items():
        modelopt.LINEAR_METHOD_BUILDERS[algorithm] = functools.partial(linears.build, algorithm, activations)
    modelopt.ModelOptNvFp4FusedMoE = experts.ModelOptNVFP4TensorExperts  # of mixed precision
    modelopt.ModelOptNvFp4Config.FusedMoEMethodCls = experts.ModelOptNVFP4TensorExperts
    ct_experts.CompressedTensorsW4A4Nvfp4MoEMethod = experts.CompressedTensorsNVFP4TensorExperts
    mixed, layers = modelopt.ModelOptMixedPrecisionConfig, (linear.LinearBase, ParallelLMHead, RoutedExperts)
    mixed.get_quant_method = refuse_unread(mixed.get_quant_method, layers, linear.UnquantizedLinearMethod)
    _installed = True
    return ""


def _enter_hash() -> None:
    """Let the setting and our version change the hash of vLLM's compiled graphs, which leaves quantization out."""
    vllm.envs.environment_variables[SETTING] = lambda: f"{os.environ.get(SETTING, '1')}, nvfp4-tensor {__version__}"


def differences() -> Iterator[str]:
    """Yield what the plug-in relies on and this vLLM does not have."""
    if not vllm.__version__.startswith(WRITTEN_FOR):
        yield f"this is vLLM {vllm.__version__}"
    builders = getattr(modelopt, "LINEAR_METHOD_BUILDERS", None)
    if not isinstance(builders, dict):
        yield "modelopt has no LINEAR_METHOD_BUILDERS"
    elif taken := sorted(set(builders) & set(ALGORITHMS)):
        yield f"another plug-in serves {', '.join(taken)}"
    for owner, names in _NAMES:
        for name in names.split():
            if not hasattr(owner, name):
                yield f"{owner.__name__} has no {name}"
    ct_method = ct_experts.CompressedTensorsW4A4Nvfp4MoEMethod
    for what, function, arguments in (
        ("modelopt.resolve", getattr(modelopt, "resolve", None), "algo subcfg prefix"),
        ("create_weights of linears", linear.LinearMethodBase.create_weights, _CREATE),
        ("apply of linears", linear.LinearMethodBase.apply, "self layer x bias"),
        ("get_quant_method", ct.CompressedTensorsConfig.get_quant_method, "self layer prefix"),
        ("apply of experts", FusedMoEMethodBase.apply, _APPLY_EXPERTS),
        ("ModelOpt's experts", modelopt.ModelOptNvFp4FusedMoE.__init__, "self quant_config moe_config"),
        ("compressed-tensors's experts", ct_method.__init__, "self moe layer_name use_a16"),
    ):
        yield from other_arguments(what, function, arguments)


_CREATE = "self layer input_size_per_partition output_partition_sizes input_size output_size"
_APPLY_EXPERTS = "self layer x topk_weights topk_ids shared_experts shared_experts_input"
_NAMES: Sequence[tuple[Any, str]] = (
    (vllm.envs, "environment_variables compile_factors"),
    (modelopt, "ModelOptLinearMethod build_linear_method ModelOptNvFp4Config ModelOptNvFp4FusedMoE"),
    (modelopt.ModelOptNvFp4Config, "FusedMoEMethodCls"),
    (modelopt.ModelOptMixedPrecisionConfig, "get_quant_method _resolve_quant_algo is_layer_excluded"),
    (ct.CompressedTensorsConfig, "get_scheme_dict _is_nvfp4_format get_quant_method"),
    (linear, "LinearMethodBase register_weight_loader_v2_supported_method"),
)
