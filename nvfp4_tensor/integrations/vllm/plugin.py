"""Check that vLLM is what the plug-in was written for, and put our linears and experts in place of its own."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

import vllm
import vllm.envs
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization import modelopt, register_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as ct_experts,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from nvfp4_tensor import __version__
from nvfp4_tensor.integrations.serving import SETTING, Setting, refuse_unread, setting, why_not

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
    """Yield what the plug-in relies on and this vLLM does not have. Other releases have other methods of layers."""
    if not vllm.__version__.startswith(WRITTEN_FOR):
        yield f"this is vLLM {vllm.__version__}"
    builders = getattr(modelopt, "LINEAR_METHOD_BUILDERS", None)
    if not isinstance(builders, dict):
        yield "modelopt has no LINEAR_METHOD_BUILDERS"
    elif taken := sorted(set(builders) & set(ALGORITHMS)):
        yield f"another plug-in serves {', '.join(taken)}"
